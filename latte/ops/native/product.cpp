// Products of a few rows with weight matrices, and the RG-LRU's step with its gates' products: what decoding does.
//
// A token reads every weight once, so memory is the limit and one call for several matrices saves the rest: threads wake once
// and share out all rows. A row of weights meets every row of the batch while it is in the first-level cache.
#include "args.h"
#include "work.h"

LATTE_BEGIN

constexpr int kAtOnce = 4;  // rows of weights: enough independent sums to keep the multiplier busy

template <class T>
LATTE_INLINE void dots(const T* w, int64_t ld, const T* x, int64_t K, T* out, int64_t rows) {
    Vec<T> sum[kAtOnce][2] = {};
    const T* row[kAtOnce];
    for (int r = 0; r < kAtOnce; ++r) row[r] = w + min64(r, rows - 1) * ld;
    int64_t c = 0;
    for (; c + 2 * kWidth<T> <= K; c += 2 * kWidth<T>)
        for (int j = 0; j < 2; ++j) {
            const Vec<T> v = load(x + c + j * kWidth<T>);
            for (int r = 0; r < kAtOnce; ++r) sum[r][j] = load(row[r] + c + j * kWidth<T>) * v + sum[r][j];
        }
    for (; c < K; c += kWidth<T>) {
        const Vec<T> v = load_some(x + c, K - c, T(0));
        for (int r = 0; r < kAtOnce; ++r) sum[r][0] = load_some(row[r] + c, K - c, T(0)) * v + sum[r][0];
    }
    for (int64_t r = 0; r < rows; ++r) out[r] = sum_lanes<T>(sum[r][0] + sum[r][1]);
}

template <class T>
void products_typed(const Products& g) {
    int64_t first[kMatrices + 1] = {0};  // blocks of kAtOnce rows before each matrix
    for (int64_t i = 0; i < g.count; ++i) first[i + 1] = first[i] + (g.part[i].rows + kAtOnce - 1) / kAtOnce;
    const int64_t blocks = g.gated ? first[1] : first[g.count];
    parallel(blocks, useful_threads(g.threads, double(g.B * g.K * kAtOnce) * double(first[g.count])), [&](int64_t begin, int64_t end) {
        T up[kAtOnce];
        int64_t i = 0;
        for (int64_t u = begin; u < end; ++u) {
            while (u >= first[i + 1]) ++i;
            const Products::Part& part = g.part[i];
            const int64_t n = (u - first[i]) * kAtOnce, rows = min64(kAtOnce, part.rows - n);
            for (int64_t b = 0; b < g.B; ++b) {
                const T* x = (const T*)g.x + b * g.xb;
                T* y = (T*)part.y + b * part.rows + n;
                dots((const T*)part.w + n * g.K, g.K, x, g.K, y, rows);
                if (!g.gated) continue;
                dots((const T*)g.part[1].w + n * g.K, g.K, x, g.K, up, rows);
                for (int64_t r = 0; r < rows; ++r) y[r] = y[r] / (1 + T(::exp(double(-y[r])))) * up[r];
            }
        }
    });
}

template <class T>
void rglru_step_typed(const RglruStep& g) {
    const int64_t D = g.H * g.W;
    parallel(g.B * g.H, useful_threads(g.threads, 2.0 * double(g.B * D) * double(g.W)), [&](int64_t begin, int64_t end) {
        Scratch mem(2 * room(g.W, sizeof(T)));
        T* gate[2] = {mem.take<T>(g.W), mem.take<T>(g.W)};
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / g.H, h = u % g.H;
            const bool real = !g.mask || g.mask[b], fresh = g.reset && g.reset[b];
            const int64_t count = fresh ? 0 : g.count0[b];
            const T *x = (const T*)g.x + b * g.xb + h * g.W, *before = (const T*)g.h0 + b * D + h * g.W;
            T *after = (T*)g.h1 + b * D + h * g.W, *y = (T*)g.y + b * D + h * g.W;
            if (h == 0) g.count1[b] = count + (real ? 1 : 0);
            if (!real) {
                for (int64_t c = 0; c < g.W; ++c) after[c] = fresh ? T(0) : before[c], y[c] = 0;
                continue;
            }
            for (int k = 0; k < 2; ++k) {
                const T* w = (const T*)g.weight + (k * g.H + h) * g.W * g.W;
                memcpy(gate[k], (const T*)g.bias + (k * g.H + h) * g.W, size_t(g.W) * sizeof(T));
                for (int64_t i = 0; i < g.W; ++i)
                    for (int64_t c = 0; c < g.W; ++c) gate[k][c] += x[i] * w[i * g.W + c];
            }
            for (int64_t c = 0; c < g.W; ++c) {
                const double decay = double(((const T*)g.decay)[h * g.W + c]);
                const double rate = g.power * (decay > 20 ? decay : ::log1p(::exp(decay)));
                const double r = 1 / (1 + ::exp(-double(gate[0][c]))), i = 1 / (1 + ::exp(-double(gate[1][c]))), log_a = -rate * r;
                const double m = count == 0 ? 1 : ::sqrt(-::expm1(2 * log_a)), old = fresh ? 0 : double(before[c]);
                y[c] = after[c] = T(::exp(log_a) * old + m * i * double(x[c]));
            }
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void products(const Products* g) { g->is_double ? products_typed<double>(*g) : products_typed<float>(*g); }
void rglru_step(const RglruStep* g) { g->is_double ? rglru_step_typed<double>(*g) : rglru_step_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
