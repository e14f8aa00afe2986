// Products of a few rows with weight matrices: what decoding does.
//
// A token reads every weight once, so memory is the limit and one call for several matrices saves the rest: threads wake once
// and share out all rows. A row of weights meets every row of the batch while it is in the first-level cache.
#pragma once
#include "args.h"
#include "blocks.h"
#include "norm.h"
#include "work.h"

LATTE_BEGIN

constexpr int kAtOnce = 8;  // rows of weights that meet a row of the batch
// Rows of the batch that meet them together: as many as leave the sums in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTogether = 2;
#else
constexpr int kTogether = 1;
#endif
template <class T>
constexpr int kOut = kAtOnce > kWidth<T> ? kAtOnce : kWidth<T>;

// One product is one chain of additions and then the sum of its lanes, in every function below: what a row of the batch gives
// does not depend, to the last bit, on how many others there are.

// Row after row, because memory is fastest read in one stream: four side by side come at two thirds of its speed.
template <class T>
LATTE_INLINE void dots(const T* w, int64_t ld, const T* x, int64_t K, T* out, int64_t rows) {
    constexpr int W = kWidth<T>;
    Vec<T> sum[kAtOnce] = {};
    for (int64_t r = 0; r < rows; ++r, w += ld) {
        Vec<T> s = {};
        int64_t c = 0;
        for (; c + W <= K; c += W) s = load(w + c) * load(x + c) + s;
        if (c < K) s = load_some(w + c, K - c, T(0)) * load_some(x + c, K - c, T(0)) + s;
        sum[r] = s;
    }
    sum_lanes_of<kAtOnce, T>(sum, out);
}

// The same with weights in blocks. Turning them to floats takes longer than reading them: several rows go side by side, or each
// sum would wait for itself.
constexpr int64_t kBytesAhead = 8192;
constexpr int kRowsBeside = kBytes == 64 ? 8 : 4;
template <class B, int n>
LATTE_INLINE void block_sums(const uint8_t* w, int64_t ld, const float* x, int64_t blocks, Vec<float>* sum, bool first, const uint8_t* end) {
    constexpr int W = kWidth<float>, vectors = int(B::numbers) / W;
    alignas(64) float all[n * kScales];
    read_scales<B, n>(w, ld, blocks, all);
    Vec<float> s[n] = {};
    for (int r = 0; r < n && !first; ++r) s[r] = sum[r];
    // Rows side by side are short streams, which the machine does not see coming: what comes after them is fetched while they are
    // worked on, in one stream. Not beyond `end`: those bytes are another thread's, and would be taken from its cache.
    const uint8_t* ahead = w + kBytesAhead;
    const float* scales = all;
    for (int64_t i = 0; i < blocks; ++i, w += B::bytes, x += B::numbers, scales += n * B::scales) {
        if (ahead < end)
            for (int64_t line = 0; line < n * B::bytes; line += 64) __builtin_prefetch(ahead + line);
        ahead += n * B::bytes;
        for (int r = 0; r < n; ++r) {
            Vec<float> weights[vectors];
            B::read(w + r * ld, scales + r * B::scales, weights);
            for (int j = 0; j < vectors; ++j) s[r] = weights[j] * load(x + j * W) + s[r];
        }
    }
    for (int r = 0; r < n; ++r) sum[r] = s[r];
}
// A function of its own: inside a larger one the compiler runs out of registers.
template <class B>
__attribute__((noinline)) void block_dots(const uint8_t* w, int64_t ld, const float* x, int64_t K, float* out, int64_t rows, const uint8_t* end) {
    Vec<float> sum[kAtOnce];
    bool first = true;
    for (int64_t left = K / B::numbers; left > 0; left -= kBlocksAtOnce<B>, first = false, w += kBlocksAtOnce<B> * B::bytes, x += kBlocksAtOnce<B> * B::numbers) {
        const int64_t blocks = min64(left, kBlocksAtOnce<B>);
        int64_t r = 0;
        for (; r + kRowsBeside <= rows; r += kRowsBeside) block_sums<B, kRowsBeside>(w + r * ld, ld, x, blocks, sum + r, first, end);
        for (; r < rows; ++r) block_sums<B, 1>(w + r * ld, ld, x, blocks, sum + r, first, end);
        for (; r < kAtOnce; ++r) sum[r] = Vec<float>{};
    }
    sum_lanes_of<kAtOnce, float>(sum, out);
}

// The same with n rows of the batch, xb apart, once the weights are in the cache; `out` holds kOut numbers for each.
template <int n, class T>
LATTE_INLINE void dots_together(const T* w, int64_t ld, const T* x, int64_t xb, int64_t K, T* out, int64_t rows) {
    constexpr int W = kWidth<T>;
    const T* row[kAtOnce];
    for (int r = 0; r < kAtOnce; ++r) row[r] = w + min64(r, rows - 1) * ld;
    Vec<T> sum[n][kAtOnce] = {};
    int64_t c = 0;
    for (; c + W <= K; c += W) {
        Vec<T> in[n];
        for (int b = 0; b < n; ++b) in[b] = load(x + b * xb + c);
        for (int r = 0; r < kAtOnce; ++r) {
            const Vec<T> weights = load(row[r] + c);
            for (int b = 0; b < n; ++b) sum[b][r] = weights * in[b] + sum[b][r];
        }
    }
    if (c < K)
        for (int r = 0; r < kAtOnce; ++r)
            for (int b = 0; b < n; ++b)
                sum[b][r] = load_some(row[r] + c, K - c, T(0)) * load_some(x + b * xb + c, K - c, T(0)) + sum[b][r];
    for (int b = 0; b < n; ++b) sum_lanes_of<kAtOnce, T>(sum[b], out + b * kOut<T>);
}

template <class T>
LATTE_INLINE Vec<T> activated(int64_t act, Vec<T> x) {
    if (act == kSilu) return x / (1 + vexp(-x));
    if (act == kGeluTanh) {
        const Vec<T> inner = (x + x * x * x * splat(T(0.044715))) * splat(T(0.7978845608028654));
        return x * splat(T(0.5)) * (splat(T(1)) + vtanh(inner));
    }
    if (act == kSigmoid) return 1 / (1 + vexp(-x));
    if (act == kTanh) return vtanh(x);
    if (act == kNegativeExp) return -vexp(vmin<T>(x, splat(T(60))));
    if (act == kSquaredRelu) return vmax<T>(x, Vec<T>{}) * vmax<T>(x, Vec<T>{});
    if (act == kSoftplus) {
        for (int i = 0; i < kWidth<T>; ++i) x[i] = T((x[i] > 0 ? double(x[i]) : 0.0) + ::log1p(::exp(-::fabs(double(x[i])))));
        return x;
    }
    if (act == kLogSigmoid) {
        for (int i = 0; i < kWidth<T>; ++i) x[i] = T((x[i] < 0 ? double(x[i]) : 0.0) - ::log1p(::exp(-::fabs(double(x[i])))));
        return x;
    }
    if (act == kGelu)
        for (int i = 0; i < kWidth<T>; ++i) x[i] = T(0.5 * double(x[i]) * (1 + ::erf(double(x[i]) * 0.7071067811865476)));
    return x;
}

// The rows of all matrices of a call, cut in pieces of about as many bytes.
template <class T>
class Rows {
  public:
    explicit Rows(const Products& g) : g_(g) {
        for (int64_t i = 0; i < g.count; ++i) first_[i + 1] = first_[i] + (g.part[i].rows + kAtOnce - 1) / kAtOnce;
        blocks_ = g.gated ? first_[1] : first_[g.count];
        // As many pieces for each thread: one left over would keep the others waiting.
        const int64_t bytes = blocks_ * kAtOnce * row_bytes(g.part[0].format, g.K, sizeof(T)) * (g.gated ? 2 : 1);
        const int64_t turn = g.threads * kPiece;
        each_ = max64(1, min64(min64((bytes + turn - 1) / turn, kMostPieces), (blocks_ + g.threads - 1) / g.threads));
        size_ = (blocks_ + pieces() - 1) / pieces();
    }
    double work() const { return double(g_.B * g_.K * kAtOnce) * double(first_[g_.count]); }
    int64_t pieces() const { return g_.threads * each_; }

    void operator()(int64_t piece) const {
        // Threads take pieces in turn, and those that one gets lie one behind the other: each reads a stream of its own.
        const int64_t stream = piece % g_.threads, first = stream * each_ + piece / g_.threads;
        const int64_t end = min64(blocks_, (stream + 1) * each_ * size_);
        int64_t i = 0;
        for (int64_t u = first * size_; u < min64(blocks_, (first + 1) * size_); ++u) {
            while (u >= first_[i + 1]) ++i;
            const Products::Part& part = g_.part[i];
            const int64_t n = (u - first_[i]) * kAtOnce, rows = min64(kAtOnce, part.rows - n);
            const int64_t last = min64(part.rows, (end - first_[i]) * kAtOnce);
            if (part.format != kFloats && g_.B > 1) {
                unpacked(part, n, rows);
                continue;
            }
            // The first row of the batch brings the weights from memory, in one stream; the others find them in the cache.
            some<0>(part, n, rows, last, 0);
            int64_t b = 1;
            for (; b + kTogether <= g_.B; b += kTogether) some<kTogether>(part, n, rows, last, b);
            for (; b < g_.B; ++b) some<1>(part, n, rows, last, b);
        }
    }

  private:
    // Rows n and on of a matrix, of which this stream has those before `last`, with row b of the batch (together = 0), or with
    // `together` of them.
    template <int together>
    LATTE_INLINE void some(const Products::Part& part, int64_t n, int64_t rows, int64_t last, int64_t b) const {
        some<together>(part, n, rows, last, b, g_.part + 1, &part == g_.part);
    }
    template <int together>
    LATTE_INLINE void some(const Products::Part& part, int64_t n, int64_t rows, int64_t last, int64_t b, const Products::Part* second,
                           bool first) const {
        constexpr int count = together ? together : 1;
        const bool gated = g_.gated, added = g_.added;
        const int64_t act = first ? g_.act : int64_t(kIdentity);
        const T *bias = (const T*)part.bias, *up_bias = gated ? (const T*)second->bias : nullptr;
        const T* x = (const T*)g_.x + b * g_.xb;
        T products[count * kOut<T>], gates[count * kOut<T>];
        multiply<together>(part, n, x, products, rows, last);
        if (gated) multiply<together>(*second, n, x, gates, rows, last);
        for (int j = 0; j < count; ++j) {
            const T *out = products + j * kOut<T>, *up = gates + j * kOut<T>;
            T* y = (T*)part.y + (b + j) * part.rows + n;
            each_vector<T>(rows, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                Vec<T> product = load_some(out + c, k, T(0));
                if (bias) product = product + load_some(bias + n + c, k, T(0));
                if (act != kIdentity) product = activated<T>(act, product);
                if (gated) {
                    Vec<T> other = load_some(up + c, k, T(0));
                    if (up_bias) other = other + load_some(up_bias + n + c, k, T(0));
                    product = product * other;
                }
                store_some(y + c, added ? product + load_some(y + c, k, T(0)) : product, k);
            });
        }
    }
    template <int together>
    LATTE_INLINE void multiply(const Products::Part& part, int64_t n, const T* x, T* out, int64_t rows, int64_t last) const {
        if constexpr (sizeof(T) == sizeof(float))
            if (part.format != kFloats) {
                const int64_t ld = row_bytes(part.format, g_.K, 4);
                const uint8_t *from = (const uint8_t*)part.w + n * ld, *end = (const uint8_t*)part.w + last * ld;
                with_block(part.format, [=](auto block) __attribute__((always_inline)) {
                    block_dots<decltype(block)>(from, ld, (const float*)x, g_.K, (float*)out, rows, end);
                });
                return;
            }
        const T* w = (const T*)part.w + n * g_.K;
        if constexpr (together == 0)
            dots(w, g_.K, x, g_.K, out, rows);
        else
            dots_together<together>(w, g_.K, x, g_.xb, g_.K, out, rows);
    }

    // Rows of weights in blocks become floats once for all rows of the batch.
    void unpacked(const Products::Part& part, int64_t n, int64_t rows) const {
        const int64_t K = g_.K, matrices = g_.gated ? 2 : 1;
        Scratch mem(matrices * room(kAtOnce * K, sizeof(T)));
        Products::Part floats[2] = {part, g_.part[1]};
        for (int64_t i = 0; i < matrices; ++i) {
            const Products::Part& from = i ? g_.part[1] : part;
            const int64_t ld = row_bytes(from.format, K, 4);
            T* to = mem.take<T>(kAtOnce * K);
            for (int64_t r = 0; r < rows; ++r) read_row(from.format, (const char*)from.w + (n + r) * ld, (float*)(to + r * K), K);
            // As if the matrix began here: its rows are counted from n.
            floats[i].w = to - n * K, floats[i].format = kFloats;
        }
        for (int64_t b = 0; b < g_.B; ++b) some<0>(floats[0], n, rows, n + rows, b, &floats[1], &part == g_.part);
    }

    static constexpr int64_t kPiece = 262144;  // bytes: long enough to be read as one stream, some fifteen microseconds
    static constexpr int64_t kMostPieces = 16;     // of a thread: where one ends, what was fetched ahead may be in another's cache
    const Products& g_;
    int64_t first_[kMatrices + 1] = {0}, blocks_;  // blocks of kAtOnce rows before each matrix, and in all
    int64_t each_, size_;                           // pieces of a thread, and blocks of a piece
};

LATTE_END
