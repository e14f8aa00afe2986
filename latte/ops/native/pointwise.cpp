// What stands between the matrix products of a layer, each in one pass over memory: rotary encoding, SwiGLU and RMS norm.
#include "args.h"
#include "norm.h"
#include "work.h"

LATTE_BEGIN

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}
// Channels i and i + K/2 turned by the token's angle for i; backwards it is the other way round.
template <class T>
void rotate_typed(const Rotate& g) {
    const int64_t half = g.K / 2, threads = useful_threads(g.threads, 2.0 * double(g.B * g.T * g.H) * double(g.K));
    large_pages(g.y.data, g.B * g.T * g.H * g.K * int64_t(sizeof(T)), g.threads);
    parallel(g.B * g.T, threads, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t b = n / g.T, t = n % g.T, row = b * g.table_b + t * half;
            const T *cosine = (const T*)g.cosine + row, *sine = (const T*)g.sine + row, turn = g.inverse ? T(-1) : T(1);
            for (int64_t h = 0; h < g.H; ++h) {
                const T* x = at<T>(g.x, b, t, h);
                T* y = at<T>(g.y, b, t, h);
                each_vector<T>(half, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                    const Vec<T> cv = load_some(cosine + c, k, T(0)), sv = load_some(sine + c, k, T(0)) * splat(turn);
                    const Vec<T> p = load_some(x + c, k, T(0)), q = load_some(x + half + c, k, T(0));
                    store_some(y + c, p * cv - q * sv, k), store_some(y + half + c, q * cv + p * sv, k);
                });
            }
        }
    });
}

// silu(gate) * up over n elements in a row, in blocks that threads share.
constexpr int64_t kBlock = 4096;
template <class T, class F>
void blocks(int64_t n, int64_t threads, F body) {
    parallel((n + kBlock - 1) / kBlock, useful_threads(threads, 16.0 * double(n)), [&](int64_t begin, int64_t end) {
        const int64_t from = begin * kBlock, width = min64(n, end * kBlock) - from;
        each_vector<T>(width, [&](int64_t c, int64_t k) __attribute__((always_inline)) { body(from + c, k); });
    });
}

template <class T>
void swiglu_forward_typed(const SwigluForward& g) {
    const T *gate = (const T*)g.gate, *up = (const T*)g.up;
    T* y = (T*)g.y;
    large_pages(y, g.n * int64_t(sizeof(T)), g.threads);
    blocks<T>(g.n, g.threads, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
        const Vec<T> x = load_some(gate + c, k, T(0));
        store_some(y + c, x / (1 + vexp(-x)) * load_some(up + c, k, T(0)), k);
    });
}

template <class T>
void swiglu_backward_typed(const SwigluBackward& g) {
    const T *gate = (const T*)g.gate, *up = (const T*)g.up, *dy = (const T*)g.dy;
    T *dgate = (T*)g.dgate, *dup = (T*)g.dup;
    large_pages(dgate, g.n * int64_t(sizeof(T)), g.threads);
    large_pages(dup, g.n * int64_t(sizeof(T)), g.threads);
    blocks<T>(g.n, g.threads, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
        const Vec<T> one = splat(T(1)), x = load_some(gate + c, k, T(0)), d = load_some(dy + c, k, T(0)), s = one / (one + vexp(-x));
        store_some(dup + c, d * (x * s), k);
        store_some(dgate + c, d * load_some(up + c, k, T(0)) * (s * (one + x * (one - s))), k);
    });
}

template <class T>
void norm_forward_typed(const NormForward& g) {
    const T* weight = (const T*)g.weight;
    large_pages(g.y, g.N * g.D * int64_t(sizeof(T)), g.threads);
    parallel(g.N, useful_threads(g.threads, 4.0 * double(g.N) * double(g.D)), [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) norm_row((T*)g.y + n * g.D, (const T*)g.x + n * g.D, weight, g.D, g.eps);
    });
}

// dx = inv (w dy - x inv^2 mean(w dy x)) row by row; then dw = sum of dy x inv by columns, so that no sum depends on threads.
template <class T>
void norm_backward_typed(const NormBackward& g) {
    constexpr int W = kWidth<T>;
    const T* weight = (const T*)g.weight;
    const int64_t threads = useful_threads(g.threads, 8.0 * double(g.N) * double(g.D)), vectors = (g.D + W - 1) / W;
    Scratch mem(room(g.N, sizeof(T)));
    T* invs = mem.take<T>(g.N);
    large_pages(g.dx, g.N * g.D * int64_t(sizeof(T)), g.threads);
    parallel(g.N, threads, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const T *x = (const T*)g.x + n * g.D, *dy = (const T*)g.dy + n * g.D;
            T* dx = (T*)g.dx + n * g.D;
            invs[n] = inverse_rms(x, g.D, g.eps);
            Vec<T> dots = {};
            each_vector<T>(g.D, [&](int64_t c, int64_t k) __attribute__((always_inline)) {
                dots = load_some(dy + c, k, T(0)) * load_some(weight + c, k, T(0)) * load_some(x + c, k, T(0)) + dots;
            });
            const Vec<T> inv = splat(invs[n]), back = splat(T(sum_lanes<T>(dots) / T(g.D) * invs[n] * invs[n]));
            each_vector<T>(g.D, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                const Vec<T> direct = load_some(dy + c, k, T(0)) * load_some(weight + c, k, T(0));
                store_some(dx + c, inv * (direct - load_some(x + c, k, T(0)) * back), k);
            });
        }
    });
    parallel(vectors, threads, [&](int64_t begin, int64_t end) {
        const int64_t from = begin * W, width = min64(g.D, end * W) - from;
        Scratch own(room(round_up(width, W), sizeof(T)) + room(width, 8));
        T* sum = own.zeros<T>(round_up(width, W));
        double* total = own.zeros<double>(width);
        for (int64_t n = 0; n < g.N; ++n) {
            const T *x = (const T*)g.x + n * g.D + from, *dy = (const T*)g.dy + n * g.D + from;
            const Vec<T> inv = splat(invs[n]);
            each_vector<T>(width, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                store(sum + c, load_some(x + c, k, T(0)) * inv * load_some(dy + c, k, T(0)) + load(sum + c));
            });
            if (n % kFold == kFold - 1 || n + 1 == g.N) fold(total, sum, width);
        }
        for (int64_t c = 0; c < width; ++c) ((T*)g.dweight)[from + c] = T(total[c]);
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void rotate(const Rotate* g) { g->is_double ? rotate_typed<double>(*g) : rotate_typed<float>(*g); }
void swiglu_forward(const SwigluForward* g) { g->is_double ? swiglu_forward_typed<double>(*g) : swiglu_forward_typed<float>(*g); }
void swiglu_backward(const SwigluBackward* g) { g->is_double ? swiglu_backward_typed<double>(*g) : swiglu_backward_typed<float>(*g); }
void norm_forward(const NormForward* g) { g->is_double ? norm_forward_typed<double>(*g) : norm_forward_typed<float>(*g); }
void norm_backward(const NormBackward* g) { g->is_double ? norm_backward_typed<double>(*g) : norm_backward_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
