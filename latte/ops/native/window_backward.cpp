// Backward pass of sliding-window softmax attention: probabilities are computed again from the scores and the saved logarithms
// of their sums. Blocks of kBlock queries meet packed keys; every tile of 6 queries multiplies only the vectors of keys that it
// sees.
#include "window.h"

LATTE_BEGIN

constexpr int64_t kBlock = 4 * kTileRows;

// The same in groups of `group` keys: all of [first, last).
template <class A>
LATTE_INLINE void groups(const A& w, const Span& s, int64_t i, int64_t n, int64_t group, int64_t& first, int64_t& last) {
    seen_by(w, s, i, n, first, last);
    first /= group;
    last = (last + group - 1) / group;
}

// out[rows][keys] = x (rows, width) . packed keys, for the vectors of keys that each tile of rows sees; `origin` is the first
// panel of out.
template <class T, class A>
void scores(const A& w, const Span& s, int64_t i, int64_t rows, const T* x, int64_t width, int64_t ldx, const T* keys, T* out,
            int64_t ldo, int64_t origin, int64_t end) {
    constexpr int64_t N = kTileCols<T>, W = kWidth<T>;
    for (int64_t p = origin; p < end; ++p)
        for (int64_t r = 0; r < rows; r += kTileRows) {
            int64_t lo, hi;
            seen_by(w, s, i + r, min64(kTileRows, rows - r), lo, hi);
            // At the edges of the window a tile often sees only one half of a panel.
            const bool lower = lo < p * N + W && hi > p * N, upper = lo < (p + 1) * N && hi > p * N + W;
            const T *from = x + r * ldx, *panel = keys + p * width * N;
            T* to = out + r * ldo + (p - origin) * N;
            if (lower && upper) {
                product<T, false>(from, ldx, 1, panel, N, width, to, ldo);
            } else if (lower || upper) {
                product<T, false, kTileRows, 1>(from, ldx, 1, panel + (upper ? W : 0), N, width, to + (upper ? W : 0), ldo);
            }
        }
}

// From scores and dy.v to probabilities and the gradients of the scores, over columns [origin, stop) of the block.
template <class T>
void gradient_row(T* p, T* ds, int64_t origin, int64_t stop, int64_t first, int64_t last, int64_t lo, int64_t hi,
                  const Int<T>* ids, int64_t id, T cap, T lse, T delta) {
    constexpr int W = kWidth<T>;
    const bool empty = id < 0 || !(lse > T(kEmpty / 2));
    for (int64_t j = origin; j < stop; j += W) {
        T *pj = p + j - origin, *dj = ds + j - origin;
        if (empty || j < first || j >= last) {
            store(pj, Vec<T>{}), store(dj, Vec<T>{});
            continue;
        }
        Vec<T> x = load(pj), slope = splat(T(1));
        if (cap > 0) {
            const Vec<T> u = vtanh(x / cap);
            x = u * cap, slope = T(1) - u * u;
        }
        Vec<T> e = vexp(x - lse), d = e * (load(dj) - delta) * slope;
        if (ids || j < lo || j + W > hi) {
            const Mask<T> ok = visible<T>(j, lo, hi, ids, Int<T>(id));
            e = ok ? e : Vec<T>{}, d = ok ? d : Vec<T>{};
        }
        store(pj, e), store(dj, d);
    }
    // Tiles of six keys may end behind the last panel.
    for (int64_t j = stop - origin; j < stop - origin + kTileRows; ++j) p[j] = ds[j] = 0;
}

template <class T>
void window_backward_typed(const WindowBackward& w) {
    constexpr int64_t N = kTileCols<T>, W = kWidth<T>;
    const int64_t group = w.H / w.G, reach = w.left + w.right;
    const double work = 3.0 * double(w.B) * double(w.T * w.H) * double(min64(reach + 1, w.S) * (w.D + w.V));
    const int64_t threads = useful_threads(w.threads, work);
    // Spans no shorter than the reach share keys with their neighbours only: even and odd ones take turns to add to dk and dv.
    const int64_t step = round_up(max64(96, reach), kBlock), steps = (w.T + step - 1) / step;
    const int64_t Dp = round_up(w.D, N), Vp = round_up(w.V, N), keys = round_up(min64(w.S, step + reach), N);
    const int64_t wide = min64(keys, round_up(kBlock + reach, N) + N) + round_up(kTileRows, W);
    large_pages(w.dq.data, w.B * w.T * w.H * w.D * int64_t(sizeof(T)), w.threads);

    for (int64_t turn = 0; turn < 2; ++turn) {
        const int64_t mine = (steps + 1 - turn) / 2;
        parallel(w.B * mine * w.G, threads, [&](int64_t begin, int64_t end) {
            const int64_t size = sizeof(T), more = keys + kTileRows;
            Scratch mem(room(keys * w.D, size) + room(keys * w.V, size) + room(keys * Dp, size) + room(more * Dp, size) +
                        room(more * Vp, size) + room(keys + W, size) + 3 * room(kBlock * Dp, size) + 2 * room(kBlock * Vp, size) +
                        2 * room(kBlock * wide, size));
            T *kt = mem.take<T>(keys * w.D), *vt = mem.take<T>(keys * w.V), *kr = mem.take<T>(keys * Dp);
            T *dk = mem.take<T>(more * Dp), *dv = mem.take<T>(more * Vp);
            Int<T>* id_room = mem.take<Int<T>>(keys + W);
            T *q = mem.zeros<T>(kBlock * Dp), *qr = mem.take<T>(kBlock * Dp), *dq = mem.take<T>(kBlock * Dp);
            T *dy = mem.zeros<T>(kBlock * Vp), *dyr = mem.take<T>(kBlock * Vp);
            T *p = mem.zeros<T>(kBlock * wide), *ds = mem.zeros<T>(kBlock * wide);

            for (int64_t u = begin; u < end; ++u) {
                const Span s = span_of(w, step, 1, u / w.G / mine, u / w.G % mine * 2 + turn, u % w.G);
                const Int<T>* ids = key_ids<T>(id_room, w.seg_k ? w.seg_k + s.b * w.S + s.j0 : nullptr, s.m, keys);
                pack_columns(kt, at<T>(w.k, s.b, s.j0, s.g), w.k.t, s.m, w.D, ids);
                pack_columns(vt, at<T>(w.v, s.b, s.j0, s.g), w.v.t, s.m, w.V, ids);
                pack_rows(kr, at<T>(w.k, s.b, s.j0, s.g), w.k.t, s.m, w.D, ids);
                memset(dk, 0, size_t(more * Dp * size));
                memset(dv, 0, size_t(more * Vp * size));
                for (int64_t h = s.g * group; h < (s.g + 1) * group; ++h)
                    for (int64_t i = s.i0; i < s.i0 + s.n; i += kBlock) {
                        const int64_t rows = min64(kBlock, s.i0 + s.n - i);
                        const int32_t* id = w.seg_q ? w.seg_q + s.b * w.T + i : nullptr;
                        int64_t origin, stop;
                        groups(w, s, i, rows, N, origin, stop);
                        T delta[kBlock];
                        for (int64_t r = 0; r < kBlock; ++r) {
                            const bool real = r < rows && !(id && id[r] < 0);
                            const T *qi = at<T>(w.q, s.b, i + r, h), *gi = at<T>(w.dy, s.b, i + r, h), *yi = at<T>(w.y, s.b, i + r, h);
                            if (real) {
                                copy_scaled(q + r * Dp, qi, w.D, T(w.scale));
                                memcpy(dy + r * Vp, gi, size_t(w.V * size));
                            } else {
                                memset(q + r * Dp, 0, size_t(w.D * size));
                                memset(dy + r * Vp, 0, size_t(w.V * size));
                            }
                            delta[r] = real ? dot(gi, yi, w.V) - ((const T*)w.dlse)[(s.b * w.T + i + r) * w.H + h] : T(0);
                        }
                        scores(w, s, i, rows, q, w.D, Dp, kt, p, wide, origin, stop);
                        scores(w, s, i, rows, dy, w.V, Vp, vt, ds, wide, origin, stop);
                        for (int64_t r = 0; r < rows; ++r) {
                            int64_t lo, hi, first, last;
                            seen(w, s, i + r, lo, hi);
                            const int64_t tile = r / kTileRows * kTileRows;
                            groups(w, s, i + tile, min64(kTileRows, rows - tile), W, first, last);
                            gradient_row(p + r * wide, ds + r * wide, origin * N, stop * N, first * W, last * W, lo, hi, ids,
                                         id ? id[r] : 0, T(w.softcap), ((const T*)w.lse)[(s.b * w.T + i + r) * w.H + h], delta[r]);
                        }
                        int64_t from, to, lo, hi;
                        seen_by(w, s, i, rows, from, to);
                        for (int64_t r = 0; r < rows; r += kTileRows) {
                            seen_by(w, s, i + r, min64(kTileRows, rows - r), lo, hi);
                            for (int64_t c = 0; c < Dp; c += N)
                                product<T, false>(ds + r * wide + lo - origin * N, wide, 1, kr + c * s.m + lo * N, N, hi - lo,
                                                  dq + r * Dp + c, Dp);
                        }
                        for (int64_t r = 0; r < rows; ++r)
                            copy_scaled(at<T>(w.dq, s.b, i + r, h), dq + r * Dp, w.D, T(w.scale));
                        pack_rows(qr, q, Dp, kBlock, Dp, (const Int<T>*)nullptr);
                        pack_rows(dyr, dy, Vp, kBlock, Vp, (const Int<T>*)nullptr);
                        for (int64_t j = from; j < to; j += kTileRows) {
                            const int64_t at_key = j + s.j0 - (w.S - w.T) - i;  // the query standing at key j
                            const int64_t r0 = max64(0, at_key - w.right), r1 = min64(rows, at_key + kTileRows + w.left);
                            for (int64_t c = 0; c < Vp; c += N)
                                product<T, true>(p + r0 * wide + j - origin * N, 1, wide, dyr + (c * kBlock + r0 * N), N, r1 - r0,
                                                 dv + j * Vp + c, Vp);
                            for (int64_t c = 0; c < Dp; c += N)
                                product<T, true>(ds + r0 * wide + j - origin * N, 1, wide, qr + (c * kBlock + r0 * N), N, r1 - r0,
                                                 dk + j * Dp + c, Dp);
                        }
                    }
                for (int64_t j = 0; j < s.m; ++j) {
                    T *dkj = at<T>(w.dk, s.b, s.j0 + j, s.g), *dvj = at<T>(w.dv, s.b, s.j0 + j, s.g);
                    for (int64_t d = 0; d < w.D; ++d) dkj[d] += dk[j * Dp + d];
                    for (int64_t c = 0; c < w.V; ++c) dvj[c] += dv[j * Vp + c];
                }
            }
        });
    }
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void window_backward(const WindowBackward* w) { w->is_double ? window_backward_typed<double>(*w) : window_backward_typed<float>(*w); }
}  // namespace LATTE_ISA
}  // namespace latte
