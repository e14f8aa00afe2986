// The real-gated linear recurrent unit, from the gates' products to its output in one pass.
//
//     r = sigmoid(g_a + b_a)    i = sigmoid(g_x + b_x)    log a = -rate r    h_t = a h_{t-1} + m i x    m = sqrt(1 - a^2)
//
// with m = 1 on a document's first token. As tensor operations these are a dozen passes over memory; here every row is read and
// written once. A thread owns some of the heads of a row and walks the tokens. The gradient recomputes all of it: its first pass
// leaves a h_{t-1} where the recurrence gate's gradient will stand, its second runs the other way. The derivative of the square
// root is bounded by 1000, because near a = 1 the true one would drown every other gradient.
#include "args.h"
#include "cell.h"
#include "work.h"

LATTE_BEGIN

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}

template <class T, class F>
LATTE_INLINE void each_vector(int64_t width, F body) {
    for (int64_t c = 0; c < width; c += kWidth<T>) body(c, min64(kWidth<T>, width - c));
}

// The cuts of the work: some heads of one row.
struct Part {
    int64_t b, h0, h1;
};
template <class A>
Part part(const A& g, int64_t u, int64_t cuts) {
    return {u / cuts, u % cuts * g.H / cuts, (u % cuts + 1) * g.H / cuts};
}

template <class T>
void rglru_forward_typed(const RglruForward& g) {
    const int64_t D = g.H * g.W, Wp = round_up(g.W, kWidth<T>);
    const int64_t threads = useful_threads(g.threads, 24.0 * double(g.B * g.T) * double(D)), cuts = pieces(g.B, threads, g.H);
    large_pages(g.y.data, g.B * g.T * D * int64_t(sizeof(T)), g.threads);
    parallel(g.B * cuts, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(room(g.H * Wp, sizeof(T)));
        T* h = mem.zeros<T>(g.H * Wp);
        for (int64_t u = begin; u < end; ++u) {
            const Part p = part(g, u, cuts);
            for (int64_t n = p.h0; n < p.h1; ++n) memcpy(h + n * Wp, (const T*)g.h0 + p.b * D + n * g.W, size_t(g.W) * sizeof(T));
            int64_t count = g.count0[p.b];
            for (int64_t t = 0; t < g.T; ++t) {
                if (g.reset && g.reset[p.b * g.T + t]) {
                    memset(h + p.h0 * Wp, 0, size_t((p.h1 - p.h0) * Wp) * sizeof(T));
                    count = 0;
                }
                if (g.mask && !g.mask[p.b * g.T + t]) {
                    for (int64_t n = p.h0; n < p.h1; ++n) memset(at<T>(g.y, p.b, t, n), 0, size_t(g.W) * sizeof(T));
                    continue;
                }
                const bool first = count++ == 0;
                for (int64_t n = p.h0; n < p.h1; ++n) {
                    const T *ga = at<T>(g.ga, p.b, t, n), *gx = at<T>(g.gx, p.b, t, n), *x = at<T>(g.x, p.b, t, n);
                    const T *ba = (const T*)g.bias + n * g.W, *bx = ba + D, *rate = (const T*)g.rate + n * g.W;
                    T *y = at<T>(g.y, p.b, t, n), *state = h + n * Wp;
                    each_vector<T>(g.W, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                        const Cell<T> cell(load_some(ga + c, k, T(0)) + load_some(ba + c, k, T(0)),
                                           load_some(gx + c, k, T(0)) + load_some(bx + c, k, T(0)), load_some(rate + c, k, T(0)), first);
                        const Vec<T> now = cell.a * load(state + c) + cell.m * (cell.i * load_some(x + c, k, T(0)));
                        store(state + c, now), store_some(y + c, now, k);
                    });
                }
            }
            for (int64_t n = p.h0; n < p.h1; ++n) memcpy((T*)g.h1 + p.b * D + n * g.W, h + n * Wp, size_t(g.W) * sizeof(T));
            if (p.h0 == 0) g.count1[p.b] = count;
        }
    });
}

template <class T>
void rglru_backward_typed(const RglruBackward& g) {
    const int64_t D = g.H * g.W, Wp = round_up(g.W, kWidth<T>);
    const int64_t threads = useful_threads(g.threads, 72.0 * double(g.B * g.T) * double(D)), cuts = pieces(g.B, threads, g.H);
    large_pages(g.dga.data, g.B * g.T * D * int64_t(sizeof(T)), g.threads);
    large_pages(g.dgx.data, g.B * g.T * D * int64_t(sizeof(T)), g.threads);
    large_pages(g.dx.data, g.B * g.T * D * int64_t(sizeof(T)), g.threads);
    parallel(g.B * cuts, threads, [&](int64_t begin, int64_t end) {
        const int64_t size = g.H * Wp;
        Scratch mem(4 * room(size, sizeof(T)) + 3 * room(size, 8) + room(g.T, 1));
        T *h = mem.zeros<T>(size), *sums[3] = {mem.take<T>(size), mem.take<T>(size), mem.take<T>(size)};
        double* totals[3] = {mem.take<double>(size), mem.take<double>(size), mem.take<double>(size)};
        uint8_t* first = mem.take<uint8_t>(g.T);
        for (int64_t u = begin; u < end; ++u) {
            const Part p = part(g, u, cuts);
            const size_t bytes = size_t((p.h1 - p.h0) * Wp) * sizeof(T);
            for (int j = 0; j < 3; ++j) memset(sums[j], 0, size_t(size) * sizeof(T)), memset(totals[j], 0, size_t(size) * 8);
            for (int64_t n = p.h0; n < p.h1; ++n) memcpy(h + n * Wp, (const T*)g.h0 + p.b * D + n * g.W, size_t(g.W) * sizeof(T));
            const uint8_t *mask = g.mask ? g.mask + p.b * g.T : nullptr, *reset = g.reset ? g.reset + p.b * g.T : nullptr;
            int64_t count = g.count0[p.b];
            for (int64_t t = 0; t < g.T; ++t) {
                if (reset && reset[t]) memset(h + p.h0 * Wp, 0, bytes), count = 0;
                if (mask && !mask[t]) continue;
                first[t] = count++ == 0;
                for (int64_t n = p.h0; n < p.h1; ++n) {
                    const T *ga = at<T>(g.ga, p.b, t, n), *gx = at<T>(g.gx, p.b, t, n), *x = at<T>(g.x, p.b, t, n);
                    const T *ba = (const T*)g.bias + n * g.W, *bx = ba + D, *rate = (const T*)g.rate + n * g.W;
                    T *kept = at<T>(g.dga, p.b, t, n), *state = h + n * Wp;
                    const bool start = first[t];
                    each_vector<T>(g.W, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                        const Cell<T> cell(load_some(ga + c, k, T(0)) + load_some(ba + c, k, T(0)),
                                           load_some(gx + c, k, T(0)) + load_some(bx + c, k, T(0)), load_some(rate + c, k, T(0)), start);
                        const Vec<T> stays = cell.a * load(state + c);
                        store_some(kept + c, stays, k);
                        store(state + c, stays + cell.m * (cell.i * load_some(x + c, k, T(0))));
                    });
                }
            }
            for (int64_t n = p.h0; n < p.h1; ++n) memcpy(h + n * Wp, (const T*)g.dh1 + p.b * D + n * g.W, size_t(g.W) * sizeof(T));
            for (int64_t t = g.T - 1; t >= 0; --t) {
                const bool real = !mask || mask[t];
                for (int64_t n = p.h0; n < p.h1; ++n) {
                    T *dga = at<T>(g.dga, p.b, t, n), *dgx = at<T>(g.dgx, p.b, t, n), *dx = at<T>(g.dx, p.b, t, n);
                    if (!real) {
                        const size_t row = size_t(g.W) * sizeof(T);
                        memset(dga, 0, row), memset(dgx, 0, row), memset(dx, 0, row);
                        continue;
                    }
                    const T *ga = at<T>(g.ga, p.b, t, n), *gx = at<T>(g.gx, p.b, t, n), *x = at<T>(g.x, p.b, t, n);
                    const T *dy = at<T>(g.dy, p.b, t, n), *ba = (const T*)g.bias + n * g.W, *bx = ba + D, *rate = (const T*)g.rate + n * g.W;
                    T *carry = h + n * Wp, *da = sums[0] + n * Wp, *di = sums[1] + n * Wp, *drate = sums[2] + n * Wp;
                    const bool start = first[t];
                    each_vector<T>(g.W, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                        const Vec<T> one = splat(T(1)), speed = load_some(rate + c, k, T(0)), in = load_some(x + c, k, T(0));
                        const Cell<T> cell(load_some(ga + c, k, T(0)) + load_some(ba + c, k, T(0)),
                                           load_some(gx + c, k, T(0)) + load_some(bx + c, k, T(0)), speed, start);
                        const Vec<T> d = load(carry + c) + load_some(dy + c, k, T(0)), to_input = d * cell.m;
                        Vec<T> to_log = d * load_some(dga + c, k, T(0));
                        if (!start) to_log -= d * (cell.i * in) / vmax<T>(2 * cell.m, splat(T(1e-3))) * (2 * cell.a * cell.a);
                        const Vec<T> to_ga = -to_log * speed * (cell.r * (one - cell.r));
                        const Vec<T> to_gx = to_input * in * (cell.i * (one - cell.i));
                        store_some(dga + c, to_ga, k), store_some(dgx + c, to_gx, k), store_some(dx + c, to_input * cell.i, k);
                        store(da + c, load(da + c) + to_ga), store(di + c, load(di + c) + to_gx);
                        store(drate + c, load(drate + c) - to_log * cell.r);
                        store(carry + c, d * cell.a);
                    });
                }
                if (reset && reset[t]) memset(h + p.h0 * Wp, 0, bytes);
                if (t % kFold == 0)
                    for (int j = 0; j < 3; ++j) fold(totals[j], sums[j], size);
            }
            for (int64_t n = p.h0; n < p.h1; ++n) {
                memcpy((T*)g.dh0 + p.b * D + n * g.W, h + n * Wp, size_t(g.W) * sizeof(T));
                T* to[3] = {(T*)g.dbias + p.b * 2 * D, (T*)g.dbias + p.b * 2 * D + D, (T*)g.drate + p.b * D};
                for (int j = 0; j < 3; ++j)
                    for (int64_t c = 0; c < g.W; ++c) to[j][n * g.W + c] = T(totals[j][n * Wp + c]);
            }
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void rglru_forward(const RglruForward* g) { g->is_double ? rglru_forward_typed<double>(*g) : rglru_forward_typed<float>(*g); }
void rglru_backward(const RglruBackward* g) { g->is_double ? rglru_backward_typed<double>(*g) : rglru_backward_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
