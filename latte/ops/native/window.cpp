// Forward pass of sliding-window softmax attention.
//
// A block of queries lies across the lanes of vectors: scores are products of a few keys, read where they are, and the block's
// queries, turned once, so that maximum and sum over keys need no step across lanes. Values are packed once for each span of
// blocks.
#include "window.h"

LATTE_BEGIN

// Queries of a block in vectors, and how many keys meet them at a time: 12 of AVX2's 16 registers accumulate, 16 of AVX-512's 32.
constexpr int kAcross = 2;
constexpr int kKeys = kBytes == 64 ? 8 : 6;
template <class T>
constexpr int64_t kQueries = kAcross * kWidth<T>;
// Queries whose outputs are summed at a time: all of one vector.
template <class T>
constexpr int kOutputs = kBytes == 64 ? 8 : kWidth<T> < 4 ? kWidth<T> : 4;

LATTE_INLINE float natural_log(float x) { return ::logf(x); }
LATTE_INLINE double natural_log(double x) { return ::log(x); }

// Scores of one row of n keys to exp(score - maximum), zeros for keys of other documents; returns 1 / sum, 0 if there is no key.
template <class T>
LATTE_INLINE T softmax_row(T* row, int64_t n, const Int<T>* ids, int64_t id, T cap, T* lse) {
    constexpr int W = kWidth<T>;
    const Vec<T> none = splat(T(kEmpty));
    Vec<T> top = none, total{};
    for (int64_t j = 0; j < n; j += W) {
        Vec<T> x = load(row + j);
        if (cap > 0) x = vtanh(x / cap) * cap;
        x = visible<T>(j, 0, n, ids, Int<T>(id)) ? x : none;
        store(row + j, x);
        top = vmax<T>(top, x);
    }
    const T largest = max_lanes<T>(top);
    const bool empty = id < 0 || !(largest > T(kEmpty / 2));
    for (int64_t j = 0; j < n; j += W) {
        Vec<T> x[1] = {load(row + j) - largest};
        vexp_down(x);
        store(row + j, empty ? Vec<T>{} : x[0]);
        total += x[0];
    }
    const T sum = sum_lanes<T>(total);
    // A comparison takes NaN for no key.
    if (sum != sum && id >= 0) return *lse = sum;
    *lse = empty ? T(kEmpty) : largest + natural_log(sum);
    return empty ? T(0) : T(1) / sum;
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
            const int64_t id = w.seg_q ? w.seg_q[b * w.T + i] : 0;
            const T inverse = softmax_row(p, n, known, id, T(w.softcap), (T*)w.lse + (b * w.T + i) * w.H + h);
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

// A block of queries [i, i + rows) of one head. The queries of vector a see the keys [lo[a], hi[a]), counted from the span's
// first: scores outside of them are not computed.
struct Block {
    int64_t i, rows, lo[kAcross], hi[kAcross];
};

template <class T>
LATTE_INLINE Block block_of(const WindowForward& w, const Span& s, int64_t i) {
    Block block{i, min64(kQueries<T>, s.i0 + s.n - i), {}, {}};
    for (int a = 0; a < kAcross; ++a) {
        // A vector behind the last query repeats the one before it.
        const int64_t first = min64(a * kWidth<T>, (block.rows - 1) / kWidth<T> * kWidth<T>);
        seen_by(w, s, i + first, min64(kWidth<T>, block.rows - first), block.lo[a], block.hi[a]);
    }
    return block;
}

constexpr double kLog2E = 1.4426950408889634;  // of exponents to powers of 2

// p[key][kQueries] = keys . queries; `turned` is (D, kQueries). Keys are read kKeys at a time, the last ones moved back so far
// that none lies behind the row's end.
template <class T>
LATTE_INLINE void block_scores(const WindowForward& w, const Block& block, const T* key, int64_t behind, const T* turned, T* p) {
    constexpr int64_t Q = kQueries<T>, W = kWidth<T>;
    const int64_t lo = block.lo[0], hi = block.hi[kAcross - 1];
    for (int64_t j = lo; j < hi; j += kKeys) {
        const int64_t first = min64(j, behind - kKeys);
        const T* rows = key + first * w.k.t;
        T* to = p + (first - lo) * Q;
        // Rows of one head lie so far apart that few of them fit into the first-level cache at a time.
        for (int64_t r = 0; r < kKeys && j + kKeys + r < hi; ++r) fetch_row(key + (j + kKeys + r) * w.k.t, w.D);
        // At the edges of the window only one half of the block sees these keys.
        if (j + kKeys <= block.lo[kAcross - 1]) {
            product<T, false, kKeys, 1>(rows, w.k.t, 1, turned, Q, w.D, to, Q);
        } else if (j >= block.hi[0]) {
            product<T, false, kKeys, 1>(rows, w.k.t, 1, turned + W, Q, w.D, to + W, Q);
        } else {
            product<T, false, kKeys, kAcross>(rows, w.k.t, 1, turned, Q, w.D, to, Q);
        }
    }
}

// Masks and caps the scores p[hi - lo][kQueries] of one vector of queries, which become exp(score - maximum), zeros where nothing
// is seen. The first query stands at key `at`, counted from lo, as is everything here. `sum` and `top` are those of each query.
template <class T>
LATTE_INLINE void softmax_vector(const WindowForward& w, int64_t at, int64_t n, const Int<T>* key_id, const Int<T>* query_id, T* p,
                                 T* sum, T* top) {
    constexpr int64_t W = kWidth<T>, Q = kQueries<T>;
    const Vec<T> none = splat(T(kEmpty));
    Vec<T> most = none, total[4] = {};
    Mask<T> lane, id{};
    for (int r = 0; r < W; ++r) lane[r] = Int<T>(r);
    if (query_id) memcpy(&id, query_id, sizeof(id));
    // Key j is seen by the queries [j - at - right, j - at + left].
    const auto masked = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
        for (int64_t j = from; j < to; ++j) {
            Vec<T> x = load(p + j * Q);
            if (w.softcap > 0) x = vtanh(x / T(w.softcap)) * T(w.softcap);
            Mask<T> ok = (lane >= Int<T>(max64(j - at - w.right, 0))) & (lane <= Int<T>(min64(j - at + w.left, W)));
            if (key_id) ok &= (id == key_id[j]) & (id >= 0);
            x = ok ? x : none;
            store(p + j * Q, x);
            most = vmax<T>(most, x);
        }
    };
    // Keys that all queries see need no mask.
    const bool open = !key_id && !(w.softcap > 0);
    const int64_t from = open ? min64(max64(0, at + W - 1 - w.left), n) : n, to = max64(from, min64(n, at + w.right + 1));
    masked(0, from);
    Vec<T> more = none;  // a second chain: each maximum waits for the one before
    int64_t inner = from;
    for (; inner + 2 <= to; inner += 2) {
        most = vmax<T>(most, load(p + inner * Q));
        more = vmax<T>(more, load(p + (inner + 1) * Q));
    }
    if (inner < to) most = vmax<T>(most, load(p + inner * Q));
    most = vmax<T>(most, more);
    masked(to, n);

    const Vec<T> shift = most > T(kEmpty / 2) ? most : Vec<T>{};
    const auto some = [&](int64_t j, auto& x) __attribute__((always_inline)) {
        constexpr int K = sizeof(x) / sizeof(x[0]);
        // A power of 2 takes fewer products. The factor comes after the difference: in front of it, scores of 1e8 would be rounded
        // to others than those from which gradients are taken.
        for (int k = 0; k < K; ++k) x[k] = (load(p + (j + k) * Q) - shift) * splat(T(kLog2E));
        vexp2_down(x);
        for (int k = 0; k < K; ++k) store(p + (j + k) * Q, x[k]), total[k] += x[k];
    };
    Vec<T> four[4], one[1];
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) some(j, four);
    for (; j < n; ++j) some(j, one);
    store(sum, (total[0] + total[1]) + (total[2] + total[3])), store(top, most);
}

// Scores of a block to exponentials; `inverse` is 1 / sum of each query, 0 where it sees no key.
template <class T>
void softmax_block(const WindowForward& w, const Span& s, const Block& block, const Int<T>* key_id, const Int<T>* query_id, T* p,
                   T* lse, T* inverse) {
    constexpr int64_t W = kWidth<T>, Q = kQueries<T>;
    T sum[Q], top[Q];
    for (int64_t first = 0, a = 0; first < block.rows; first += W, ++a) {
        const int64_t lo = block.lo[a], at = w.S - w.T + block.i + first - s.j0 - lo;
        softmax_vector(w, at, block.hi[a] - lo, key_id ? key_id + lo : nullptr, query_id ? query_id + first : nullptr,
                       p + (lo - block.lo[0]) * Q + first, sum + first, top + first);
    }
    for (int64_t first = 0; first < block.rows; first += W) {
        const Vec<T> all = load(sum + first), most = load(top + first);
        const auto some = (most > T(kEmpty / 2)) | (all != all);  // NaN is not nothing
        store(top + first, some ? most + vlog(all) : splat(T(kEmpty)));
        store(inverse + first, some ? 1 / all : Vec<T>{});
    }
    for (int64_t r = 0; r < block.rows; ++r) lse[r * w.H] = top[r];
}

// Outputs of the queries [r, r + n) of a block, each from the keys that it may see and no others.
template <class T>
void own_outputs(const WindowForward& w, const Span& s, const Block& block, int64_t h, int64_t r, int64_t n, const T* p,
                 const T* values, const T* inverse, T* scratch) {
    constexpr int64_t N = kTileCols<T>, Q = kQueries<T>;
    const int64_t Vp = round_up(w.V, N);
    for (int64_t j = r; j < r + n; ++j) {
        int64_t lo, hi;
        seen_by(w, s, block.i + j, 1, lo, hi);
        for (int64_t c = 0; c < Vp; c += N)
            product<T, false, 1>(p + (lo - block.lo[0]) * Q + j, 1, Q, values + c * s.m + lo * N, N, hi - lo, scratch + c, Vp,
                                 inverse + j);
        T* y = at<T>(w.y, s.b, block.i + j, h);
        if (inverse[j] != 0) {
            memcpy(y, scratch, size_t(w.V) * sizeof(T));
        } else {
            memset(y, 0, size_t(w.V) * sizeof(T));
        }
    }
}

// Outputs of a block: probabilities times packed values, each row scaled by its `inverse`. A panel of values meets all queries
// before the next one: both would not fit into the first-level cache beside the probabilities. `scratch` is (kQueries, Vp).
template <class T>
LATTE_INLINE void block_outputs(const WindowForward& w, const Span& s, const Block& block, int64_t h, const T* p, const T* values,
                                const T* inverse, T* scratch) {
    constexpr int64_t N = kTileCols<T>, Q = kQueries<T>, R = kOutputs<T>;
    const int64_t Vp = round_up(w.V, N);
    Vec<T> zero[Q / R] = {};
    // Where the outputs of R queries go: to their place, unless some of them have none there, or another value.
    T* to[Q / R];
    int64_t stride[Q / R];
    for (int64_t r = 0, tile = 0; r < block.rows; r += R, ++tile) {
        bool whole = block.rows - r >= R && Vp == w.V;
        for (int64_t j = r; j < min64(r + R, block.rows); ++j) whole = whole && inverse[j] != 0;
        to[tile] = whole ? at<T>(w.y, s.b, block.i + r, h) : scratch + r * Vp;
        stride[tile] = whole ? w.y.t : Vp;
    }
    for (int64_t c = 0; c < Vp; c += N)
        for (int64_t r = 0, tile = 0; r < block.rows; r += R, ++tile) {
            int64_t lo, hi;
            seen_by(w, s, block.i + r, min64(R, block.rows - r), lo, hi);
            product<T, false, int(R)>(p + (lo - block.lo[0]) * Q + r, 1, Q, values + c * s.m + lo * N, N, hi - lo, to[tile] + c,
                                      stride[tile], inverse + r, zero + tile);
        }
    for (int64_t r = 0, tile = 0; r < block.rows; r += R, ++tile) {
        const int64_t n = min64(R, block.rows - r);
        // Queries of a tile meet all its keys. A value that is not finite must not reach those before it, even times 0: then
        // each query is computed again with its own keys, in the same order.
        if (sum_lanes<T>(zero[tile]) != 0) {
            own_outputs(w, s, block, h, r, n, p, values, inverse, scratch + r * Vp);
            continue;
        }
        for (int64_t j = r; to[tile] == scratch + r * Vp && j < r + n; ++j) {
            T* y = at<T>(w.y, s.b, block.i + j, h);
            if (inverse[j] != 0) {
                memcpy(y, scratch + j * Vp, size_t(w.V) * sizeof(T));
            } else {
                memset(y, 0, size_t(w.V) * sizeof(T));
            }
        }
    }
}

template <class T>
void window_forward_typed(const WindowForward& w) {
    if (w.T <= 2 || w.S < kKeys) return few_queries<T>(w);
    constexpr int64_t N = kTileCols<T>, W = kWidth<T>, Q = kQueries<T>;
    const int64_t group = w.H / w.G, reach = w.left + w.right;
    const double work = double(w.B) * double(w.T * w.H) * double(min64(reach + 1, w.S) * (w.D + w.V));
    const int64_t threads = useful_threads(w.threads, work);
    // Long spans pack fewer values twice, short ones keep all threads busy and the packed values in the second-level
    // cache.
    const int64_t about = round_up(max64(Q, min64(max64(512, reach), w.T * w.B * w.G / (threads * 2))), Q);
    // As many spans for each thread, all of about one length; blocks start at multiples of Q however the work is shared out.
    const int64_t enough = max64(1, round_up((w.T + about - 1) / about * w.B, threads) / max64(1, w.B));
    const int64_t step = min64(about, round_up((w.T + enough - 1) / enough, Q));
    const int64_t steps = (w.T + step - 1) / step, Vp = round_up(w.V, N);
    const int64_t keys = min64(w.S, step + reach), wide = min64(w.S, Q + reach) + kKeys;
    large_pages(w.y.data, w.B * w.T * w.H * w.V * int64_t(sizeof(T)), w.threads);

    const auto task = [&](int64_t u) { return span_of(w, step, 1, u / w.G / steps, u / w.G % steps, u % w.G); };
    // Each thread takes the next task while it works on one, so that it knows what to fetch: a thread that loses its core for a
    // while holds up nobody.
    const int64_t tasks = w.B * steps * w.G;
    int64_t taken = 0;
    const auto take = [&] { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); };
    parallel(min64(threads, tasks), threads, [&](int64_t, int64_t) {
        Scratch mem(room(keys * Vp, sizeof(T)) + room(keys + W, sizeof(T)) + room(Q, sizeof(T)) + room(Q * w.D, sizeof(T)) +
                    room((wide + kKeys) * Q, sizeof(T)) + room(Q * Vp, sizeof(T)) + room(Q, sizeof(T)));
        T* packed = mem.take<T>(keys * Vp);
        Int<T>*key_room = mem.take<Int<T>>(keys + W), *query_room = mem.take<Int<T>>(Q);
        // A tile of keys that is moved back from the end of the row starts before the block's first key.
        T *turned = mem.take<T>(Q * w.D), *p = mem.zeros<T>((wide + kKeys) * Q) + kKeys * Q, *scratch = mem.take<T>(Q * Vp);
        T* inverse = mem.zeros<T>(Q);

        for (int64_t u = take(), after; u < tasks; u = after) {
            const Span s = task(u);
            after = take();
            const Int<T>* ids = key_ids<T>(key_room, w.seg_k ? w.seg_k + s.b * w.S + s.j0 : nullptr, s.m, s.m);
            const T* key = at<T>(w.k, s.b, s.j0, s.g);
            pack_rows(packed, at<T>(w.v, s.b, s.j0, s.g), w.v.t, s.m, w.V, ids);
            const Span next = after < tasks ? task(after) : Span{};
            const int64_t blocks = group * ((s.n + Q - 1) / Q);
            int64_t done = 0;
            for (int64_t h = s.g * group; h < (s.g + 1) * group; ++h)
                for (int64_t i = s.i0; i < s.i0 + s.n; i += Q) {
                    const Block block = block_of<T>(w, s, i);
                    // A part of what the next task reads before it computes, or with its first block: then it is not waited for.
                    const int64_t first = done++;
                    const auto part = [&](int64_t rows, int64_t width, auto row) {
                        for (int64_t r = rows * first / blocks; r < rows * done / blocks; ++r) fetch_row(row(r), width);
                    };
                    part(next.m, w.V, [&](int64_t r) { return at<T>(w.v, next.b, next.j0 + r, next.g); });
                    part(min64(next.m, reach + Q), w.D, [&](int64_t r) { return at<T>(w.k, next.b, next.j0 + r, next.g); });
                    part(min64(next.n, Q), w.D, [&](int64_t r) { return at<T>(w.q, next.b, next.i0 + r, next.g * group); });
                    // Behind the arithmetic: what the next block reads.
                    for (int64_t r = i + Q; r < min64(i + 2 * Q, s.i0 + s.n); ++r) fetch_row(at<T>(w.q, s.b, r, h), w.D);
                    for (int64_t j = block.hi[kAcross - 1]; j < min64(block.hi[kAcross - 1] + Q, s.m); ++j)
                        fetch_row(key + j * w.k.t, w.D);
                    turn_scaled<Q>(turned, at<T>(w.q, s.b, i, h), w.q.t, block.rows, w.D, T(w.scale));
                    block_scores(w, block, key, w.S - s.j0, turned, p);
                    const Int<T>* query_id = nullptr;
                    if (w.seg_q) {
                        const int32_t* id = w.seg_q + s.b * w.T + i;
                        for (int64_t r = 0; r < Q; ++r) query_room[r] = r < block.rows ? id[r] : -1;
                        query_id = query_room;
                    }
                    softmax_block(w, s, block, ids, query_id, p, (T*)w.lse + (s.b * w.T + i) * w.H + h, inverse);
                    block_outputs(w, s, block, h, p, packed, inverse, scratch);
                }
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void window_forward(const WindowForward* w) { w->is_double ? window_forward_typed<double>(*w) : window_forward_typed<float>(*w); }
}  // namespace LATTE_ISA
}  // namespace latte
