// Products of a few rows with weight matrices, and the RG-LRU's step with its gates' products: what decoding does.
//
// A token reads every weight once, so memory is the limit and one call for several matrices saves the rest: threads wake once
// and share out all rows. A row of weights meets every row of the batch while it is in the first-level cache.
#pragma once
#include "args.h"
#include "cell.h"
#include "norm.h"
#include "work.h"

LATTE_BEGIN

constexpr int kAtOnce = 8;  // rows of weights that meet a row of the batch

// Row after row, because memory is fastest read in one stream: four side by side come at two thirds of its speed.
template <class T>
LATTE_INLINE void dots(const T* w, int64_t ld, const T* x, int64_t K, T* out, int64_t rows) {
    constexpr int W = kWidth<T>;
    for (int64_t r = 0; r < rows; ++r, w += ld) {
        Vec<T> sum[4] = {};
        int64_t c = 0;
        for (; c + 4 * W <= K; c += 4 * W)
            for (int j = 0; j < 4; ++j) sum[j] = load(w + c + j * W) * load(x + c + j * W) + sum[j];
        for (; c < K; c += W) sum[0] = load_some(w + c, K - c, T(0)) * load_some(x + c, K - c, T(0)) + sum[0];
        out[r] = sum_lanes<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

// The rows of all matrices of a call, cut in pieces of about as many bytes.
template <class T>
class Rows {
  public:
    explicit Rows(const Products& g) : g_(g) {
        for (int64_t i = 0; i < g.count; ++i) first_[i + 1] = first_[i] + (g.part[i].rows + kAtOnce - 1) / kAtOnce;
        blocks_ = g.gated ? first_[1] : first_[g.count];
        // As many pieces for each thread: one left over would keep the others waiting.
        const int64_t bytes = blocks_ * g.K * kAtOnce * int64_t(sizeof(T)) * (g.gated ? 2 : 1), turn = g.threads * kPiece;
        const int64_t pieces = g.threads * ((bytes + turn - 1) / turn);
        size_ = max64(1, (blocks_ + pieces - 1) / max64(1, pieces));
    }
    double work() const { return double(g_.B * g_.K * kAtOnce) * double(first_[g_.count]); }
    int64_t pieces() const { return (blocks_ + size_ - 1) / size_; }

    void operator()(int64_t piece) const {
        const bool gated = g_.gated, added = g_.added;
        int64_t i = 0;
        for (int64_t u = piece * size_; u < min64(blocks_, (piece + 1) * size_); ++u) {
            while (u >= first_[i + 1]) ++i;
            const Products::Part& part = g_.part[i];
            const int64_t n = (u - first_[i]) * kAtOnce, rows = min64(kAtOnce, part.rows - n);
            for (int64_t b = 0; b < g_.B; ++b) {
                const T* x = (const T*)g_.x + b * g_.xb;
                T *y = (T*)part.y + b * part.rows + n, products[kAtOnce], gates[kAtOnce], *out = products, *up = gates;
                dots((const T*)part.w + n * g_.K, g_.K, x, g_.K, out, rows);
                if (gated) dots((const T*)g_.part[1].w + n * g_.K, g_.K, x, g_.K, up, rows);
                each_vector<T>(rows, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                    Vec<T> product = load_some(out + c, k, T(0));
                    if (gated) product = product / (1 + vexp(-product)) * load_some(up + c, k, T(0));
                    store_some(y + c, added ? product + load_some(y + c, k, T(0)) : product, k);
                });
            }
        }
    }

  private:
    static constexpr int64_t kPiece = 262144;  // bytes: long enough to be read as one stream, some fifteen microseconds
    const Products& g_;
    int64_t first_[kMatrices + 1] = {0}, blocks_, size_;  // blocks of kAtOnce rows before each matrix, in all, and in a piece
};

// The RG-LRU on one head of one row.
template <class T>
void rglru_unit(const RglruStep& g, int64_t unit) {
    Scratch mem(3 * room(g.W, sizeof(T)));
    T *recurrence = mem.take<T>(g.W), *input = mem.take<T>(g.W), *rate = mem.take<T>(g.W), *gate[2] = {recurrence, input};
    const int64_t D = g.H * g.W, b = unit / g.H, h = unit % g.H;
    const bool real = !g.mask || g.mask[b], fresh = g.reset && g.reset[b];
    const int64_t count = fresh ? 0 : g.count0[b];
    const T *x = (const T*)g.x + b * g.xb + h * g.W, *before = (const T*)g.h0 + b * D + h * g.W;
    T *after = (T*)g.h1 + b * D + h * g.W, *y = (T*)g.y + b * D + h * g.W;
    if (h == 0) g.count1[b] = count + (real ? 1 : 0);
    if (!real) {
        for (int64_t c = 0; c < g.W; ++c) after[c] = fresh ? T(0) : before[c], y[c] = 0;
        return;
    }
    for (int k = 0; k < 2; ++k) {
        const T* w = (const T*)g.weight + (k * g.H + h) * g.W * g.W;
        memcpy(gate[k], (const T*)g.bias + (k * g.H + h) * g.W, size_t(g.W) * sizeof(T));
        for (int64_t i = 0; i < g.W; ++i)
            for (int64_t c = 0; c < g.W; ++c) gate[k][c] += x[i] * w[i * g.W + c];
    }
    for (int64_t c = 0; c < g.W; ++c) {
        const double decay = double(((const T*)g.decay)[h * g.W + c]);
        rate[c] = T(g.power * (decay > 20 ? decay : ::log1p(::exp(decay))));
    }
    each_vector<T>(g.W, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
        const Cell<T> cell(load_some(recurrence + c, k, T(0)), load_some(input + c, k, T(0)), load_some(rate + c, k, T(0)), count == 0);
        const Vec<T> old = fresh ? Vec<T>{} : load_some(before + c, k, T(0));
        const Vec<T> now = cell.a * old + cell.m * cell.i * load_some(x + c, k, T(0));
        store_some(y + c, now, k), store_some(after + c, now, k);
    });
}

LATTE_END
