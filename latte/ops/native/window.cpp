// Sliding-window softmax attention, forward and backward.
//
// A task is a span of queries of one key-value head with all the keys they see, packed once. Inside it, blocks of kBlock queries
// meet their keys; every tile of 6 queries multiplies only the panels of keys that it can see, so little is computed in vain.
// The row's maximum is over the keys that the row sees: nothing depends on a key outside its window.
#include "args.h"
#include "gemm.h"
#include "work.h"

LATTE_BEGIN

constexpr int64_t kBlock = 4 * kTileRows;
constexpr double kEmpty = -1e30;

// Where a task lies: queries [i0, i0 + n) see keys [j0, j0 + m).
struct Span {
    int64_t b, g, i0, n, j0, m;
};

template <class A>
Span span_of(const A& w, int64_t step, int64_t align, int64_t b, int64_t s, int64_t g) {
    const int64_t hist = w.S - w.T, i0 = s * step, n = min64(step, w.T - i0);
    const int64_t j0 = max64(0, hist + i0 - w.left) / align * align, j1 = min64(w.S, hist + i0 + n + w.right);
    return {b, g, i0, n, j0, j1 - j0};
}

// Keys [lo, hi) of a row, counted from the task's first key.
template <class A>
LATTE_INLINE void seen(const A& w, const Span& s, int64_t i, int64_t& lo, int64_t& hi) {
    const int64_t at = w.S - w.T + i;
    lo = max64(at - w.left, 0) - s.j0;
    hi = min64(at + w.right + 1, w.S) - s.j0;
}

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}

// Ids of the keys of a task in integers as wide as T, so that a comparison gives a mask for T; -2 behind the end.
template <class T>
const Int<T>* key_ids(Int<T>* to, const int32_t* ids, int64_t m, int64_t padded_m) {
    if (!ids) return nullptr;
    for (int64_t j = 0; j < padded_m; ++j) to[j] = j < m ? ids[j] : -2;
    return to;
}

template <class T>
LATTE_INLINE Mask<T> visible(int64_t j, int64_t lo, int64_t hi, const Int<T>* ids, Int<T> id) {
    Mask<T> index;
    for (int i = 0; i < kWidth<T>; ++i) index[i] = Int<T>(j + i);
    Mask<T> ok = (index >= Int<T>(lo)) & (index < Int<T>(hi));
    if (ids) {
        Mask<T> other;
        memcpy(&other, ids + j, sizeof(other));
        ok &= other == id;
    }
    return ok;
}

// Panels [first, last) of keys that queries [i, i + n) of the task see.
template <class T, class A>
LATTE_INLINE void panels(const A& w, const Span& s, int64_t i, int64_t n, int64_t& first, int64_t& last) {
    int64_t lo, hi, skip;
    seen(w, s, i, lo, skip);
    seen(w, s, i + n - 1, skip, hi);
    first = lo / kTileCols<T>;
    last = (hi + kTileCols<T> - 1) / kTileCols<T>;
}

// out[rows][keys] = x (rows, width) . packed keys, for the panels each tile of rows sees; `origin` is the first panel of out.
template <class T, class A>
void scores(const A& w, const Span& s, int64_t i, int64_t rows, const T* x, int64_t width, int64_t ldx, const T* keys, T* out,
            int64_t ldo, int64_t origin, int64_t end) {
    constexpr int64_t N = kTileCols<T>;
    for (int64_t p = origin; p < end; ++p)
        for (int64_t r = 0; r < rows; r += kTileRows) {
            int64_t first, last;
            panels<T>(w, s, i + r, min64(kTileRows, rows - r), first, last);
            if (p < first || p >= last) continue;
            product<T, false>(x + r * ldx, ldx, 1, keys + p * width * N, width, out + r * ldo + (p - origin) * N, ldo);
        }
}

// The largest score of a row among the keys it sees; scores it doesn't see become kEmpty, and capped ones are stored.
template <class T>
LATTE_INLINE T largest(T* row, int64_t first, int64_t last, int64_t origin, int64_t lo, int64_t hi, const Int<T>* ids, int64_t id,
                       T cap) {
    constexpr int W = kWidth<T>;
    const Vec<T> none = splat(T(kEmpty));
    Vec<T> top[2] = {none, none};
    const auto edge = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
        for (int64_t j = from; j < to; j += W) {
            Vec<T> x = load(row + j - origin);
            if (cap > 0) x = vtanh(x / cap) * cap;
            x = visible<T>(j, lo, hi, ids, Int<T>(id)) ? x : none;
            store(row + j - origin, x);
            top[0] = vmax<T>(top[0], x);
        }
    };
    // Between the edges of its window a row sees every key, unless ids say otherwise.
    const bool open = !ids && !(cap > 0);
    const int64_t from = open ? min64(round_up(lo, 2 * W), last) : last, to = max64(from, hi / (2 * W) * (2 * W));
    edge(first, from);
    for (int64_t j = from; j < to; j += 2 * W)
        for (int i = 0; i < 2; ++i) top[i] = vmax<T>(top[i], load(row + j + i * W - origin));
    edge(to, last);
    return max_lanes<T>(vmax<T>(top[0], top[1]));
}

// Scores of a row to exp(score - top), zeros in an empty row; returns their sum.
template <class T>
LATTE_INLINE T exponentials(T* row, int64_t n, T top, bool empty) {
    constexpr int W = kWidth<T>;
    if (empty) {
        memset(row, 0, size_t(n) * sizeof(T));
        return 0;
    }
    Vec<T> total[2] = {};
    const auto some = [&](T* at, auto& x) __attribute__((always_inline)) {
        constexpr int K = sizeof(x) / sizeof(x[0]);
        for (int i = 0; i < K; ++i) x[i] = load(at + i * W) - top;
        vexp_down(x);
        for (int i = 0; i < K; ++i) store(at + i * W, x[i]), total[i % 2] += x[i];
    };
    Vec<T> four[4], one[1];
    int64_t j = 0;
    for (; j + 4 * W <= n; j += 4 * W) some(row + j, four);
    for (; j < n; j += W) some(row + j, one);
    return sum_lanes<T>(total[0] + total[1]);
}

LATTE_INLINE float natural_log(float x) { return ::logf(x); }
LATTE_INLINE double natural_log(double x) { return ::log(x); }

// A row of scores, the keys that it sees, counted from the task's first, and what it leaves.
template <class T>
struct Row {
    T* scores;
    int64_t lo, hi, id;
    T* lse;
};

// Turns rows of scores into exp(score - maximum), zeros where nothing is seen; inverse is 1 / sum (0 if the row is empty). Each
// step runs over all rows, so that what one waits for (a sum over lanes, a logarithm) hides behind the others.
template <class T, class RowOf>
LATTE_INLINE void softmax_rows(int64_t rows, int64_t first, int64_t last, int64_t origin, const Int<T>* ids, T cap, RowOf row_of,
                               T* inverse) {
    T top[kTileRows], sum[kTileRows];
    bool empty[kTileRows];
    for (int64_t r = 0; r < rows; ++r) {
        const Row<T> row = row_of(r);
        empty[r] = row.id < 0;
        if (!empty[r]) top[r] = largest(row.scores, first, last, origin, row.lo, row.hi, ids, row.id, cap);
        empty[r] = empty[r] || !(top[r] > T(kEmpty / 2));
    }
    for (int64_t r = 0; r < rows; ++r)
        sum[r] = exponentials(row_of(r).scores + first - origin, last - first, empty[r] ? T(0) : top[r], empty[r]);
    for (int64_t r = 0; r < rows; ++r) {
        *row_of(r).lse = empty[r] ? T(kEmpty) : top[r] + natural_log(sum[r]);
        inverse[r] = empty[r] ? T(0) : T(1) / sum[r];
    }
}

// One query at a time, for decoding: with so little to do, packing keys would take longer than using them.
template <class T>
void few_queries(const WindowForward& w) {
    constexpr int64_t W = kWidth<T>;
    const int64_t reach = min64(w.left + w.right + 1, w.S), size = sizeof(T);
    const int64_t threads = useful_threads(w.threads, double(w.B * w.T * w.H) * double(reach * (w.D + w.V)));
    parallel(w.B * w.T * w.H, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(2 * room(reach + W, size));
        T* p = mem.zeros<T>(reach + W);
        Int<T>* ids = mem.take<Int<T>>(reach + W);
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / w.H / w.T, i = u / w.H % w.T, h = u % w.H, g = h / (w.H / w.G);
            const int64_t j0 = max64(0, w.S - w.T + i - w.left), n = min64(w.S, w.S - w.T + i + w.right + 1) - j0;
            const T *q = at<T>(w.q, b, i, h), *k = at<T>(w.k, b, j0, g), *v = at<T>(w.v, b, j0, g);
            T* y = at<T>(w.y, b, i, h);
            for (int64_t j = 0; j < n; j += 4) {
                // Four keys at a time keep the adders busy; behind the end the last key is repeated.
                const T* row[4];
                Vec<T> dot[4] = {};
                for (int r = 0; r < 4; ++r) row[r] = k + min64(j + r, n - 1) * w.k.t;
                int64_t d = 0;
                for (; d + W <= w.D; d += W)
                    for (int r = 0; r < 4; ++r) dot[r] += load(q + d) * load(row[r] + d);
                if (d < w.D)
                    for (int r = 0; r < 4; ++r) dot[r] += load_some(q + d, w.D - d, T(0)) * load_some(row[r] + d, w.D - d, T(0));
                for (int64_t r = 0; r < min64(4, n - j); ++r) p[j + r] = sum_lanes<T>(dot[r]) * T(w.scale);
            }
            const Int<T>* known = key_ids<T>(ids, w.seg_k ? w.seg_k + b * w.S + j0 : nullptr, n, reach + W);
            const Row<T> only{p, 0, n, w.seg_q ? w.seg_q[b * w.T + i] : 0, (T*)w.lse + (b * w.T + i) * w.H + h};
            T inverse;
            softmax_rows<T>(1, 0, round_up(n, W), 0, known, T(w.softcap), [&](int64_t) { return only; }, &inverse);
            // An unseen value may hold anything, so it is not even multiplied by 0.
            int64_t c = 0;
            for (; c + 4 * W <= w.V; c += 4 * W) {
                Vec<T> sum[4] = {};
                for (int64_t j = 0; j < n; ++j)
                    if (p[j] != 0)
                        for (int r = 0; r < 4; ++r) sum[r] += p[j] * load(v + j * w.v.t + c + r * W);
                for (int r = 0; r < 4; ++r) store(y + c + r * W, sum[r] * inverse);
            }
            for (; c < w.V; c += W) {
                Vec<T> sum{};
                for (int64_t j = 0; j < n; ++j)
                    if (p[j] != 0) sum += p[j] * load_some(v + j * w.v.t + c, w.V - c, T(0));
                store_some(y + c, sum * inverse, w.V - c);
            }
        }
    });
}

template <class T>
void window_forward_typed(const WindowForward& w) {
    if (w.T <= 2) return few_queries<T>(w);
    constexpr int64_t N = kTileCols<T>, W = kWidth<T>;
    const int64_t group = w.H / w.G, reach = w.left + w.right;
    const double work = double(w.B) * double(w.T * w.H) * double(min64(reach + 1, w.S) * (w.D + w.V));
    const int64_t threads = useful_threads(w.threads, work);
    // Long spans pack fewer keys twice, short ones keep all threads busy and the packed keys in the second-level cache.
    const int64_t about = round_up(max64(kBlock, min64(max64(384, reach), w.T * w.B * w.G / (threads * 2))), kBlock);
    // As many spans for each thread, all of about one length.
    const int64_t enough = max64(1, round_up((w.T + about - 1) / about * w.B, threads) / max64(1, w.B));
    const int64_t step = min64(about, round_up((w.T + enough - 1) / enough, kTileRows));
    const int64_t steps = (w.T + step - 1) / step, Vp = round_up(w.V, N);
    const int64_t keys = round_up(min64(w.S, step + reach + N), N), wide = min64(keys, round_up(kBlock + reach, N) + N);
    large_pages(w.y.data, w.B * w.T * w.H * w.V * int64_t(sizeof(T)), w.threads);

    parallel(w.B * steps * w.G, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(room(keys * w.D, sizeof(T)) + room(keys * Vp, sizeof(T)) + room(keys + W, sizeof(T)) +
                    room(kBlock * w.D, sizeof(T)) + room(kBlock * wide, sizeof(T)) + room(kBlock * Vp, sizeof(T)));
        T *kp = mem.take<T>(keys * w.D), *vp = mem.take<T>(keys * Vp);
        Int<T>* id_room = mem.take<Int<T>>(keys + W);
        T *q = mem.take<T>(kBlock * w.D), *p = mem.zeros<T>(kBlock * wide), *y = mem.take<T>(kBlock * Vp);

        // Panels start at multiples of N wherever the span starts, so how work is shared out changes no bit.
        for (int64_t u = begin; u < end; ++u) {
            const Span s = span_of(w, step, N, u / w.G / steps, u / w.G % steps, u % w.G);
            const Int<T>* ids = key_ids<T>(id_room, w.seg_k ? w.seg_k + s.b * w.S + s.j0 : nullptr, s.m, keys);
            pack_columns(kp, at<T>(w.k, s.b, s.j0, s.g), w.k.t, s.m, w.D, ids);
            pack_rows(vp, at<T>(w.v, s.b, s.j0, s.g), w.v.t, s.m, w.V, ids);
            for (int64_t h = s.g * group; h < (s.g + 1) * group; ++h)
                for (int64_t i = s.i0; i < s.i0 + s.n; i += kBlock) {
                    const int64_t rows = min64(kBlock, s.i0 + s.n - i);
                    int64_t origin, stop;
                    panels<T>(w, s, i, rows, origin, stop);
                    for (int64_t r = 0; r < rows; ++r) copy_scaled(q + r * w.D, at<T>(w.q, s.b, i + r, h), w.D, T(w.scale));
                    if (rows < kBlock) memset(q + rows * w.D, 0, size_t((kBlock - rows) * w.D) * sizeof(T));
                    scores(w, s, i, rows, q, w.D, w.D, kp, p, wide, origin, stop);
                    T inverse[kBlock];
                    for (int64_t tile = 0; tile < rows; tile += kTileRows) {
                        const int64_t n = min64(kTileRows, rows - tile);
                        int64_t first, last;
                        panels<T>(w, s, i + tile, n, first, last);
                        const auto row = [&](int64_t r) {
                            const int64_t t = i + tile + r;
                            int64_t lo, hi;
                            seen(w, s, t, lo, hi);
                            return Row<T>{p + (tile + r) * wide, lo, hi, w.seg_q ? w.seg_q[s.b * w.T + t] : 0,
                                          (T*)w.lse + (s.b * w.T + t) * w.H + h};
                        };
                        // A few rows at a time, behind the arithmetic: what this block writes, and what the next one reads.
                        for (int64_t r = i + tile; r < i + tile + n; ++r) fetch_row<1>(at<T>(w.y, s.b, r, h), w.V);
                        for (int64_t r = i + tile + kBlock; r < min64(i + tile + n + kBlock, s.i0 + s.n); ++r)
                            fetch_row(at<T>(w.q, s.b, r, h), w.D);
                        softmax_rows<T>(n, first * N, last * N, origin * N, ids, T(w.softcap), row, inverse + tile);
                    }
                    for (int64_t r = 0; r < rows; r += kTileRows) {
                        const int64_t n = min64(kTileRows, rows - r);
                        int64_t lo, hi, skip;
                        seen(w, s, i + r, lo, skip);
                        seen(w, s, i + r + n - 1, skip, hi);
                        const T *weights = p + r * wide + lo - origin * N, *values = vp + lo * N;
                        bool whole = n == kTileRows && Vp == w.V;
                        for (int64_t j = r; j < r + n; ++j) whole = whole && inverse[j] != 0;
                        if (whole) {
                            T* to = at<T>(w.y, s.b, i + r, h);
                            for (int64_t c = 0; c < Vp; c += N)
                                product<T, false>(weights, wide, 1, values + c * s.m, hi - lo, to + c, w.y.t, inverse + r);
                            continue;
                        }
                        for (int64_t c = 0; c < Vp; c += N)
                            product<T, false>(weights, wide, 1, values + c * s.m, hi - lo, y + r * Vp + c, Vp);
                        for (int64_t j = r; j < r + n; ++j) {
                            T* to = at<T>(w.y, s.b, i + j, h);
                            if (inverse[j] != 0) {
                                copy_scaled(to, y + j * Vp, w.V, inverse[j]);
                            } else {
                                memset(to, 0, size_t(w.V) * sizeof(T));
                            }
                        }
                    }
                }
        }
    });
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
                        panels<T>(w, s, i, rows, origin, stop);
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
                            panels<T>(w, s, i + tile, min64(kTileRows, rows - tile), first, last);
                            gradient_row(p + r * wide, ds + r * wide, origin * N, stop * N, first * N, last * N, lo, hi, ids,
                                         id ? id[r] : 0, T(w.softcap), ((const T*)w.lse)[(s.b * w.T + i + r) * w.H + h], delta[r]);
                        }
                        int64_t from, to, lo, hi, skip;
                        seen(w, s, i, from, skip);
                        seen(w, s, i + rows - 1, skip, to);
                        for (int64_t r = 0; r < rows; r += kTileRows) {
                            seen(w, s, i + r, lo, skip);
                            seen(w, s, i + min64(r + kTileRows, rows) - 1, skip, hi);
                            for (int64_t c = 0; c < Dp; c += N)
                                product<T, false>(ds + r * wide + lo - origin * N, wide, 1, kr + c * s.m + lo * N, hi - lo,
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
                                product<T, true>(p + r0 * wide + j - origin * N, 1, wide, dyr + (c * kBlock + r0 * N), r1 - r0,
                                                 dv + j * Vp + c, Vp);
                            for (int64_t c = 0; c < Dp; c += N)
                                product<T, true>(ds + r0 * wide + j - origin * N, 1, wide, qr + (c * kBlock + r0 * N), r1 - r0,
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
void window_forward(const WindowForward* w) { w->is_double ? window_forward_typed<double>(*w) : window_forward_typed<float>(*w); }
void window_backward(const WindowBackward* w) { w->is_double ? window_backward_typed<double>(*w) : window_backward_typed<float>(*w); }
}  // namespace LATTE_ISA
}  // namespace latte
