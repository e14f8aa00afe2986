// The delta rule: S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, y_t = q_t^T S_t, forward and backward.
//
// Without b it is -k: S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T with u_t = v_t - S_{t-1}^T a_t. A column of the state depends on no
// other, so a few of them pass through the tokens together, and stay in the first-level cache: while a token updates them, the
// next one's a already reads what it leaves. Every exponent is a log-decay, at most 0.
//
// With R_t the gradient of S_t, y_t's part included, and x_t = a_t^T S_{t-1}:
//
//     dv_t = R_t^T k_t   dx_t = R_t^T b_t   dk_t = R_t v_t   db_t = R_t x_t   dq_t = S_t dy_t   da_t = S_{t-1} dx_t
//     R_{t-1} = diag(exp(g_t)) R_t + a_t dx_t^T + q_{t-1} dy_{t-1}^T
//
// Once x and dx are known, both S and R are sums of outer products: a reverse pass gives dv, dx, dk and db, a forward pass dq and
// da. The gradient of the log-decay follows from these, without states per token, as in decay.cpp:
//
//     dg_t = sum over values of R_t . (exp(g_t) S_{t-1}) = dg_{t+1} + a_{t+1} . da_{t+1} + q_t . dq_t - b_t . db_t - k_t . dk_t
#include "heads.h"
#include "work.h"

LATTE_BEGIN

// One token through columns of a state (K, ld):  s = f s + p x + w z;  one = c^T s;  two = d^T s.
// `Row`: f is one number a row. `Z`: there is w z. `One`: `one` is wanted.
template <class T, bool Row, bool Z, bool One, int NV>
LATTE_INLINE void token_columns(T* __restrict state, int64_t ld, int64_t K, const T* f, const T* p, const Vec<T> (&x)[NV], const T* w,
                                const Vec<T> (&z)[NV], const T* c, Vec<T> (&one)[NV], const T* d, Vec<T> (&two)[NV]) {
    constexpr int W = kWidth<T>;
    for (int j = 0; j < NV; ++j) one[j] = two[j] = Vec<T>{};
    for (int64_t r = 0; r < K; ++r, state += ld) {
        const Vec<T> fade = splat(Row ? f[r] : f[0]), pv = splat(p[r]), dv = splat(d[r]);
        for (int j = 0; j < NV; ++j) {
            Vec<T> s = pv * x[j] + fade * load(state + j * W);
            if (Z) s = splat(w[r]) * z[j] + s;
            store(state + j * W, s);
            if (One) one[j] = splat(c[r]) * s + one[j];
            two[j] = dv * s + two[j];
        }
    }
}

// The tokens of a chunk, rows padded: keys (n, Kp), values (n, Vp), decays f (n, ldf). Row n of a and of q holds zeros.
template <class T>
struct Tokens {
    T *q, *k, *a, *b, *f;
    int64_t Kp, K, ldf, n;
};

template <class T, bool Row, bool Tied, int NV>
void forward_columns(T* state, int64_t ld, const Tokens<T>& s, const T* v, T* y, T* u) {
    constexpr int W = kWidth<T>;
    Vec<T> x[NV] = {}, next[NV], out[NV], value[NV];
    for (int64_t r = 0; r < s.K; ++r)
        for (int j = 0; j < NV; ++j) x[j] = splat(s.a[r]) * load(state + r * ld + j * W) + x[j];
    for (int64_t t = 0; t < s.n; ++t) {
        const int64_t at_k = t * s.Kp, at_v = t * ld;
        for (int j = 0; j < NV; ++j) {
            value[j] = load(v + at_v + j * W);
            if (Tied) x[j] = value[j] - x[j];
            store(u + at_v + j * W, x[j]);
        }
        token_columns<T, Row, !Tied, true, NV>(state, ld, s.K, s.f + t * s.ldf, (Tied ? s.k : s.b) + at_k, x, s.k + at_k, value,
                                               s.q + at_k, out, s.a + at_k + s.Kp, next);
        for (int j = 0; j < NV; ++j) store(y + at_v + j * W, out[j]), x[j] = next[j];
    }
}

// From the last token to the first: dv and dx. What enters is the gradient that later tokens give to the state after these.
template <class T, bool Row, bool Tied, int NV>
void backward_columns(T* state, int64_t ld, const Tokens<T>& s, const T* dy, T* dv, T* dx) {
    constexpr int W = kWidth<T>;
    const T one = 1;
    Vec<T> x[NV] = {}, next[NV], out[NV], z[NV];
    for (int64_t t = s.n - 1; t >= 0; --t) {
        const int64_t at_k = t * s.Kp, at_v = t * ld;
        for (int j = 0; j < NV; ++j) z[j] = load(dy + at_v + j * W);
        const T* read = (Tied ? s.k : s.b) + at_k;
        if (t == s.n - 1)  // row n of a is 0: the state enters as it is
            token_columns<T, false, true, !Tied, NV>(state, ld, s.K, &one, s.a + at_k + s.Kp, x, s.q + at_k, z, s.k + at_k, out, read, next);
        else
            token_columns<T, Row, true, !Tied, NV>(state, ld, s.K, s.f + (t + 1) * s.ldf, s.a + at_k + s.Kp, x, s.q + at_k, z, s.k + at_k,
                                                   out, read, next);
        for (int j = 0; j < NV; ++j) {
            store(dv + at_v + j * W, Tied ? next[j] : out[j]);
            x[j] = Tied ? -next[j] : next[j];
            store(dx + at_v + j * W, x[j]);
        }
    }
    // The state before the first token: row n of q is 0, and what it reads is not used.
    token_columns<T, Row, false, false, NV>(state, ld, s.K, s.f, s.a, x, nullptr, z, nullptr, out, s.q + s.n * s.Kp, next);
}

// All columns of a state (K, Vp), as many at a time as registers hold.
template <class T, bool Row, bool Tied>
void forward_state(T* state, int64_t Vp, const Tokens<T>& s, const T* v, T* y, T* u) {
    constexpr int W = kWidth<T>, most = kBytes == 64 ? 4 : 2;
    for (int64_t c = 0; c < Vp;) {
        const int64_t left = (Vp - c) / W;
        if (left >= most) {
            forward_columns<T, Row, Tied, most>(state + c, Vp, s, v + c, y + c, u + c), c += most * W;
        } else if (left >= 2) {
            forward_columns<T, Row, Tied, 2>(state + c, Vp, s, v + c, y + c, u + c), c += 2 * W;
        } else {
            forward_columns<T, Row, Tied, 1>(state + c, Vp, s, v + c, y + c, u + c), c += W;
        }
    }
}
template <class T, bool Row, bool Tied>
void backward_state(T* state, int64_t Vp, const Tokens<T>& s, const T* dy, T* dv, T* dx) {
    constexpr int W = kWidth<T>, most = kBytes == 64 ? 4 : 2;
    for (int64_t c = 0; c < Vp;) {
        const int64_t left = (Vp - c) / W;
        if (left >= most) {
            backward_columns<T, Row, Tied, most>(state + c, Vp, s, dy + c, dv + c, dx + c), c += most * W;
        } else if (left >= 2) {
            backward_columns<T, Row, Tied, 2>(state + c, Vp, s, dy + c, dv + c, dx + c), c += 2 * W;
        } else {
            backward_columns<T, Row, Tied, 1>(state + c, Vp, s, dy + c, dv + c, dx + c), c += W;
        }
    }
}

// The chunk through R^T (Vp, Kp), from the last token to the first: dk = R v (or u) and db = R x. Four rows and NV vectors of the
// state stay in registers.
template <class T, bool Lane, bool Tied, int NV, bool First>
LATTE_INLINE void key_tile(T* state, const Tokens<T>& s, int64_t Vp, int64_t row, int64_t col, const T* dy, const T* dx, const T* v,
                           const T* x, T* dk, T* db) {
    constexpr int W = kWidth<T>;
    Vec<T> acc[kRows][NV];
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = load(state + (row + r) * s.Kp + col + j * W);
    for (int64_t t = s.n - 1; t >= 0; --t) {
        const int64_t at_k = t * s.Kp + col, at_v = t * Vp + row;
        const T* f = s.f + t * s.ldf + (Lane ? col : 0);
        for (int j = 0; j < NV; ++j) {
            const int64_t i = at_k + j * W;
            const Vec<T> q = load(s.q + i), a = load(s.a + i), fade = Lane ? load(f + j * W) : splat(f[0]);
            Vec<T> k1 = First ? Vec<T>{} : load(dk + i), b1 = First || Tied ? Vec<T>{} : load(db + i);
            for (int r = 0; r < kRows; ++r) {
                acc[r][j] = splat(dy[at_v + r]) * q + acc[r][j];
                k1 = splat(v[at_v + r]) * acc[r][j] + k1;
                if (!Tied) b1 = splat(x[at_v + r]) * acc[r][j] + b1;
                acc[r][j] = splat(dx[at_v + r]) * a + fade * acc[r][j];
            }
            store(dk + i, k1);
            if (!Tied) store(db + i, b1);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < NV; ++j) store(state + (row + r) * s.Kp + col + j * W, acc[r][j]);
}

// The chunk through S^T (Vp, Kp): da = S_{t-1} dx and dq = S_t dy. `v` is what is written with k, `x` what with b.
template <class T, bool Lane, bool Tied, int NV, bool First>
LATTE_INLINE void query_tile(T* state, const Tokens<T>& s, int64_t Vp, int64_t row, int64_t col, const T* dy, const T* dx, const T* v,
                             const T* x, T* dq, T* da) {
    constexpr int W = kWidth<T>;
    Vec<T> acc[kRows][NV];
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = load(state + (row + r) * s.Kp + col + j * W);
    for (int64_t t = 0; t < s.n; ++t) {
        const int64_t at_k = t * s.Kp + col, at_v = t * Vp + row;
        const T* f = s.f + t * s.ldf + (Lane ? col : 0);
        for (int j = 0; j < NV; ++j) {
            const int64_t i = at_k + j * W;
            const Vec<T> k = load(s.k + i), fade = Lane ? load(f + j * W) : splat(f[0]);
            Vec<T> q1 = First ? Vec<T>{} : load(dq + i), a1 = First ? Vec<T>{} : load(da + i);
            for (int r = 0; r < kRows; ++r) {
                a1 = splat(dx[at_v + r]) * acc[r][j] + a1;
                acc[r][j] = splat(v[at_v + r]) * k + fade * acc[r][j];
                if (!Tied) acc[r][j] = splat(x[at_v + r]) * load(s.b + i) + acc[r][j];
                q1 = splat(dy[at_v + r]) * acc[r][j] + q1;
            }
            store(dq + i, q1);
            store(da + i, a1);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < NV; ++j) store(state + (row + r) * s.Kp + col + j * W, acc[r][j]);
}

// A number that a template gets from an argument.
template <int N>
struct Number {
    static constexpr int value = N;
};

template <class T, bool Lane, bool Tied, bool Keys>
void transposed_state(T* state, const Tokens<T>& s, int64_t Vp, const T* dy, const T* dx, const T* v, const T* x, T* one, T* two) {
    constexpr int W = kWidth<T>;
    for (int64_t col = 0; col < s.Kp; col += 2 * W)
        for (int64_t row = 0; row < Vp; row += kRows) {
            auto tile = [&](auto wide, auto first) __attribute__((always_inline)) {
                constexpr int NV = decltype(wide)::value;
                constexpr bool First = decltype(first)::value;
                Keys ? key_tile<T, Lane, Tied, NV, First>(state, s, Vp, row, col, dy, dx, v, x, one, two)
                     : query_tile<T, Lane, Tied, NV, First>(state, s, Vp, row, col, dy, dx, v, x, one, two);
            };
            const bool two_wide = col + 2 * W <= s.Kp;
            if (row)
                two_wide ? tile(Number<2>{}, Number<0>{}) : tile(Number<1>{}, Number<0>{});
            else
                two_wide ? tile(Number<2>{}, Number<1>{}) : tile(Number<1>{}, Number<1>{});
        }
}

// Room for the tokens of a chunk.
template <class T>
int64_t tokens_room(int64_t Kp) {
    return 5 * room((kChunk + 1) * Kp, sizeof(T)) + room(kChunk, 1);
}
template <class T>
Tokens<T> take_tokens(Scratch& s, int64_t K, int64_t Kp, int64_t decays) {
    const int64_t n = (kChunk + 1) * Kp;
    return {s.zeros<T>(n), s.zeros<T>(n), s.zeros<T>(n), s.zeros<T>(n), s.zeros<T>(n), Kp, K, decays > 1 ? Kp : 1, 0};
}
template <class T, class G>
void load_tokens(Tokens<T>& s, uint8_t* flag, const G& g, int64_t b, int64_t h, int64_t t) {
    const uint8_t *mask = shift(g.mask, b * g.T + t), *reset = shift(g.reset, b * g.T + t);
    s.n = min64(kChunk, g.T - t);
    if (g.decays) {
        factors(s.f, flag, g.decays, s.Kp, at<T>(g.g, b, t, h), g.g.t, mask, reset, s.n);
    } else {
        for (int64_t i = 0; i < s.n; ++i) flag[i] = reset && reset[i], s.f[i] = T(!flag[i]);
    }
    gather(s.q, s.Kp, at<T>(g.q, b, t, h), g.q.t, s.n, g.K, mask);
    gather(s.k, s.Kp, at<T>(g.k, b, t, h), g.k.t, s.n, g.K, mask);
    gather(s.a, s.Kp, at<T>(g.a, b, t, h), g.a.t, s.n, g.K, mask);
    if (g.b.data) gather(s.b, s.Kp, at<T>(g.b, b, t, h), g.b.t, s.n, g.K, mask);
    for (int64_t i = 0; i < s.n; ++i)  // a document's first token reads nothing
        if (flag[i]) memset(s.a + i * s.Kp, 0, size_t(s.Kp) * sizeof(T));
    memset(s.a + s.n * s.Kp, 0, size_t(s.Kp) * sizeof(T));
    memset(s.q + s.n * s.Kp, 0, size_t(s.Kp) * sizeof(T));
}

template <class T, bool Row, bool Tied>
void forward(const DeltaForward& g) {
    const int64_t Kp = padded<T>(g.K), units = g.B * g.H, size = sizeof(T);
    const int64_t threads = useful_threads(g.threads, double(units) * double(g.T) * double(2 * g.K * g.V));
    const int64_t cuts = pieces(units, threads, max64(1, g.V / (2 * kWidth<T>))), width = round_up((g.V + cuts - 1) / cuts, kWidth<T>);
    const int64_t Vp = padded<T>(width);
    large_pages(g.y.data, units * g.T * g.V * size, g.threads);

    parallel(units * cuts, threads, [&](int64_t first, int64_t last) {
        Scratch s(tokens_room<T>(Kp) + 3 * room(kChunk * Vp, size) + room(Kp * Vp, size));
        Tokens<T> chunk = take_tokens<T>(s, g.K, Kp, g.decays);
        uint8_t* flag = s.take<uint8_t>(kChunk);
        T *v = s.take<T>(kChunk * Vp), *y = s.take<T>(kChunk * Vp), *u = s.take<T>(kChunk * Vp), *state = s.zeros<T>(Kp * Vp);
        for (int64_t unit = first; unit < last; ++unit) {
            const int64_t b = unit / cuts / g.H, h = unit / cuts % g.H, c = unit % cuts * width, n = min64(width, g.V - c);
            if (n <= 0) continue;
            gather(state, Vp, (const T*)g.S0 + unit / cuts * g.K * g.V + c, g.V, g.K, n, nullptr);
            for (int64_t t = 0; t < g.T; t += kChunk) {
                load_tokens(chunk, flag, g, b, h, t);
                gather(v, Vp, at<T>(g.v, b, t, h) + c, g.v.t, chunk.n, n, shift(g.mask, b * g.T + t));
                forward_state<T, Row, Tied>(state, Vp, chunk, v, y, u);
                scatter(y, Vp, at<T>(g.y, b, t, h) + c, g.y.t, chunk.n, n);
                if (g.u.data) scatter(u, Vp, at<T>(g.u, b, t, h) + c, g.u.t, chunk.n, n);
            }
            scatter(state, Vp, (T*)g.S1 + unit / cuts * g.K * g.V + c, g.V, g.K, n);
        }
    });
}

// dg of the tokens of a chunk from right to left; `sum` is the sum over values of S and its gradient after these tokens.
template <class T>
void gate_gradients(double* sum, const DeltaBackward& g, const Tokens<T>& s, const uint8_t* flag, int64_t b, int64_t h, int64_t t) {
    for (int64_t i = s.n - 1; i >= 0; --i) {
        const T *q = s.q + i * s.Kp, *k = s.k + i * s.Kp, *a = s.a + i * s.Kp, *erase = s.b + i * s.Kp;
        const T *dq = at<T>(g.dq, b, t + i, h), *dk = at<T>(g.dk, b, t + i, h), *da = at<T>(g.da, b, t + i, h);
        const T* db = g.b.data ? at<T>(g.db, b, t + i, h) : nullptr;
        T* dg = at<T>(g.dg, b, t + i, h);
        const bool real = !g.mask || g.mask[b * g.T + t + i];
        double total = 0;
        for (int64_t c = 0; c < g.K; ++c) {
            double here = sum[c] + double(q[c]) * double(dq[c]) - double(k[c]) * double(dk[c]);
            if (db) here -= double(erase[c]) * double(db[c]);
            if (flag[i]) here = 0;
            if (s.ldf > 1) dg[c] = real ? T(here) : T(0);
            total += here;
            sum[c] = here + double(a[c]) * double(da[c]);
        }
        if (s.ldf == 1) dg[0] = real ? T(total) : T(0);
    }
}

template <class T, bool Row, bool Tied>
void backward(const DeltaBackward& g) {
    const int64_t Kp = padded<T>(g.K), Vp = padded<T>(g.V), units = g.B * g.H, chunks = (g.T + kChunk - 1) / kChunk, size = sizeof(T);
    const int64_t threads = useful_threads(g.threads, 6.0 * double(units) * double(g.T) * double(g.K * g.V));
    const int64_t area = Kp * Vp, anchors = g.decays ? (chunks + kAnchor - 1) / kAnchor : 0;

    parallel(units, threads, [&](int64_t first, int64_t last) {
        Scratch s(tokens_room<T>(Kp) + 4 * room(kChunk * Vp, size) + 2 * room(kChunk * Kp, size) + room(chunks * kChunk * Vp, size) +
                  2 * room(area, size) + room(anchors * area, size) + room((anchors + 1) * Kp, 8));
        Tokens<T> chunk = take_tokens<T>(s, g.K, Kp, g.decays);
        uint8_t* flag = s.take<uint8_t>(kChunk);
        T *v = s.zeros<T>(kChunk * Vp), *u = s.zeros<T>(kChunk * Vp), *dy = s.zeros<T>(kChunk * Vp), *dv = s.zeros<T>(kChunk * Vp);
        T *one = s.take<T>(kChunk * Kp), *two = s.take<T>(kChunk * Kp), *dx = s.take<T>(chunks * kChunk * Vp);
        T *rows = s.zeros<T>(area), *lanes = s.zeros<T>(area), *kept = s.take<T>(anchors * area);
        double* sums = s.take<double>((anchors + 1) * Kp);  // at the anchors, and after the last token
        // What is written with k (and, not tied, with b) stands in v (and in u).
        auto load_chunk = [&](int64_t b, int64_t h, int64_t t) {
            const uint8_t* mask = shift(g.mask, b * g.T + t);
            load_tokens(chunk, flag, g, b, h, t);
            gather(dy, Vp, at<T>(g.dy, b, t, h), g.dy.t, chunk.n, g.V, mask);
            gather(Tied ? v : u, Vp, at<T>(g.u, b, t, h), g.u.t, chunk.n, g.V, mask);
            if (!Tied) gather(v, Vp, at<T>(g.v, b, t, h), g.v.t, chunk.n, g.V, mask);
        };
        for (int64_t unit = first; unit < last; ++unit) {
            const int64_t b = unit / g.H, h = unit % g.H;
            const T *dS = (const T*)g.dS1 + unit * g.K * g.V, *S = (const T*)g.S0 + unit * g.K * g.V;
            gather(rows, Vp, dS, g.V, g.K, g.V, nullptr);
            transpose(lanes, Kp, dS, g.V, g.K, g.V);
            for (int64_t i = chunks - 1; i >= 0; --i) {
                const int64_t t = i * kChunk;
                load_chunk(b, h, t);
                backward_state<T, Row, Tied>(rows, Vp, chunk, dy, dv, dx + t * Vp);
                scatter(dv, Vp, at<T>(g.dv, b, t, h), g.dv.t, chunk.n, g.V);
                transposed_state<T, Row, Tied, true>(lanes, chunk, Vp, dy, dx + t * Vp, v, u, one, two);
                scatter(one, Kp, at<T>(g.dk, b, t, h), g.dk.t, chunk.n, g.K);
                if (!Tied) scatter(two, Kp, at<T>(g.db, b, t, h), g.db.t, chunk.n, g.K);
                if (anchors && i % kAnchor == 0) memcpy(kept + i / kAnchor * area, lanes, size_t(area * size));
            }
            scatter(rows, Vp, (T*)g.dS0 + unit * g.K * g.V, g.V, g.K, g.V);
            transpose(lanes, Kp, S, g.V, g.K, g.V);
            for (int64_t i = 0; i < chunks; ++i) {
                const int64_t t = i * kChunk;
                if (anchors && i % kAnchor == 0) overlap(sums + i / kAnchor * Kp, lanes, kept + i / kAnchor * area, g.V, Kp);
                load_chunk(b, h, t);
                transposed_state<T, Row, Tied, false>(lanes, chunk, Vp, dy, dx + t * Vp, v, u, one, two);
                for (int64_t j = 0; j < chunk.n; ++j)
                    if (flag[j]) memset(two + j * Kp, 0, size_t(Kp * size));
                scatter(one, Kp, at<T>(g.dq, b, t, h), g.dq.t, chunk.n, g.K);
                scatter(two, Kp, at<T>(g.da, b, t, h), g.da.t, chunk.n, g.K);
            }
            if (!g.decays) continue;
            double* sum = sums + anchors * Kp;
            memset(rows, 0, size_t(area * size));  // serves once as room for the transpose of dS beside the final state
            transpose(rows, Kp, dS, g.V, g.K, g.V);
            overlap(sum, lanes, rows, g.V, Kp);
            for (int64_t i = chunks - 1; i >= 0; --i) {
                load_tokens(chunk, flag, g, b, h, i * kChunk);
                gate_gradients(sum, g, chunk, flag, b, h, i * kChunk);
                if (i % kAnchor == 0) memcpy(sum, sums + i / kAnchor * Kp, size_t(Kp) * sizeof(double));
            }
            memset(rows, 0, size_t(area * size));
        }
    });
}

template <class T, class G, class F>
void choose(const G& g, F run) {
    const bool row = g.decays > 1, tied = !g.b.data;
    if (row)
        tied ? run(Number<1>{}, Number<1>{}) : run(Number<1>{}, Number<0>{});
    else
        tied ? run(Number<0>{}, Number<1>{}) : run(Number<0>{}, Number<0>{});
}
template <class T>
void forward(const DeltaForward& g) {
    choose<T>(g, [&](auto row, auto tied) { forward<T, decltype(row)::value, decltype(tied)::value>(g); });
}
template <class T>
void backward(const DeltaBackward& g) {
    choose<T>(g, [&](auto row, auto tied) { backward<T, decltype(row)::value, decltype(tied)::value>(g); });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void delta_forward(const DeltaForward* g) { g->is_double ? forward<double>(*g) : forward<float>(*g); }
void delta_backward(const DeltaBackward* g) { g->is_double ? backward<double>(*g) : backward<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
