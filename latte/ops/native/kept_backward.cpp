// Backward pass of attention to kept tokens: probabilities are computed again from the scores and the saved logarithms of their
// sums. A head's blocks are cut in two pieces with gradients of their own, added in the end in a fixed order.
#include "kept.h"

LATTE_BEGIN

// From scores and dy.v, both [entries][kGroup], to probabilities and gradients of the products; returns that of the bias.
template <class T>
LATTE_INLINE void gradient_lanes(const KeptBackward& w, const Entry* entries, int64_t n, int64_t at, const T* bias, const T* lse,
                                 const T* delta, T* p, T* ds, T* dbias) {
    constexpr int64_t Q = kGroup<T>;
    const Vec<T> norm = load(lse), less = load(delta);
    const Mask<T> some = norm > T(kNothing / 2) || norm != norm;
    for (int64_t j = 0; j < n; ++j) {
        Vec<T> x = load(p + j * Q), slope = splat(T(1));
        if (w.softcap > 0) {
            const Vec<T> u = vtanh(x / T(w.softcap));
            x = u * T(w.softcap), slope = T(1) - u * u;
        }
        if (bias) x += bias[j];
        const Mask<T> ok = some & sees<T>(entries[j], at);
        // What is not seen may be anything: no exponential of it.
        Vec<T> e = vexp(ok ? x - norm : Vec<T>{});
        e = ok ? e : Vec<T>{};
        Vec<T> d = e * (load(ds + j * Q) - less);
        d = ok ? d : Vec<T>{};
        if (dbias) dbias[j] += sum_lanes<T>(d);
        store(p + j * Q, e), store(ds + j * Q, d * slope);
    }
    for (int64_t j = n; j < n + kSpare; ++j) store(p + j * Q, Vec<T>{}), store(ds + j * Q, Vec<T>{});
}

// Scratch memory of a thread.
template <class T>
struct Room {
    Entry* entries;
    T *bias, *keys, *values, *panels, *turned, *turned_far, *turned_dy, *p, *ds, *lse, *delta, *out, *q, *dy, *dk, *dv, *dbias;

    static int64_t bytes(const KeptBackward& w) {
        const int64_t size = sizeof(T), rows = w.N + 2 * w.C + kSpare, Q = kGroup<T>;
        const int64_t Dp = round_up(w.D, kTileCols<T>), Vp = round_up(w.V, kTileCols<T>);
        return room(rows, sizeof(Entry)) + 2 * room(rows, size) + room(rows * w.D, size) + room(rows * w.V, size) +
               2 * room(rows * Dp, size) + room(rows * Vp, size) + 2 * room(Q * w.D, size) + room(Q * w.V, size) +
               2 * room(rows * Q, size) + 2 * room(Q, size) + room(8 * Dp, size) + room(Q * Dp, size) + room(Q * Vp, size);
    }
    Room(const KeptBackward& w, Scratch& mem) {
        const int64_t rows = w.N + 2 * w.C + kSpare, Q = kGroup<T>;
        const int64_t Dp = round_up(w.D, kTileCols<T>), Vp = round_up(w.V, kTileCols<T>);
        entries = mem.take<Entry>(rows);
        bias = mem.take<T>(rows), dbias = mem.take<T>(rows);
        keys = mem.take<T>(rows * w.D), values = mem.take<T>(rows * w.V);
        panels = mem.take<T>(rows * Dp), dk = mem.take<T>(rows * Dp), dv = mem.take<T>(rows * Vp);
        turned = mem.take<T>(Q * w.D), turned_far = mem.take<T>(Q * w.D), turned_dy = mem.take<T>(Q * w.V);
        p = mem.zeros<T>(rows * Q), ds = mem.zeros<T>(rows * Q);
        lse = mem.take<T>(Q), delta = mem.take<T>(Q), out = mem.take<T>(8 * Dp);
        q = mem.zeros<T>(Q * Dp), dy = mem.zeros<T>(Q * Vp);
    }
};

// Rows of queries or slopes as panels (Q, kTileCols) of columns.
template <class T>
LATTE_INLINE void query_panels(T* to, const View& view, int64_t b, int64_t i, int64_t h, int64_t some, int64_t width, T scale) {
    constexpr int64_t Q = kGroup<T>, N = kTileCols<T>;
    for (int64_t r = 0; r < Q; ++r)
        for (int64_t c = 0; c < width; c += N)
            for (int64_t j = 0; j < N; ++j) to[c * Q + r * N + j] = r < some && c + j < width ? row_of<T>(view, b, i + r, h)[c + j] * scale : T(0);
}

// to[entry] += sum over queries of x[entry][query] times panels of queries.
template <class T>
LATTE_INLINE void add_products(T* to, int64_t ld, const T* x, const T* panels, int64_t from, int64_t end) {
    constexpr int64_t Q = kGroup<T>, N = kTileCols<T>;
    int64_t j = from;
    for (; j + kTileRows <= end; j += kTileRows)
        for (int64_t c = 0; c < ld; c += N) product<T, true>(x + j * Q, Q, 1, panels + c * Q, N, Q, to + j * ld + c, ld);
    for (; j < end; ++j)
        for (int64_t c = 0; c < ld; c += N) product<T, true, 1>(x + j * Q, Q, 1, panels + c * Q, N, Q, to + j * ld + c, ld);
}

// Gradients of queries: ds (entries, queries) transposed, times the keys of some entries.
template <class T>
LATTE_INLINE void query_gradients(const KeptBackward& w, const View& to, int64_t b, int64_t i, int64_t h, int64_t some, const T* ds,
                                  const T* panels, int64_t entries, int64_t from, int64_t end, T* out) {
    constexpr int64_t Q = kGroup<T>, N = kTileCols<T>;
    constexpr int R = kRowsOut<T>;
    const int64_t Dp = round_up(w.D, N);
    for (int64_t r = 0; r < some; r += R) {
        for (int64_t c = 0; c < Dp; c += N)
            product<T, false, R>(ds + from * Q + r, 1, Q, panels + c * entries + from * N, N, end - from, out + c, Dp);
        for (int64_t j = 0; j < min64(R, some - r); ++j) copy_scaled(row_of<T>(to, b, i + r + j, h), out + j * Dp, w.D, T(w.scale));
    }
}

// Gradients of one piece: (S, D), (S, D) of keys turned back, (S, V), (S); of all views the strides of tokens.
template <class T>
struct Sums {
    T *dk, *dkb, *dv, *dbias;
    int64_t k, kb, v, bias;
};

template <class T>
void backward_block(const KeptBackward& w, int64_t b, int64_t g, int64_t n, Room<T>& m, const Sums<T>& sums) {
    constexpr int64_t W = kWidth<T>, Q = kGroup<T>, N = kTileCols<T>;
    const int64_t group = w.H / w.G, Dp = round_up(w.D, N), Vp = round_up(w.V, N);
    const Count count = list_entries(w, b, n, g, m.entries);
    const int64_t i0 = n * w.C, queries = min64(w.C, w.T - i0), all = count.all;
    gather_rows(m.keys, w.D, w.k, w.kb, w.D, b, g, m.entries, count);
    gather_rows(m.values, w.V, w.v, w.v, w.V, b, g, m.entries, count);
    pack_rows(m.panels, m.keys, w.D, all, w.D, (const int32_t*)nullptr);
    if (w.bias)
        for (int64_t j = 0; j < all; ++j) m.bias[j] = ((const T*)w.bias)[(b * w.S + m.entries[j].source) * w.G + g];
    memset(m.dk, 0, size_t(all * Dp) * sizeof(T));
    memset(m.dv, 0, size_t(all * Vp) * sizeof(T));
    memset(m.dbias, 0, size_t(all) * sizeof(T));
    for (int64_t h = g * group; h < (g + 1) * group; ++h)
        for (int64_t i = i0; i < i0 + queries; i += Q) {
            const int64_t some = min64(Q, i0 + queries - i);
            turn_scaled<Q>(m.turned, row_of<T>(w.q, b, i, h), w.q.t, some, w.D, T(w.scale));
            if (count.near < all) turn_scaled<Q>(m.turned_far, row_of<T>(w.qf, b, i, h), w.qf.t, some, w.D, T(w.scale));
            turn_scaled<Q>(m.turned_dy, row_of<T>(w.dy, b, i, h), w.dy.t, some, w.V, T(1));
            for (int64_t r = 0; r < Q; ++r) {
                const int64_t at = (b * w.T + i + r) * w.H + h;
                m.lse[r] = r < some ? ((const T*)w.lse)[at] : T(kNothing);
                m.delta[r] = r < some ? dot(row_of<T>(w.dy, b, i + r, h), row_of<T>(w.y, b, i + r, h), w.V) - ((const T*)w.dlse)[at] : T(0);
            }
            entry_products(m.keys, w.D, w.D, count, m.turned, m.turned_far, m.p);
            entry_products(m.values, w.V, w.V, count, m.turned_dy, m.turned_dy, m.ds);
            for (int a = 0; a < kPair; ++a)
                gradient_lanes(w, m.entries, all, i - i0 + a * W, w.bias ? m.bias : nullptr, m.lse + a * W, m.delta + a * W,
                               m.p + a * W, m.ds + a * W, w.bias ? m.dbias : nullptr);
            query_gradients(w, w.dq, b, i, h, some, m.ds, m.panels, all, int64_t(0), count.near, m.out);
            if (w.reach) query_gradients(w, w.dqf, b, i, h, some, m.ds, m.panels, all, count.near, all, m.out);
            query_panels(m.dy, w.dy, b, i, h, some, w.V, T(1));
            add_products(m.dv, Vp, m.p, m.dy, int64_t(0), all);
            query_panels(m.q, w.q, b, i, h, some, w.D, T(w.scale));
            add_products(m.dk, Dp, m.ds, m.q, int64_t(0), count.near);
            if (count.near < all) {
                query_panels(m.q, w.qf, b, i, h, some, w.D, T(w.scale));
                add_products(m.dk, Dp, m.ds, m.q, count.near, all);
            }
        }
    for (int64_t j = 0; j < all; ++j) {
        const int64_t source = m.entries[j].source;
        T *dk = j < count.near ? sums.dk + source * sums.k : sums.dkb + source * sums.kb, *dv = sums.dv + source * sums.v;
        for (int64_t d = 0; d < w.D; ++d) dk[d] += m.dk[j * Dp + d];
        for (int64_t c = 0; c < w.V; ++c) dv[c] += m.dv[j * Vp + c];
        if (w.bias) sums.dbias[source * sums.bias] += m.dbias[j];
    }
}

template <class T>
void kept_backward_typed(const KeptBackward& w) {
    const int64_t heads = w.B * w.G, cut = (w.blocks + 1) / 2, pieces = w.blocks > 3 ? 2 : 1;
    const double work = 3.0 * double(w.B * w.T * w.H) * double((w.N + w.C) * (w.D + w.V));
    const int64_t threads = useful_threads(w.threads, work);
    // The first piece of a head adds to the outputs, the second to memory of its own.
    const int64_t width = w.D * (w.reach ? 2 : 1) + w.V + 1, own = w.S * width;
    Scratch second(pieces > 1 ? room(heads * own, sizeof(T)) : 64);
    T* spare = pieces > 1 ? second.take<T>(heads * own) : nullptr;
    parallel(heads * pieces, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(Room<T>::bytes(w));
        Room<T> m(w, mem);
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / pieces / w.G, g = u / pieces % w.G;
            Sums<T> sums{row_of<T>(w.dk, b, 0, g), w.reach ? row_of<T>(w.dkb, b, 0, g) : nullptr, row_of<T>(w.dv, b, 0, g),
                         w.bias ? (T*)w.dbias + b * w.S * w.G + g : nullptr, w.dk.t, w.dkb.t, w.dv.t, w.G};
            if (u % pieces) {
                T* mine = spare + (b * w.G + g) * own;
                memset(mine, 0, size_t(own) * sizeof(T));
                sums = {mine, mine + w.D, mine + width - w.V - 1, mine + width - 1, width, width, width, width};
            }
            const int64_t from = u % pieces ? cut : 0, to = u % pieces || pieces == 1 ? w.blocks : cut;
            for (int64_t n = from; n < to; ++n) backward_block(w, b, g, n, m, sums);
        }
    });
    if (pieces == 1) return;
    parallel(heads, threads, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u)
            for (int64_t t = 0; t < w.S; ++t) {
                const int64_t b = u / w.G, g = u % w.G;
                const T* mine = spare + u * own + t * width;
                T *dk = row_of<T>(w.dk, b, t, g), *dv = row_of<T>(w.dv, b, t, g);
                for (int64_t d = 0; d < w.D; ++d) dk[d] += mine[d];
                if (w.reach)
                    for (int64_t d = 0; d < w.D; ++d) row_of<T>(w.dkb, b, t, g)[d] += mine[w.D + d];
                for (int64_t c = 0; c < w.V; ++c) dv[c] += mine[width - w.V - 1 + c];
                if (w.bias) ((T*)w.dbias)[(b * w.S + t) * w.G + g] += mine[width - 1];
            }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void kept_backward(const KeptBackward* w) { w->is_double ? kept_backward_typed<double>(*w) : kept_backward_typed<float>(*w); }
}  // namespace LATTE_ISA
}  // namespace latte
