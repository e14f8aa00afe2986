// The diagonal scan h_t = exp(log_a_t) h_{t-1} + b_t, from the left or from the right.
//
// Bound by memory: a thread owns a range of channels and walks the tokens, its states in the first-level cache, so that every
// row is read and written once, in order.
#include "args.h"
#include "work.h"

LATTE_BEGIN

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t) {
    return (T*)v.data + b * v.b + t * v.t;
}

// What happens between the state and token t: nothing passes over a document's boundary, which lies before a token with a
// reset. From the right it is the token to the right, already consumed, that carries the mark.
template <class A>
struct Walk {
    const A& g;
    int64_t b;
    int64_t token(int64_t i) const { return g.reverse ? g.T - 1 - i : i; }
    bool real(int64_t t) const { return !g.mask || g.mask[b * g.T + t]; }
    bool drops(int64_t t) const {
        const int64_t mark = g.reverse ? t + 1 : t;
        return g.reset && mark < g.T && g.reset[b * g.T + mark];
    }
};

// A vector's worth of channels at a row: whole, or the n that are left at the end of the row.
struct Whole {
    template <class T>
    LATTE_INLINE static Vec<T> get(const T* p, int64_t) { return load(p); }
    template <class T>
    LATTE_INLINE static void put(T* p, Vec<T> v, int64_t) { store(p, v); }
};
struct Some {
    template <class T>
    LATTE_INLINE static Vec<T> get(const T* p, int64_t n) { return load_some(p, n, T(0)); }
    template <class T>
    LATTE_INLINE static void put(T* p, Vec<T> v, int64_t n) { store_some(p, v, n); }
};
template <class T, class F>
LATTE_INLINE void each_vector(int64_t c0, int64_t c1, F body) {
    int64_t c = c0;
    for (; c + kWidth<T> <= c1; c += kWidth<T>) body(Whole(), c, int64_t(kWidth<T>));
    if (c < c1) body(Some(), c, c1 - c);
}

template <class T>
void scan_forward_typed(const ScanForward& g) {
    constexpr int64_t W = kWidth<T>;
    const int64_t vectors = (g.D + W - 1) / W, threads = useful_threads(g.threads, 4.0 * double(g.B * g.T) * double(g.D));
    const int64_t cuts = pieces(g.B, threads, vectors);
    large_pages(g.h.data, g.B * g.T * g.D * int64_t(sizeof(T)), g.threads);
    parallel(g.B * cuts, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(room(vectors * W, sizeof(T)));
        T* h = mem.zeros<T>(vectors * W);
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / cuts, c0 = u % cuts * vectors / cuts * W, c1 = min64(g.D, (u % cuts + 1) * vectors / cuts * W);
            const Walk<ScanForward> walk{g, b};
            memcpy(h + c0, (const T*)g.h0 + b * g.D + c0, size_t(c1 - c0) * sizeof(T));
            for (int64_t i = 0; i < g.T; ++i) {
                const int64_t t = walk.token(i);
                const T *log_a = at<T>(g.log_a, b, t), *x = at<T>(g.b, b, t);
                T* y = at<T>(g.h, b, t);
                if (walk.drops(t)) memset(h + c0, 0, size_t(c1 - c0) * sizeof(T));
                if (!walk.real(t)) {
                    memset(y + c0, 0, size_t(c1 - c0) * sizeof(T));
                    continue;
                }
                each_vector<T>(c0, c1, [=](auto row, int64_t c, int64_t n) {
                    const Vec<T> now = vexp(row.get(log_a + c, n)) * load(h + c) + row.get(x + c, n);
                    store(h + c, now), row.put(y + c, now, n);
                });
            }
            memcpy((T*)g.h1 + b * g.D + c0, h + c0, size_t(c1 - c0) * sizeof(T));
        }
    });
}

// One vector of the two passes of the gradient. The first leaves exp(log_a_t) h_{t-1} in dlog_a; the second, which runs the
// other way with the gradient of h_t in hand, multiplies it in. So no state is kept.
template <class T>
void scan_backward_typed(const ScanBackward& g) {
    constexpr int64_t W = kWidth<T>;
    const int64_t vectors = (g.D + W - 1) / W, threads = useful_threads(g.threads, 8.0 * double(g.B * g.T) * double(g.D));
    const int64_t cuts = pieces(g.B, threads, vectors);
    large_pages(g.dlog_a.data, g.B * g.T * g.D * int64_t(sizeof(T)), g.threads);
    large_pages(g.db.data, g.B * g.T * g.D * int64_t(sizeof(T)), g.threads);
    parallel(g.B * cuts, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(room(vectors * W, sizeof(T)));
        T* h = mem.zeros<T>(vectors * W);
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / cuts, c0 = u % cuts * vectors / cuts * W, c1 = min64(g.D, (u % cuts + 1) * vectors / cuts * W);
            const size_t bytes = size_t(c1 - c0) * sizeof(T);
            const Walk<ScanBackward> walk{g, b};
            memcpy(h + c0, (const T*)g.h0 + b * g.D + c0, bytes);
            for (int64_t i = 0; i < g.T; ++i) {
                const int64_t t = walk.token(i);
                const T *log_a = at<T>(g.log_a, b, t), *x = at<T>(g.b, b, t);
                T* da = at<T>(g.dlog_a, b, t);
                if (walk.drops(t)) memset(h + c0, 0, bytes);
                if (!walk.real(t)) {
                    memset(da + c0, 0, bytes);
                    continue;
                }
                each_vector<T>(c0, c1, [=](auto row, int64_t c, int64_t n) {
                    const Vec<T> kept = vexp(row.get(log_a + c, n)) * load(h + c);
                    row.put(da + c, kept, n), store(h + c, kept + row.get(x + c, n));
                });
            }
            memcpy(h + c0, (const T*)g.dh1 + b * g.D + c0, bytes);
            for (int64_t i = g.T - 1; i >= 0; --i) {
                const int64_t t = walk.token(i);
                const T *log_a = at<T>(g.log_a, b, t), *dy = at<T>(g.dh, b, t);
                T *da = at<T>(g.dlog_a, b, t), *db = at<T>(g.db, b, t);
                if (walk.real(t)) {
                    each_vector<T>(c0, c1, [=](auto row, int64_t c, int64_t n) {
                        const Vec<T> d = load(h + c) + row.get(dy + c, n);
                        row.put(db + c, d, n), row.put(da + c, d * row.get(da + c, n), n);
                        store(h + c, d * vexp(row.get(log_a + c, n)));
                    });
                } else {
                    memset(db + c0, 0, bytes);
                }
                if (walk.drops(t)) memset(h + c0, 0, bytes);
            }
            memcpy((T*)g.dh0 + b * g.D + c0, h + c0, bytes);
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void scan_forward(const ScanForward* g) { g->is_double ? scan_forward_typed<double>(*g) : scan_forward_typed<float>(*g); }
void scan_backward(const ScanBackward* g) { g->is_double ? scan_backward_typed<double>(*g) : scan_backward_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
