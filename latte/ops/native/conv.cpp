// The causal depthwise convolution y_t = bias + sum_k weight_k . x_{t-K+1+k} over the real tokens of a document.
//
// Bound by memory: a thread owns a range of channels and walks the tokens with pointers to the K latest inputs, so that every row is
// fetched once and read again from the first-level cache. Rows before a document's first token are a row of zeros, and their
// gradients go to a row that nobody reads.
#include "heads.h"
#include "norm.h"
#include "work.h"

LATTE_BEGIN

// The K latest inputs, the present one last, from channel c0 on.
template <class T, class P>
struct Latest {
    P** rows;
    int64_t K;
    void start(P* tail, int64_t stride, int64_t c0) {
        for (int64_t k = 0; k + 1 < K; ++k) rows[k + 1] = tail + k * stride + c0;
    }
    void forget(P* nothing) {
        for (int64_t k = 0; k < K; ++k) rows[k] = nothing;
    }
    void push(P* now) {
        for (int64_t k = 0; k + 1 < K; ++k) rows[k] = rows[k + 1];
        rows[K - 1] = now;
    }
    // The inputs that the next token looks at.
    P* next(int64_t k) const { return rows[k + 1]; }
};

// Calls body(b, c0, c1) for every range of channels of every row of the batch, shared by threads.
template <class T, class A, class F>
void each_range(const A& g, double work, F body) {
    constexpr int64_t W = kWidth<T>;
    const int64_t vectors = (g.D + W - 1) / W, threads = useful_threads(g.threads, work * double(g.B * g.T) * double(g.D * g.K));
    const int64_t cuts = pieces(g.B, threads, vectors);
    parallel(g.B * cuts, threads, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u)
            body(u / cuts, u % cuts * vectors / cuts * W, min64(g.D, (u % cuts + 1) * vectors / cuts * W));
    });
}

template <class T>
void conv_forward_typed(const ConvForward& g) {
    large_pages(g.y.data, g.B * g.T * g.D * int64_t(sizeof(T)), g.threads);
    each_range<T>(g, 2.0, [&](int64_t b, int64_t c0, int64_t c1) {
        const int64_t width = c1 - c0, D = g.D, K = g.K;
        Scratch mem(room(K, sizeof(T*)) + room(width, sizeof(T)));
        const T *nothing = mem.zeros<T>(width), *weight = (const T*)g.weight + c0, *bias = (const T*)g.bias + c0;
        Latest<T, const T> seen{mem.take<const T*>(K), K};
        seen.start((const T*)g.tail0 + b * (K - 1) * D, D, c0);
        for (int64_t t = 0; t < g.T; ++t) {
            T* y = at<T>(g.y, b, t, 0) + c0;
            if (g.reset && g.reset[b * g.T + t]) seen.forget(nothing);
            if (g.mask && !g.mask[b * g.T + t]) {
                memset(y, 0, size_t(width) * sizeof(T));
                continue;
            }
            seen.push(at<T>(g.x, b, t, 0) + c0);
            each_vector<T>(width, [=](int64_t c, int64_t n) __attribute__((always_inline)) {
                Vec<T> sum = load_some(bias + c, n, T(0));
                for (int64_t k = 0; k < K; ++k) sum = load_some(weight + k * D + c, n, T(0)) * load_some(seen.rows[k] + c, n, T(0)) + sum;
                store_some(y + c, sum, n);
            });
        }
        for (int64_t k = 0; k + 1 < K; ++k) memcpy((T*)g.tail1 + (b * (K - 1) + k) * D + c0, seen.next(k), size_t(width) * sizeof(T));
    });
}

// The gradient of a weight is a sum over all tokens: it is added up in blocks of so many, or small terms would be lost in long rows.
constexpr int64_t kConvBlock = 256;

template <class T>
void conv_backward_typed(const ConvBackward& g) {
    large_pages(g.dx.data, g.B * g.T * g.D * int64_t(sizeof(T)), g.threads);
    each_range<T>(g, 4.0, [&](int64_t b, int64_t c0, int64_t c1) {
        const int64_t width = c1 - c0, D = g.D, K = g.K;
        const size_t bytes = size_t(width) * sizeof(T);
        Scratch mem(2 * room(K, sizeof(T*)) + 2 * room(width, sizeof(T)) + room((K + 1) * width, sizeof(T)));
        const T *nothing = mem.zeros<T>(width), *weight = (const T*)g.weight + c0;
        T *unread = mem.zeros<T>(width), *part = mem.zeros<T>((K + 1) * width);  // of the weights, then of the bias
        T *dweight = (T*)g.dweight + b * K * D + c0, *dbias = (T*)g.dbias + b * D + c0, *dtail = (T*)g.dtail0 + b * (K - 1) * D;
        for (int64_t k = 0; k < K; ++k) memset(dweight + k * D, 0, bytes);
        memset(dbias, 0, bytes);
        for (int64_t k = 0; k + 1 < K; ++k) memset(dtail + k * D + c0, 0, bytes);
        Latest<T, const T> seen{mem.take<const T*>(K), K};
        Latest<T, T> slope{mem.take<T*>(K), K};
        seen.start((const T*)g.tail0 + b * (K - 1) * D, D, c0), slope.start(dtail, D, c0);
        const auto add_to = [=](T* sum, const T* x) {
            each_vector<T>(width, [=](int64_t c, int64_t n) __attribute__((always_inline)) {
                store_some(sum + c, load_some(sum + c, n, T(0)) + load_some(x + c, n, T(0)), n);
            });
        };
        for (int64_t t = 0; t < g.T; ++t) {
            T* dx = at<T>(g.dx, b, t, 0) + c0;
            memset(dx, 0, bytes);
            if (g.reset && g.reset[b * g.T + t]) seen.forget(nothing), slope.forget(unread);
            if (!g.mask || g.mask[b * g.T + t]) {
                const T* dy = at<T>(g.dy, b, t, 0) + c0;
                seen.push(at<T>(g.x, b, t, 0) + c0), slope.push(dx);
                each_vector<T>(width, [=](int64_t c, int64_t n) __attribute__((always_inline)) {
                    const Vec<T> d = load_some(dy + c, n, T(0));
                    for (int64_t k = 0; k < K; ++k) {
                        T *sum = part + k * width + c, *row = slope.rows[k] + c;
                        store_some(sum, d * load_some(seen.rows[k] + c, n, T(0)) + load_some(sum, n, T(0)), n);
                        store_some(row, d * load_some(weight + k * D + c, n, T(0)) + load_some(row, n, T(0)), n);
                    }
                    T* sum = part + K * width + c;
                    store_some(sum, d + load_some(sum, n, T(0)), n);
                });
            }
            if ((t + 1) % kConvBlock && t + 1 < g.T) continue;
            for (int64_t k = 0; k < K; ++k) add_to(dweight + k * D, part + k * width);
            add_to(dbias, part + K * width);
            memset(part, 0, size_t(K + 1) * bytes);
        }
        for (int64_t k = 0; k + 1 < K; ++k) add_to(slope.next(k), (const T*)g.dtail1 + (b * (K - 1) + k) * D + c0);
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void conv_forward(const ConvForward* g) { g->is_double ? conv_forward_typed<double>(*g) : conv_forward_typed<float>(*g); }
void conv_backward(const ConvBackward* g) { g->is_double ? conv_backward_typed<double>(*g) : conv_backward_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
