// Drives every kernel over odd shapes, for the sanitizers (sanitize.sh). Every buffer is an allocation of exactly its size, so
// that AddressSanitizer sees a step past its end; every call is made with one thread and with three, and must give the same bits.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <type_traits>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "args.h"
#include "stages.h"

#define DECLARE(name, type) extern "C" void name(const latte::type*);
DECLARE(latte_forward, LatteForward)
DECLARE(latte_backward, LatteBackward)
DECLARE(window_forward, WindowForward)
DECLARE(window_backward, WindowBackward)
DECLARE(kept_select, KeptSelect)
DECLARE(kept_forward, KeptForward)
DECLARE(kept_backward, KeptBackward)
DECLARE(scan_forward, ScanForward)
DECLARE(scan_backward, ScanBackward)
DECLARE(conv_forward, ConvForward)
DECLARE(conv_backward, ConvBackward)
DECLARE(filter_forward, FilterForward)
DECLARE(filter_backward, FilterBackward)
DECLARE(decay_forward, DecayForward)
DECLARE(decay_backward, DecayBackward)
DECLARE(delta_forward, DeltaForward)
DECLARE(delta_backward, DeltaBackward)
DECLARE(rglru_forward, RglruForward)
DECLARE(rglru_backward, RglruBackward)
DECLARE(rotate, Rotate)
DECLARE(swiglu_forward, SwigluForward)
DECLARE(swiglu_backward, SwigluBackward)
DECLARE(norm_forward, NormForward)
DECLARE(norm_backward, NormBackward)
DECLARE(products, Products)
DECLARE(unpack_blocks, UnpackBlocks)
DECLARE(block_product, BlockProduct)
DECLARE(token, Call)

namespace {

uint64_t seed = 1;
double uniform() {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return double(seed >> 11) / double(1ull << 53);
}

// All buffers of one call; outputs are remembered, to be compared between runs.
template <class T>
struct Pool {
    std::vector<std::unique_ptr<char[]>> held;
    std::vector<std::pair<char*, size_t>> outputs;
    std::vector<std::pair<const void*, int64_t>> doubles, singles;  // outputs by type

    char* raw(size_t bytes) {
        held.emplace_back(new char[bytes ? bytes : 1]);
        return held.back().get();
    }
    template <class U = T>
    U* random(int64_t n, double low, double high) {
        U* p = (U*)raw(size_t(n) * sizeof(U));
        for (int64_t i = 0; i < n; ++i) p[i] = U(low + (high - low) * uniform());
        return p;
    }
    template <class U = T>
    U* output(int64_t n) {
        U* p = (U*)raw(size_t(n) * sizeof(U));
        memset((void*)p, 0, size_t(n) * sizeof(U));
        remember((char*)p, n, sizeof(U));
        return p;
    }
    // Whole numbers of any sign: compared between runs, and never read as floating-point ones.
    template <class U>
    U* whole(int64_t n) {
        U* p = (U*)raw(size_t(n) * sizeof(U));
        memset((void*)p, 0, size_t(n) * sizeof(U));
        outputs.push_back({(char*)p, size_t(n) * sizeof(U)});
        return p;
    }
    void remember(char* p, int64_t n, size_t size) {
        outputs.push_back({p, size_t(n) * size});
        (size == 8 ? doubles : singles).push_back({p, n});
    }
#if defined(__SANITIZE_ADDRESS__)
    std::vector<std::pair<char*, size_t>> poisoned;
    void poison(char* p, int64_t bytes) {
        __asan_poison_memory_region(p, size_t(bytes));
        poisoned.push_back({p, size_t(bytes)});
    }
    ~Pool() {
        for (auto& p : poisoned) __asan_unpoison_memory_region(p.first, p.second);
    }
#endif
    bool finite() const {
        double sum = 0;
        for (auto& o : doubles)
            for (int64_t i = 0; i < o.second; ++i) sum += ((const double*)o.first)[i] * 0;
        for (auto& o : singles)
            for (int64_t i = 0; i < o.second; ++i) sum += double(((const float*)o.first)[i]) * 0;
        return sum == 0;
    }
    // A sum that changes with any output that does: to compare machines.
    double digest() const {
        double sum = 0;
        for (auto& o : doubles)
            for (int64_t i = 0; i < o.second; ++i) sum += ((const double*)o.first)[i] * double(i % 7 + 1);
        for (auto& o : singles)
            for (int64_t i = 0; i < o.second; ++i) sum += double(((const float*)o.first)[i]) * double(i % 7 + 1);
        return sum;
    }
    uint8_t* flags(int64_t n, double chance) {
        uint8_t* p = (uint8_t*)raw(size_t(n));
        for (int64_t i = 0; i < n; ++i) p[i] = uniform() < chance;
        return p;
    }
    // heads innermost, or outermost
    latte::View view(T* p, int64_t Tn, int64_t H, int64_t width, bool outer) {
        return outer ? latte::View{p, Tn * H * width, width, Tn * width} : latte::View{p, Tn * H * width, H * width, width};
    }
    latte::View in(int64_t B, int64_t Tn, int64_t H, int64_t width, bool outer, double low = -2, double high = 2) {
        return view(random(B * Tn * H * width, low, high), Tn, H, width, outer);
    }
    latte::View out(int64_t B, int64_t Tn, int64_t H, int64_t width) { return view(output(B * Tn * H * width), Tn, H, width, false); }
};

// Memory that stages share: activations of each row, or parts of a state. AddressSanitizer sees a step past the end of a part: what
// lies between two is poisoned.
struct Shared {
    struct Part {
        int64_t at, n;  // offset and count of a row
        size_t size;
    };
    std::vector<Part> parts;
    int64_t bytes = 0;  // of a row

    template <class U>
    int64_t part(int64_t n) {
        parts.push_back({bytes, n, sizeof(U)});
        bytes += (n * int64_t(sizeof(U)) + 127) / 64 * 64;
        return parts.back().at;
    }
    // For so many rows and copies: random numbers, or zeros that are remembered as outputs.
    template <class T>
    char* make(Pool<T>& pool, int64_t rows, int64_t copies = 1, bool output = false) const {
        char* block = pool.raw(size_t(bytes * rows * copies));
        for (int64_t copy = 0; copy < copies; ++copy)
            for (const Part& part : parts) {
                char* p = block + (copy * bytes + part.at) * rows;
                const int64_t n = part.n * rows, used = n * int64_t(part.size);
                for (int64_t i = 0; i < n; ++i) {
                    const double x = output ? 0 : 2 * uniform() - 1;
                    part.size == 8 ? void(((double*)p)[i] = x) : void(((float*)p)[i] = float(x));
                }
                if (output) pool.remember(p, n, part.size);
#if defined(__SANITIZE_ADDRESS__)
                pool.poison(p + used, (used / rows + 127) / 64 * 64 * rows - used);
#else
                (void)used;
#endif
            }
        return block;
    }
};

// A program, stage by stage.
struct Program {
    std::vector<int64_t> words;
    template <class S>
    void add(int64_t kind, const S& fields, bool beside = false) {
        const int64_t n = int64_t(sizeof(S) / 8);
        words.insert(words.end(), {kind, beside, n});
        words.insert(words.end(), (const int64_t*)&fields, (const int64_t*)&fields + n);
    }
};

int failures = 0;
bool tell = false;

// Runs `make` (which fills a pool and calls a kernel) with one and with three threads.
template <class T, class F>
void both(const char* what, F make) {
    std::vector<char> first;
    for (int64_t threads : {1, 3}) {
        Pool<T> pool;
        seed = 42;
        make(pool, threads);
        if (!pool.finite()) {
            printf("%s: not finite\n", what);
            ++failures;
        }
        if (tell && threads == 1) printf("%s %s %.9e\n", what, sizeof(T) == 8 ? "double" : "float", pool.digest());
        std::vector<char> bits;
        for (auto& o : pool.outputs) {
            bits.insert(bits.end(), o.first, o.first + o.second);
        }
        if (threads == 1)
            first = bits;
        else if (first != bits) {
            printf("%s: threads change the result\n", what);
            ++failures;
        }
    }
}

// A program with every stage: ids to logits, two layers with a window or full attention.
// Stages of mechanisms without attention, each on what the one before it gave: q, k and v are (H, K), numbers of heads (H).
template <class T>
void add_recurrent_stages(Pool<T>& p, Program& program, Shared& room, Shared& state, int64_t stream, int64_t normed, int64_t angles, int64_t H, int64_t width, bool extra) {
    using namespace latte;
    const int64_t K = 2 * width, W = H * K, D = H * width, taps = 3, none = kNone, features = 1 + K + K * (K + 1) / 2;
    auto any = [&](int64_t n) { return p.random(n, -1, 1); };
    auto x = [&](int64_t n) { return room.part<T>(n) / int64_t(sizeof(T)); };
    auto product = [&](int64_t from, int64_t inputs, int64_t act, int64_t outputs, int64_t to, int64_t added) {
        program.add(kProduct, stage::Product{from, inputs, act, 0, added, any(outputs * inputs), extra ? any(outputs) : nullptr, outputs, 0, to, nullptr, nullptr, 0, 0, none,
                                             nullptr, nullptr, 0, 0, none});
    };
    const int64_t q = x(W), k = x(W), v = x(W), gates = x(W), numbers = x(H), mixed = x(W), wide = x(H * features), tail = state.part<T>((taps - 1) * 2 * W);
    product(normed, D, kTanh, W, q, 0), product(normed, D, kSigmoid, W, k, 0), product(normed, D, kSquaredRelu, W, v, 0);
    product(normed, D, extra ? kNegativeExp : kLogSigmoid, W, gates, 0), product(normed, D, kSoftplus, H, numbers, 0);
    program.add(kTurn, stage::Turn{q, angles, H, K, K}, true);
    program.add(kConv, stage::Conv{k, k, any(W * taps), nullptr, W, taps, kSilu, 0, 2 * W, tail}, true);
    program.add(kConv, stage::Conv{v, v, any(W * taps), any(W), W, taps, kIdentity, W, 2 * W, tail});
    program.add(kMap, stage::Map{extra ? k : none, any(W), k, W, kTanh, extra ? any(W) : nullptr});
    program.add(kLerp, stage::Lerp{k, v, extra ? k : none, any(W), k, W}, true);
    program.add(kBlocks, stage::Blocks{q, mixed, any(H * K * K), H, K, K, extra});
    program.add(kBlocks, stage::Blocks{q, wide, any(K * 3), H, K, 3, 0, 1});
    program.add(kConv, stage::Conv{q, mixed, any(W * taps), nullptr, W, taps, kIdentity, 0, W, state.part<T>((taps - 1) * W), any(W * 2), 2});
    program.add(kAverage, stage::Average{q, mixed, any(W * 5), any(W * 5), any(W * 5), any(W * 5), any(W), W, 5, state.part<T>(W * 5)});
    // A gate below 0 and a small key, so that states stay bounded.
    auto matrix = [&](int64_t kind, int64_t keys, int64_t from, int64_t to) {
        const bool own = kind == 2;
        const T* rates = kind == 1 ? any(H) : nullptr;
        return stage::Matrix{from, to, v, mixed, kind ? (kind == 1 ? numbers : gates) : none, kind ? numbers : none, own ? k : none, own ? q : none, none, kind ? nullptr : p.random(H, -1, 0),
                             rates, kind == 1 ? any(H) : nullptr, H, H, H, H, keys, K, kind == 1 ? 1 : keys, 0, kind == 1, own, kind == 0, 0.5, 0.1, 0.5, state.part<T>(H * keys * (K + 1))};
    };
    program.add(kMatrix, matrix(1, K, q, k));
    program.add(kMatrix, matrix(2, K, q, k));
    // A block for each bit of the number of tokens, which is below 2^10, and the weight of the token itself.
    const int64_t blocks = 11, levels = x(H * blocks);
    product(normed, D, kSoftplus, H * blocks, levels, 0);
    stage::Matrix grown = matrix(1, K, q, k);
    grown.levels = levels, grown.blocks = blocks, grown.state = state.part<T>(blocks * W * K);
    program.add(kMatrix, grown);
    program.add(kBonus, stage::Bonus{q, k, v, mixed, any(W), H, K, K});
    const int64_t widths[] = {K, 2 * K, features, K, K, K + 1, K + 1};
    for (int64_t kind = 0; kind < 7; ++kind) {
        program.add(kFeatures, stage::Features{q, wide, kind, H, K, 1e-3, H, kind == 5 ? any(H) : nullptr, any(H)});
        if (kind == 3) continue;  // its sums may be 0
        program.add(kMatrix, matrix(0, widths[kind], wide, wide));
    }
    auto shifted = matrix(0, K, q, k);
    shifted.decay = nullptr, shifted.mean = 0, shifted.shift = 1, shifted.state = state.part<T>(H * (K + 1) * (K + 1));
    program.add(kMatrix, shifted);
    const T* beta = any(W);
    program.add(kEnergy, stage::Energy{v, none, wide, beta, H, K, 1e-6, 40.0});
    program.add(kEnergy, stage::Energy{wide, gates, mixed, beta, H, K, 1e-6, 0.0});
    program.add(kModes, stage::Modes{q, wide, any(H), any(H), any(H), any(H * W * 2), W, H, 1e-4, state.part<T>(H * 2)});
    const int64_t both = x(2 * H);
    product(normed, D, kSigmoid, 2 * H, both, 0);
    program.add(kZeroSum, stage::ZeroSum{q, k, v, gates, both, mixed, any(W), any(H), H, K, 1e-6, state.part<T>(W), state.part<double>(H), state.part<double>(H),
                                         state.part<double>(W * K), state.part<double>(2 * W * K)});
    program.add(kMap, stage::Map{q, any(W), mixed, W, kSigmoid});  // time steps are above 0
    program.add(kSelective, stage::Selective{q, mixed, k, v, gates, any(W * H), any(W), W, H, 1.0, state.part<T>(W * H)});
    program.add(kStateSpace, stage::StateSpace{q, extra ? v : mixed, any(W * H), any(W * H), extra ? any(W) : nullptr, extra ? any(W * H * 2) : nullptr, extra ? any(W) : nullptr, W, H,
                                               1e-4, 40.0, 10.0, state.part<T>(W * H * 2)});
    program.add(kKalman, stage::Kalman{v, numbers, k, q, mixed, any(H * W), any(H * W), any(H * W), any(1), H, W, 1e-4, state.part<T>(H * W), state.part<T>(H * W)});
    program.add(kWkv, stage::Wkv{k, v, mixed, any(W), any(W), W, state.part<double>(W), state.part<T>(W)});
    program.add(kGate, stage::Gate{mixed, extra ? v : none, any(W), mixed, W, extra});
    product(mixed, W, kTanh, D, stream, 1);
}

template <class T>
void drive_token(Pool<T>& p, int64_t threads, int64_t H, int64_t width, bool extra, int64_t read, int64_t tokens) {
    using namespace latte;
    const int64_t B = 2, G = 1, K = 2 * width, D = H * width, M = width, R = 5, N = extra ? 2 : 0, words = 11, none = kNone;
    auto any = [&](int64_t n) { return p.random(n, -1, 1); };
    Shared room, state;
    auto x = [&](int64_t n) { return room.part<T>(n) / int64_t(sizeof(T)); };
    const int64_t stream = x(D), normed = x(D), q = x(H * K), k = x(G * K), v = x(G * K), fed = x(D), near = x(K), far = x(K), seen = x(H * K),
                  log_norm = x(H), slots = x(H * (M + 1)), latent_k = x(H * M), mixed = x(H * K), wide = x(width + 5);
    Program program;
    const double* speeds = p.template random<double>(width, 0, 1);
    program.add(kAngles, stage::Angles{near, speeds, width, int64_t(1) << 62, extra ? 4 : 0, 1.2}, true);
    program.add(kAngles, stage::Angles{far, speeds, width, N + R, 0, 1.0}, true);
    program.add(kEmbed, stage::Embed{stream, any(words * D), 0, extra ? any((read + 99) * D) : nullptr, D, 1.5});
    std::vector<Memory> memories;
    const int64_t taps = extra ? 3 : 1, tail = state.part<T>((taps - 1) * D), h = state.part<T>(D), sums = state.part<double>(H * M),
                  means = state.part<T>(H * M * K);
    for (int64_t window : {R, int64_t(-1)}) {
        const int64_t memory = int64_t(memories.size()), slot_count = window < 0 ? read + 99 : R + tokens, sinks = window < 0 ? 0 : N;
        memories.push_back({any(B * G * slot_count * K), any(B * G * slot_count * K), any(B * G * sinks * K), any(B * G * sinks * K), slot_count, sinks});
        program.add(kNorm, stage::Norm{stream, normed, any(D), extra ? any(D) : nullptr, D, 1, 0, extra, 0, 1e-6, 0.5});
        if (window < 0)
            program.add(kConv, stage::Conv{normed, fed, any(D * taps), extra ? any(D) : nullptr, D, taps, extra ? kSilu : kIdentity, 0, D, tail}, true);
        else
            program.add(kRglru, stage::Rglru{normed, fed, any(2 * H * width * width), any(2 * D), any(D), H, width, 8.0, h}, true);
        program.add(kProduct, stage::Product{normed, D, 0, 0, 0, any(G * K * D), extra ? any(G * K) : nullptr, G * K, 0, v, any(H * K * D), nullptr, H * K, 0, q,
                                             any(G * K * D), nullptr, G * K, 0, k});
        program.add(kNorm, stage::Norm{q, q, any(H * K), nullptr, K, H, 1, 0, 0, 1e-6, 0});
        program.add(kKeep, stage::Keep{k, v, extra ? none : near, memory, G, K, K}, true);
        program.add(kProduct, stage::Product{fed, D, 0, 0, 0, any(H * (M + 1) * D), nullptr, H * (M + 1), 0, slots, any(H * M * D), nullptr, H * M, 0, latent_k,
                                             nullptr, nullptr, 0, 0, none});
        const int64_t coupled = extra ? log_norm : none;
        program.add(kAttend, stage::Attend{q, extra ? none : near, extra ? none : far, seen, coupled, memory, H, G, K, K, window, 0.5, extra ? 3.0 : 0.0});
        program.add(kMerge, stage::Merge{seen, coupled, H, K, window});
        if (window >= 0)
            program.add(kLatents, stage::Latents{slots, latent_k, v, seen, coupled, extra ? latent_k : none, mixed, extra ? any(H) : nullptr, H, G, M, K, sums, means});
        const int64_t from = window < 0 ? seen : mixed;
        program.add(kProduct, stage::Product{from, H * K, 0, 0, 1, any(D * H * K), nullptr, D, 0, stream, nullptr, nullptr, 0, 0, none, nullptr, nullptr, 0, 0, none});
        const int64_t I = width + 5;
        program.add(kProduct, stage::Product{normed, D, 1, 1, 0, any(I * D), nullptr, I, 0, wide, any(I * D), nullptr, I, 0, wide, nullptr, nullptr, 0, 0, none});
        program.add(kProduct, stage::Product{wide, I, 0, 0, 1, any(D * I), nullptr, D, 0, stream, nullptr, nullptr, 0, 0, none, nullptr, nullptr, 0, 0, none});
    }
    const int64_t memory = int64_t(memories.size());
    memories.push_back({any(B * G * (R + tokens) * 2 * K), any(B * G * (R + tokens) * K), any(0), any(0), R + tokens, 0});
    program.add(kKeep, stage::Keep{k, v, near, memory, G, 2 * K, K, any(K)});
    program.add(kAttend, stage::Attend{q, near, none, seen, none, memory, H, G, 2 * K, K, R, 1.0, 0.0, 1, extra, any(K)});
    program.add(kMerge, stage::Merge{seen, none, H, K, R, 1});
    program.add(kProduct, stage::Product{seen, H * K, 0, 0, 1, any(D * H * K), nullptr, D, 0, stream, nullptr, nullptr, 0, 0, none, nullptr, nullptr, 0, 0, none});
    add_recurrent_stages(p, program, room, state, stream, normed, near, H, width, extra);
    program.add(kNorm, stage::Norm{stream, normed, any(D), nullptr, D, 1, 0, 0, 0, 1e-6, 0});
    program.add(kProduct, stage::Product{normed, D, 0, 0, 0, any(words * D), nullptr, words, 0, kOutput, nullptr, nullptr, 0, 0, none, nullptr, nullptr, 0, 0, none});
    const int64_t d = sizeof(T) == 8, rows = B * tokens;
    int64_t* count = p.template random<int64_t>(B, double(read), double(read) + 9);
    Call call{d, threads, B, tokens, program.words.data(), int64_t(program.words.size()), room.make(p, rows), p.template random<int64_t>(rows, 0, double(words)),
              p.output(rows * words), state.make(p, B), state.make(p, B, tokens, true), state.bytes * B, count, memories.data(), H * (K + 2)};
    token(&call);
}

template <class T, class R>
void filters(Pool<T>& p, int64_t threads, int64_t kind, int64_t B, int64_t Tn, int64_t D, int64_t N, bool extra) {
    const int64_t d = sizeof(T) == 8, S = kind == 1 ? 1 : 2, H = kind == 0 ? 0 : 2, P = kind == 0 ? 4 : kind, cuts = 3, blocks = (Tn + 63) / 64;
    const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
    // Constants that decay (kind 1: exponents below 0), and second inputs, precisions and time steps above 0.
    T *x = p.random(B * Tn * D, -2, 2), *w = kind == 0 ? nullptr : p.random(B * Tn * D, 0.1, 1);
    R *shared = p.template random<R>(B * Tn * H * N, -1, 1), *h = p.template random<R>(B * N * S * D, 0.1, 1);
    R* par = kind == 1 ? p.template random<R>(P * N * D, -1, 0) : p.template random<R>(P * N * D, 0.1, 0.6);
    R* kept = p.template output<R>(B * blocks * N * S * D);
    latte::FilterForward f{d, threads, kind, B, Tn, D, N, cuts, {x, w}, shared, par, h, p.output(B * Tn * D), p.template output<R>(B * N * S * D), kept, mask, reset};
    filter_forward(&f);
    latte::FilterBackward g{d, threads, kind, B, Tn, D, N, cuts, {x, w}, shared, par, kept, p.random(B * Tn * D, -1, 1),
                            p.template random<R>(B * N * S * D, -1, 1), {p.output(B * Tn * D), kind == 0 ? nullptr : p.output(B * Tn * D)},
                            p.template output<R>(cuts * B * Tn * H * N), p.template output<R>(B * P * N * D), p.template output<R>(B * N * S * D), mask, reset};
    filter_backward(&g);
}

// The first kind computes in double precision, whatever its inputs are.
template <class T>
void check_filters(Pool<T>& p, int64_t threads, int64_t kind, int64_t B, int64_t Tn, int64_t D, int64_t N, bool extra) {
    if (kind == 0)
        filters<T, double>(p, threads, kind, B, Tn, D, N, extra);
    else
        filters<T, T>(p, threads, kind, B, Tn, D, N, extra);
}

template <class T>
void run(std::vector<int64_t> lengths, std::vector<int64_t> widths) {
    const int64_t d = sizeof(T) == 8, B = 2;
    for (int64_t Tn : lengths)
        for (int64_t width : widths)
            for (int64_t H : {1, 3})
                for (bool extra : {false, true}) {
                    const int64_t M = width, V = width == 8 ? 64 : width + 2;
                    // A tiny chunk of work stays on one thread; these are large enough with H = 3, and V is cut with H = 1.
                    both<T>("latte", [&](Pool<T>& p, int64_t threads) {
                        const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
                        auto w = p.in(B, Tn, H, M, extra, 0, 1), k = p.in(B, Tn, H, M, extra, -50, 50), v = p.in(B, Tn, H, V, extra);
                        double* a = p.template random<double>(B * H * M, -1, 1);
                        T* S = p.random(B * H * M * V, -1, 1);
                        latte::LatteForward f{d, threads, B, Tn, H, M, V, w, k, v, p.out(B, Tn, H, V), a, S,
                                              p.template output<double>(B * H * M), p.output(B * H * M * V), mask, reset};
                        latte_forward(&f);
                        latte::LatteBackward g{d, threads, B, Tn, H, M, V, w, k, v, p.in(B, Tn, H, V, extra), p.out(B, Tn, H, M),
                                               p.out(B, Tn, H, M), p.out(B, Tn, H, V), a, S, p.template random<double>(B * H * M, -1, 1),
                                               p.random(B * H * M * V, -1, 1), p.template output<double>(B * H * M),
                                               p.output(B * H * M * V), mask, reset};
                        latte_backward(&g);
                    });
                    for (int64_t decays : {int64_t(0), int64_t(1), M})
                        both<T>("decay", [&](Pool<T>& p, int64_t threads) {
                            const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
                            auto q = p.in(B, Tn, H, M, extra), k = p.in(B, Tn, H, M, extra), v = p.in(B, Tn, H, V, extra);
                            latte::View none{nullptr, 0, 0, 0}, decay = decays ? p.in(B, Tn, H, decays, extra, -1, 0) : none;
                            T* S = p.random(B * H * M * V, -1, 1);
                            latte::DecayForward f{d, threads, B, Tn, H, M, V, decays, q, k, v, decay, p.out(B, Tn, H, V), S,
                                                  p.output(B * H * M * V), mask, reset};
                            decay_forward(&f);
                            latte::DecayBackward g{d, threads, B, Tn, H, M, V, decays, q, k, v, decay, p.in(B, Tn, H, V, extra),
                                                   p.out(B, Tn, H, M), p.out(B, Tn, H, M), p.out(B, Tn, H, V),
                                                   decays ? p.out(B, Tn, H, decays) : none, S, p.random(B * H * M * V, -1, 1),
                                                   p.output(B * H * M * V), mask, reset};
                            decay_backward(&g);
                        });
                    for (int64_t decays : {int64_t(0), int64_t(1), M})
                        for (bool tied : {true, false})
                            both<T>("delta", [&](Pool<T>& p, int64_t threads) {
                                const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
                                // Small enough to erase a part only: a state that grew at every token would not be finite.
                                const double small = 0.5 / double(M);
                                auto q = p.in(B, Tn, H, M, extra), k = p.in(B, Tn, H, M, extra, -small, small), v = p.in(B, Tn, H, V, extra);
                                auto a = p.in(B, Tn, H, M, extra, -1, 1), own = p.in(B, Tn, H, M, extra, -small, small);
                                latte::View none{nullptr, 0, 0, 0}, b = tied ? none : own;
                                auto decay = decays ? p.in(B, Tn, H, decays, extra, -1, 0) : none;
                                auto u = p.out(B, Tn, H, V);
                                T* S = p.random(B * H * M * V, -1, 1);
                                latte::DeltaForward f{d, threads, B, Tn, H, M, V, decays, q, k, v, a, b, decay, p.out(B, Tn, H, V), u, S,
                                                      p.output(B * H * M * V), mask, reset};
                                delta_forward(&f);
                                latte::DeltaBackward g{d, threads, B, Tn, H, M, V, decays, q, k, v, a, b, decay, u,
                                                       p.in(B, Tn, H, V, extra), p.out(B, Tn, H, M), p.out(B, Tn, H, M),
                                                       p.out(B, Tn, H, V), p.out(B, Tn, H, M), tied ? none : p.out(B, Tn, H, M),
                                                       decays ? p.out(B, Tn, H, decays) : none, S, p.random(B * H * M * V, -1, 1),
                                                       p.output(B * H * M * V), mask, reset};
                                delta_backward(&g);
                            });
                    for (int64_t reverse : {0, 1})
                        both<T>("scan", [&](Pool<T>& p, int64_t threads) {
                            const int64_t D = width * 37;
                            const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
                            auto a = p.in(B, Tn, 1, D, false, -1, 0), x = p.in(B, Tn, 1, D, false);
                            T* h = p.random(B * D, -1, 1);
                            latte::ScanForward f{d, threads, B, Tn, D, reverse, a, x, p.out(B, Tn, 1, D), h, p.output(B * D), mask, reset};
                            scan_forward(&f);
                            latte::ScanBackward g{d, threads, B, Tn, D, reverse, a, x, p.in(B, Tn, 1, D, false), p.out(B, Tn, 1, D),
                                                  p.out(B, Tn, 1, D), h, p.random(B * D, -1, 1), p.output(B * D), mask, reset};
                            scan_backward(&g);
                        });
                    for (int64_t K : {1, 2, 4})
                        both<T>("conv", [&](Pool<T>& p, int64_t threads) {
                            const int64_t D = width * 37, tail = B * (K - 1) * D;
                            const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
                            auto x = p.in(B, Tn, 1, D, extra);
                            const T *weight = p.random(K * D, -1, 1), *before = p.random(tail, -1, 1);
                            latte::ConvForward f{d, threads, B, Tn, D, K, x, p.out(B, Tn, 1, D), weight, p.random(D, -1, 1), before,
                                                 p.output(tail), mask, reset};
                            conv_forward(&f);
                            latte::ConvBackward g{d, threads, B, Tn, D, K, x, p.in(B, Tn, 1, D, extra), p.out(B, Tn, 1, D), weight, before,
                                                  p.random(tail, -1, 1), p.output(B * K * D), p.output(B * D), p.output(tail), mask, reset};
                            conv_backward(&g);
                        });
                    for (int64_t kind : {0, 1, 2})
                        both<T>("filters", [&](Pool<T>& p, int64_t threads) {
                            check_filters<T>(p, threads, kind, B, Tn, width * 11, 3, extra);
                        });
                    both<T>("rglru", [&](Pool<T>& p, int64_t threads) {
                        const uint8_t *mask = extra ? p.flags(B * Tn, 0.7) : nullptr, *reset = extra ? p.flags(B * Tn, 0.1) : nullptr;
                        auto ga = p.in(B, Tn, H, width, extra), gx = p.in(B, Tn, H, width, extra), x = p.in(B, Tn, H, width, extra);
                        const T *bias = p.random(2 * H * width, -1, 1), *rate = p.random(H * width, 0, 1), *h = p.random(B * H * width, -1, 1);
                        const int64_t* count = p.template random<int64_t>(B, 0, 3);
                        latte::RglruForward f{d, threads, B, Tn, H, width, ga, gx, x, p.out(B, Tn, H, width), bias, rate, h,
                                              p.output(B * H * width), count, p.template output<int64_t>(B), mask, reset};
                        rglru_forward(&f);
                        latte::RglruBackward g{d, threads, B, Tn, H, width, ga, gx, x, p.in(B, Tn, H, width, extra),
                                               p.out(B, Tn, H, width), p.out(B, Tn, H, width), p.out(B, Tn, H, width), bias, rate, h,
                                               p.random(B * H * width, -1, 1), p.output(B * 2 * H * width), p.output(B * H * width),
                                               p.output(B * H * width), count, mask, reset};
                        rglru_backward(&g);
                    });
                    both<T>("pointwise", [&](Pool<T>& p, int64_t threads) {
                        const int64_t K = 2 * width, n = B * Tn * H * width;
                        auto x = p.in(B, Tn, H, K, extra);
                        latte::Rotate r{d, threads, B, Tn, H, K, extra, extra ? Tn * width : 0, x, p.out(B, Tn, H, K),
                                        p.random(B * Tn * width, -1, 1), p.random(B * Tn * width, -1, 1)};
                        rotate(&r);
                        const T *a = p.random(n, -2, 2), *b = p.random(n, -2, 2), *dy = p.random(n, -2, 2), *w = p.random(H * width, -1, 1);
                        latte::SwigluForward f{d, threads, n, a, b, p.output(n)};
                        swiglu_forward(&f);
                        latte::SwigluBackward g{d, threads, n, a, b, dy, p.output(n), p.output(n)};
                        swiglu_backward(&g);
                        latte::NormForward nf{d, threads, B * Tn, H * width, 1e-6, a, w, p.output(n)};
                        norm_forward(&nf);
                        latte::NormBackward nb{d, threads, B * Tn, H * width, 1e-6, a, w, dy, p.output(n), p.output(H * width)};
                        norm_backward(&nb);
                    });
                    both<T>("products", [&](Pool<T>& p, int64_t threads) {
                        auto any = [&](int64_t n) { return p.random(n, -2, 2); };
                        for (int64_t act : {latte::kIdentity, latte::kSilu, latte::kGeluTanh, latte::kGelu}) {
                            latte::Products m{d, threads, B, width, 2, act, extra, H == 1, any(B * width), width, {}};
                            const T *one = extra ? any(9) : nullptr, *two = extra ? any(9) : nullptr;
                            m.part[0] = {any(9 * width), one, 9, 0, p.output(B * 9)}, m.part[1] = {any(9 * width), two, 9, 0, p.output(B * 9)};
                            products(&m);
                        }
                        if (sizeof(T) == 8) return;
                        // Weights in blocks: bytes of numbers are any, halves are 2^-12.
                        const int64_t sizes[5][3] = {{32, 34, 0}, {32, 18, 0}, {32, 20, 2}, {256, 144, 2}, {256, 210, 208}};
                        for (int64_t format = 1; format <= 5; ++format)
                            for (int64_t batch : {int64_t(1), B}) {
                                const int64_t K = 2 * sizes[format - 1][0], bytes = sizes[format - 1][1], blocks = 9 * 2, last = sizes[format - 1][2];
                                uint8_t* w = p.flags(blocks * bytes, 0.5);
                                for (int64_t i = 0; i < blocks * bytes; ++i) w[i] = uint8_t(255 * uniform());
                                for (int64_t i = 0; i < blocks; ++i)
                                    for (int64_t at : {format == 5 ? last : int64_t(0), last}) w[i * bytes + at] = 0, w[i * bytes + at + 1] = 0x0c;
                                latte::UnpackBlocks u{threads, format, 9, K, w, p.output(9 * K)};
                                unpack_blocks(&u);
                                for (int64_t rows : {batch, int64_t(31)}) {
                                    latte::BlockProduct b{threads, format, rows, K, 9, any(rows * K), w, extra ? any(9) : nullptr, p.output(rows * 9)};
                                    block_product(&b);
                                }
                                latte::Products m{d, threads, batch, K, 2, latte::kSilu, extra, 0, any(batch * K), K, {}};
                                m.part[0] = {w, nullptr, 9, format, p.output(batch * 9)}, m.part[1] = {w, nullptr, 9, format, p.output(batch * 9)};
                                products(&m);
                            }
                    });
                    for (int64_t read : {0, 700})  // short rows, and rows whose keys are cut in parts
                        both<T>("token", [&](Pool<T>& p, int64_t threads) { drive_token<T>(p, threads, H, width, extra, read, Tn % 3 + 1); });
                    for (int64_t left : {0, 7, 40})
                        both<T>("window", [&](Pool<T>& p, int64_t threads) {
                            const int64_t S = Tn + (extra ? 9 : 0), G = 1, right = extra ? 5 : 0, D = width;
                            int32_t *iq = nullptr, *ik = nullptr;
                            if (extra) iq = p.template random<int32_t>(B * Tn, -0.9, 2), ik = p.template random<int32_t>(B * S, -1.9, 2);
                            auto q = p.in(B, Tn, H, D, extra), k = p.in(B, S, G, D, extra), v = p.in(B, S, G, V, extra);
                            const double cap = left == 7 ? 3.0 : 0.0;
                            auto y = p.out(B, Tn, H, V);
                            T* lse = p.output(B * Tn * H);
                            latte::WindowForward f{d, threads, B, Tn, S, H, G, D, V, left, right, 0.5, cap, q, k, v, y, lse, iq, ik};
                            window_forward(&f);
                            latte::WindowBackward g{d, threads, B, Tn, S, H, G, D, V, left, right, 0.5, cap, q, k, v, y,
                                                    p.in(B, Tn, H, V, extra), p.out(B, Tn, H, D), p.out(B, S, G, D), p.out(B, S, G, V),
                                                    lse, p.random(B * Tn * H, -1, 1), iq, ik};
                            window_backward(&g);
                        });
                    for (int64_t N : {1, 11})
                        both<T>("kept", [&](Pool<T>& p, int64_t threads) {
                            const int64_t C = 16, blocks = (Tn + C - 1) / C, S = N + Tn + 3, G = 1, D = width, I = N + C, reach = extra ? 5 : 0;
                            const double cap = N == 1 ? 3.0 : 0.0;
                            int64_t *place = p.template random<int64_t>(B * G * N, -2, 9), *segment = p.template random<int64_t>(B * Tn, 0, 1);
                            for (int64_t t = 0; extra && t < Tn; ++t) segment[t] = t > Tn - 3 ? -1 : t / 20;
                            uint8_t* there = p.flags(B * Tn, 0.8);
                            int32_t *source = p.template whole<int32_t>(B * blocks * G * I), *last = p.template whole<int32_t>(B * blocks * G * I);
                            latte::KeptSelect s{d, threads, B, Tn, G, N, C, p.random(B * G * N, -1, 1), p.random(B * Tn * G, -1, 1), place, there,
                                                segment, source, last, p.template whole<int64_t>(B * G * N)};
                            kept_select(&s);
                            auto q = p.in(B, Tn, H, D, extra), qf = p.in(B, Tn, H, D, extra), k = p.in(B, S, G, D, extra),
                                 kb = p.in(B, S, G, D, extra), v = p.in(B, S, G, V, extra), y = p.out(B, Tn, H, V);
                            int64_t *pq = p.template random<int64_t>(B * Tn, 0, 1), *pk = p.template random<int64_t>(B * S * G, 0, 30);
                            for (int64_t t = 0; t < B * Tn; ++t) pq[t] = 30 + t % Tn;
                            const T* bias = extra ? p.random(B * S * G, -1, 1) : nullptr;
                            T* lse = p.output(B * Tn * H);
                            latte::KeptForward f{d, threads, B, Tn, S, H, G, D, V, N, C, blocks, reach, 0.5, cap, q, qf, k, kb, v, y, lse, bias,
                                                 source, last, pq, pk};
                            kept_forward(&f);
                            latte::KeptBackward g{d, threads, B, Tn, S, H, G, D, V, N, C, blocks, reach, 0.5, cap, q, qf, k, kb, v, y,
                                                  p.in(B, Tn, H, V, extra), p.out(B, Tn, H, D), p.out(B, Tn, H, D), p.out(B, S, G, D),
                                                  p.out(B, S, G, D), p.out(B, S, G, V), lse, p.random(B * Tn * H, -1, 1), bias,
                                                  p.output(B * S * G), source, last, pq, pk};
                            kept_backward(&g);
                        });
                }
}

}  // namespace

int main(int argc, char** argv) {
    // "short": what threads share does not depend on odd widths, and watching them is slow. "tell" prints a sum of each call's
    // outputs, to be compared with another machine's.
    tell = argc > 1 && !strcmp(argv[1], "tell");
    if (argc > 1 && !tell) {
        run<float>({70}, {8});
        run<double>({70}, {3});
    } else {
        run<float>({1, 33, 70}, {1, 3, 8, 33});
        run<double>({1, 33, 70}, {1, 3, 8, 33});
    }
    printf(failures ? "%d failures\n" : "every kernel is clean\n", failures);
    return failures != 0;
}
