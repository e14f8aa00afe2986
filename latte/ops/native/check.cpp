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

#define DECLARE(name, type) extern "C" void name(const latte::type*);
DECLARE(latte_forward, LatteForward)
DECLARE(latte_backward, LatteBackward)
DECLARE(window_forward, WindowForward)
DECLARE(window_backward, WindowBackward)
DECLARE(scan_forward, ScanForward)
DECLARE(scan_backward, ScanBackward)
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
DECLARE(decode, Decode)
DECLARE(products, Products)
DECLARE(rglru_step, RglruStep)
DECLARE(token, Token)

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

// The states of all layers in one block. AddressSanitizer sees a step past the end of a part: what lies between two is poisoned.
struct StateBlock {
    struct Part {
        int64_t at, n;
        size_t size;
        bool whole;
    };
    std::vector<Part> parts;
    int64_t bytes = 0;

    template <class U>
    int64_t part(int64_t n) {
        parts.push_back({bytes, n, sizeof(U), std::is_integral<U>::value});
        bytes += (n * int64_t(sizeof(U)) + 127) / 64 * 64;
        return parts.back().at;
    }
    template <class T>
    const char* before(Pool<T>& pool) const {
        return guarded(pool, filled(pool));
    }
    template <class T>
    char* after(Pool<T>& pool) const {
        char* block = pool.raw(size_t(bytes));
        memset(block, 0, size_t(bytes));
        return guarded(pool, remembered(pool, block));
    }
    template <class T>
    char* in_place(Pool<T>& pool) const {
        return guarded(pool, remembered(pool, filled(pool)));
    }

  private:
    template <class T>
    char* filled(Pool<T>& pool) const {
        char* block = pool.raw(size_t(bytes));
        for (const Part& part : parts)
            for (int64_t i = 0; i < part.n; ++i) {
                char* p = block + part.at + i * int64_t(part.size);
                if (part.whole)
                    *(int64_t*)p = int64_t(9 * uniform());
                else if (part.size == 8)
                    *(double*)p = 2 * uniform() - 1;
                else
                    *(float*)p = float(2 * uniform() - 1);
            }
        return block;
    }
    template <class T>
    char* remembered(Pool<T>& pool, char* block) const {
        for (const Part& part : parts) pool.remember(block + part.at, part.n, part.size);
        return block;
    }
    template <class T>
    char* guarded(Pool<T>& pool, char* block) const {
#if defined(__SANITIZE_ADDRESS__)
        for (const Part& part : parts) {
            const int64_t length = part.n * int64_t(part.size);
            pool.poison(block + part.at + length, (length + 127) / 64 * 64 - length);
        }
#else
        (void)pool;
#endif
        return block;
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
                    for (int64_t R : {int64_t(0), int64_t(5)})
                        both<T>("decode", [&](Pool<T>& p, int64_t threads) {
                            const int64_t N = extra ? 2 : 0, K = 2 * width, G = 1, windowed = R > 0;
                            const uint8_t *mask = extra ? p.flags(B, 0.7) : nullptr, *reset = extra ? p.flags(B, 0.3) : nullptr;
                            auto any = [&](int64_t n) { return p.random(n, -2, 2); };
                            const double* speeds = p.template random<double>(width, 0, 1);
                            const double* norm = p.template random<double>(B * H * M, -1, 1);
                            const T *slots = any(B * H * (M + windowed)), *kl = any(B * H * M), *v = any(B * G * V), *q = any(B * H * K),
                                    *k = any(B * G * K), *bias = extra ? any(H) : nullptr, *mean = any(B * H * M * V), *rk = any(B * R * G * K),
                                    *rv = any(B * R * G * V), *sk = any(B * N * G * K), *sv = any(B * N * G * V);
                            const int64_t* count = p.template random<int64_t>(B, 0, 9);
                            latte::Decode f{d, threads, B, H, G, M, K, V, R, N, R, windowed, !extra, windowed && extra, extra ? 4 : 0, 0.5, extra ? 3.0 : 0.0, 1.0, slots,
                                            H * (M + windowed), kl, H * M, v, G * V, q, H * K, k, G * K, bias, speeds, p.output(B * H * V),
                                            norm, mean, rk, rv, sk, sv, count, p.template output<double>(B * H * M), p.output(B * H * M * V),
                                            p.output(B * R * G * K), p.output(B * R * G * V), p.output(B * N * G * K), p.output(B * N * G * V),
                                            p.template output<int64_t>(B), mask, reset};
                            decode(&f);
                            latte::RglruStep r{d, threads, B, H, width, 8.0, any(B * H * width), H * width, any(2 * H * width * width),
                                               any(2 * H * width), any(H * width), any(B * H * width), p.output(B * H * width),
                                               p.output(B * H * width), count, p.template output<int64_t>(B), mask, reset};
                            rglru_step(&r);
                            latte::Products m{d, threads, B, width, 2, extra, R > 0, any(B * width), width, {}};
                            m.part[0] = {any(9 * width), 9, p.output(B * 9)}, m.part[1] = {any(9 * width), 9, p.output(B * 9)};
                            products(&m);
                        });
                    both<T>("token", [&](Pool<T>& p, int64_t threads) {
                        const int64_t G = 1, D = H * width, I = width + 5, K = 2 * width, N = extra ? 2 : 0;
                        auto any = [&](int64_t n) { return p.random(n, -1, 1); };
                        const double* speeds = extra ? nullptr : p.template random<double>(width, 0, 1);
                        std::vector<latte::Layer> layers;
                        StateBlock state, rings;
                        const int64_t spare = 3;
                        // With a window and a recurrence, and with a convolution alone.
                        for (int64_t windowed : {1, 0}) {
                            const int64_t R = windowed ? 5 : 0, slots = M + windowed, n = windowed ? N : 0;
                            latte::Layer w{};
                            w.M = M, w.R = R, w.N = n, w.windowed = windowed, w.softcap = extra ? 3.0 : 0.0, w.power = 8.0;
                            w.coupled = windowed && extra, w.exact_from = extra ? 4 : 0, w.scale = 0.5, w.stretch = extra ? 1.2 : 1.0;
                            w.mixer_norm = any(D), w.mlp_norm = any(D), w.feed_norm = extra ? any(D) : nullptr, w.v = any(G * K * D);
                            w.latent_q = any(H * slots * D), w.latent_k = any(H * M * D), w.o = any(D * H * K);
                            w.gate = any(I * D), w.up = any(I * D), w.down = any(D * I);
                            w.state = {-1, -1, state.part<double>(B * H * M), state.part<T>(B * H * M * K), -1, -1, -1, -1, -1};
                            if (windowed) {
                                w.q = any(H * K * D), w.k = any(G * K * D), w.slot_bias = extra ? any(H) : nullptr, w.speeds = speeds;
                                w.gate_weight = any(2 * H * width * width), w.gate_bias = any(2 * D), w.decay = any(D);
                                w.state.h = state.part<T>(B * D), w.state.fed = state.part<int64_t>(B);
                                w.state.ring_k = rings.part<T>(B * (R + spare) * G * K), w.state.ring_v = rings.part<T>(B * (R + spare) * G * K);
                                w.state.sink_k = state.part<T>(B * n * G * K), w.state.sink_v = state.part<T>(B * n * G * K);
                                w.state.count = state.part<int64_t>(B);
                            } else {
                                w.taps = extra ? 3 : 1, w.conv = any(D * w.taps);
                                w.state.h = state.part<T>(B * (w.taps - 1) * D);
                            }
                            layers.push_back(w);
                        }
                        latte::Token t{d, threads, B, 1, D, H, G, K, I, 2, 1e-6, any(B * D), nullptr, nullptr, any(D), 0, nullptr, p.output(B * D), layers.data(),
                                       state.before(p), state.after(p), state.bytes, rings.in_place(p), spare};
                        token(&t);
                        const int64_t words = 11;  // and from ids to logits
                        t.x = nullptr, t.ids = p.template random<int64_t>(B, 0, double(words)), t.embedding = t.head = any(words * D);
                        t.words = words, t.y = p.output(B * words), t.after = state.after(p);
                        token(&t);
                        t.T = spare;  // and several tokens of each row
                        t.ids = p.template random<int64_t>(B * spare, 0, double(words)), t.y = p.output(B * spare * words);
                        t.after = p.raw(size_t(spare * state.bytes));
                        token(&t);
                    });
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
