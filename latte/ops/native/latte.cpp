// Causal Latte, forward and backward.
//
//     a_t = logaddexp(a_{t-1}, k_t)      S_t = exp(a_{t-1} - a_t) S_{t-1} + exp(k_t - a_t) v_t^T      y_t = p_t^T S_t
//
// A chunk works relative to a pivot m per latent, which starts as the log-normaliser at the chunk's start and rises to k_t
// whenever k_t exceeds it, so it depends on the past only and k_t - m is never above 0:
//
//     w_t = exp(k_t - m)      N_t = N_{t-1} + w_t v_t^T      Z_t = Z_{t-1} + w_t      y_t = (p_t / Z_t)^T N_t
//
// No logarithm is needed inside a chunk, and N needs one multiply-add a token. When the pivot rises, N and Z shrink by
// f_t = exp(m_old - m_new); a reset is f_t = 0. Both are rare, and flagged. With R' = exp(m - a) R and U' = exp(m - a) U the
// gradients have the same form, run backwards:
//
//     R'_s = R'_{s+1} + (p_s / Z_s) dy_s^T    dv_s = w_s^T R'_s    U'_s = U'_{s+1} + (p_s / Z_s) dp_s    dk_s = w_s (R'_s v_s - U'_s)
#include "args.h"
#include "sweep.h"
#include "work.h"

LATTE_BEGIN

constexpr int64_t kChunk = 32;
constexpr int kStride = 4;  // tokens whose weights are computed at a time
constexpr double kEmpty = -1e30;

// The weights of one chunk of one head, relative to its pivots. Rows are padded; padding has weight 0.
template <class T>
struct Gates {
    int64_t M, Mp;
    T *w, *q, *f, *rz;     // (kChunk, Mp): w_t, p_t / Z_t, f_t where flagged, 1 / Z_t
    T *end;                // (Mp) 1 / Z at the end of the chunk
    T *hi, *lo, *z0, *dz;  // (Mp) pivot in two parts, carried and new part of Z
    uint8_t* flag;         // (kChunk)

    static int64_t bytes(int64_t Mp) { return 4 * room(kChunk * Mp, sizeof(T)) + 5 * room(Mp, sizeof(T)) + room(kChunk, 1); }
    Gates(Scratch& s, int64_t M_, int64_t Mp_) : M(M_), Mp(Mp_) {
        w = s.take<T>(kChunk * Mp), q = s.take<T>(kChunk * Mp), f = s.take<T>(kChunk * Mp), rz = s.take<T>(kChunk * Mp);
        end = s.take<T>(Mp), hi = s.take<T>(Mp), lo = s.take<T>(Mp), z0 = s.take<T>(Mp), dz = s.take<T>(Mp);
        flag = s.take<uint8_t>(kChunk);
    }

    // Tokens [t, t + kStride) of a whole vector of latents, if none of them raises the pivot: several exponentials at a time keep
    // the machine busy.
    LATTE_INLINE bool stride(int64_t at, const T* p, int64_t sp, const T* k, int64_t sk, Vec<T> mh, Vec<T> ml, Vec<T> z,
                             Vec<T>& d) const {
        Vec<T> x[kStride];
        Mask<T> up{};
        for (int i = 0; i < kStride; ++i) x[i] = (load(k + i * sk) - mh) - ml, up |= x[i] > Vec<T>{};
        if (__builtin_expect(any(up), 0)) return false;
        T *to_w = w + at, *to_q = q + at, *to_rz = rz + at;
        const int64_t ld = Mp;
        vexp(x);
        for (int i = 0; i < kStride; ++i) {
            d += x[i];
            const Vec<T> inv = T(1) / (z + d);
            store(to_w + i * ld, x[i]), store(to_q + i * ld, load(p + i * sp) * inv), store(to_rz + i * ld, inv);
        }
        return true;
    }

    // `a` (Mp) holds the log-normalisers before the chunk and is moved on to those after it.
    void fill(double* a, const T* p, int64_t sp, const T* k, int64_t sk, const uint8_t* mask, const uint8_t* reset, int64_t n) {
        typedef Vec<T> Vt;
        constexpr int W = kWidth<T>;
        const Vt one = splat(T(1)), none = splat(T(kEmpty));
        memset(flag, 0, size_t(n));
        const bool quiet = !(mask && memchr(mask, 0, size_t(n))) && !(reset && memchr(reset, 1, size_t(n)));
        for (int64_t l = 0; l < Mp; l += W) {
            // k - a in single precision would lose digits of a; k - hi is exact to half a unit, and lo brings the rest.
            for (int64_t i = l; i < l + W; ++i) hi[i] = T(a[i]), lo[i] = T(a[i] - double(hi[i]));
            Vt mh = load(hi + l), ml = load(lo + l), z = one, d = Vt{};
            const int64_t have = M - l;
            const bool plain = quiet && have >= W;
            for (int64_t t = 0; t < n; ++t) {
                const int64_t at = t * Mp + l;
                if (plain && t + kStride <= n && stride(at, p + t * sp + l, sp, k + t * sk + l, sk, mh, ml, z, d)) {
                    t += kStride - 1;
                    continue;
                }
                Vt shrink = one;
                bool moved = false;
                if (reset && reset[t]) {
                    mh = none, ml = Vt{}, z = one, d = Vt{}, shrink = Vt{};
                    moved = true;
                }
                if (mask && !mask[t]) {
                    store(w + at, Vt{}), store(q + at, Vt{}), store(rz + at, one);
                } else {
                    const Vt kt = load_some(k + t * sk + l, have, T(-INFINITY)), pt = load_some(p + t * sp + l, have, T(0));
                    Vt x = (kt - mh) - ml;
                    const Mask<T> up = x > Vt{};
                    if (__builtin_expect(any(up), 0)) {
                        const Vt drop = vexp(up ? -x : Vt{});
                        z *= drop, d *= drop, shrink *= drop;
                        mh = up ? kt : mh, ml = up ? Vt{} : ml, x = up ? Vt{} : x;
                        moved = true;
                    }
                    const Vt wt = vexp(x);
                    d += wt;
                    const Vt inv = one / (z + d);
                    store(w + at, wt), store(q + at, pt * inv), store(rz + at, inv);
                }
                if (moved) {
                    // Other lanes of this token may not have moved: they read 1.
                    if (!flag[t])
                        for (int64_t i = 0; i < Mp; i += W) store(f + t * Mp + i, one);
                    flag[t] = 1;
                    store(f + at, shrink);
                }
            }
            store(hi + l, mh), store(lo + l, ml), store(z0 + l, z), store(dz + l, d), store(end + l, one / (z + d));
        }
        constexpr int L = kWidth<double>;
        for (int64_t i = 0; i < Mp; i += L) {
            Vec<double> more;
            for (int j = 0; j < L; ++j) more[j] = double(dz[i + j]);
            more = vlog1p(more);
            for (int64_t j = i; j < i + L; ++j) {
                const bool same = hi[j] == T(a[j]) && z0[j] == 1;
                a[j] = same ? a[j] + more[j - i] : double(hi[j]) + log(double(z0[j]) + double(dz[j]));
            }
        }
    }
};

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}
LATTE_INLINE const uint8_t* shift(const uint8_t* p, int64_t n) { return p ? p + n : p; }

template <class T>
void forward(const LatteForward& g) {
    const int64_t Mp = padded<T>(g.M), units = g.B * g.H;
    const int64_t threads = useful_threads(g.threads, double(units) * double(g.T) * double(g.M * g.V));
    // A value column needs nothing of the others: few heads are cut along their values.
    const int64_t cuts = pieces(units, threads, max64(1, g.V / (2 * kWidth<T>))), width = round_up((g.V + cuts - 1) / cuts, kWidth<T>);
    const int64_t Vp = padded<T>(width);
    const int64_t bytes = units * g.T * g.V * int64_t(sizeof(T));
    const bool past = past_cache(bytes);
    large_pages(g.y.data, bytes, g.threads);

    parallel(units * cuts, threads, [&](int64_t first, int64_t last) {
        const int64_t mine = last - first;
        Scratch s(Gates<T>::bytes(Mp) + mine * (room(Mp * Vp, sizeof(T)) + room(Mp, 8)) + 2 * room(kChunk * Vp, sizeof(T)));
        Gates<T> gates(s, g.M, Mp);
        T *v = s.take<T>(kChunk * Vp), *y = s.take<T>(kChunk * Vp);
        T* state = s.zeros<T>(mine * round_up(Mp * Vp, 64 / sizeof(T)));
        double* norm = s.take<double>(mine * round_up(Mp, 8));

        auto job = [&](int64_t u, int64_t& b, int64_t& h, int64_t& c, int64_t& n, T*& acc, double*& a) {
            b = u / cuts / g.H, h = u / cuts % g.H, c = u % cuts * width, n = max64(0, min64(width, g.V - c));
            acc = state + (u - first) * round_up(Mp * Vp, 64 / sizeof(T)), a = norm + (u - first) * round_up(Mp, 8);
        };
        int64_t b, h, c, n;
        T* acc;
        double* a;
        for (int64_t u = first; u < last; ++u) {
            job(u, b, h, c, n, acc, a);
            for (int64_t l = 0; l < Mp; ++l) a[l] = l < g.M ? g.log_norm0[(b * g.H + h) * g.M + l] : kEmpty;
            gather(acc, Vp, (const T*)g.mean0 + (b * g.H + h) * g.M * g.V + c, g.V, g.M, n, nullptr);
        }
        // Chunks outside, heads inside: neighbouring heads share the pages of a chunk.
        for (int64_t t = 0; t < g.T; t += kChunk) {
            const int64_t m = min64(kChunk, g.T - t);
            for (int64_t u = first; u < last; ++u) {
                job(u, b, h, c, n, acc, a);
                if (n == 0) continue;
                const uint8_t *mask = shift(g.mask, b * g.T + t), *reset = shift(g.reset, b * g.T + t);
                gates.fill(a, at<T>(g.p, b, t, h), g.p.t, at<T>(g.k, b, t, h), g.k.t, mask, reset, m);
                gather(v, Vp, at<T>(g.v, b, t, h) + c, g.v.t, m, n, mask);
                sweep<T, Decay::rare_row, false>({acc, Mp, Vp, gates.w, v, gates.q, y, gates.f, gates.flag, m, gates.end});
                scatter(y, Vp, at<T>(g.y, b, t, h) + c, g.y.t, m, n, past);
            }
        }
        for (int64_t u = first; u < last; ++u) {
            job(u, b, h, c, n, acc, a);
            if (c == 0) memcpy(g.log_norm1 + (b * g.H + h) * g.M, a, size_t(g.M) * sizeof(double));
            scatter(acc, Vp, (T*)g.mean1 + (b * g.H + h) * g.M * g.V + c, g.V, g.M, n);
        }
        settle_past_cache();
    });
}

// One token of dk = w (R' v - U'), with U' += q dp before and U' *= f after it.
template <class T>
LATTE_INLINE void key_gradient(T* __restrict sum, T* __restrict dk, const T* __restrict dp, const T* __restrict q,
                               const T* __restrict w, const T* __restrict rv, const T* __restrict f, int64_t M) {
    for (int64_t l = 0; l < M; ++l) {
        const T total = sum[l] + q[l] * dp[l];
        dk[l] = w[l] * (rv[l] - total);
        sum[l] = total;
    }
    if (f)
        for (int64_t l = 0; l < M; ++l) sum[l] *= f[l];
}

template <class T>
void backward(const LatteBackward& g) {
    const int64_t Mp = padded<T>(g.M), Vp = padded<T>(g.V), units = g.B * g.H, chunks = (g.T + kChunk - 1) / kChunk;
    const int64_t threads = useful_threads(g.threads, 3.0 * double(units) * double(g.T) * double(g.M * g.V));
    const int64_t area = round_up(Mp * Vp, 64 / sizeof(T)), line = round_up(Mp, 8);
    large_pages(g.dp.data, units * g.T * g.M * int64_t(sizeof(T)), g.threads);
    large_pages(g.dk.data, units * g.T * g.M * int64_t(sizeof(T)), g.threads);
    large_pages(g.dv.data, units * g.T * g.V * int64_t(sizeof(T)), g.threads);

    parallel(units, threads, [&](int64_t first, int64_t last) {
        const int64_t mine = last - first;
        Scratch s(Gates<T>::bytes(Mp) + 3 * room(kChunk * Vp, sizeof(T)) + room(kChunk * Mp, sizeof(T)) +
                  mine * (2 * area * int64_t(sizeof(T)) + (1 + chunks) * line * 8 + room(Mp, sizeof(T))));
        Gates<T> gates(s, g.M, Mp);
        T *v = s.take<T>(kChunk * Vp), *dy = s.take<T>(kChunk * Vp), *dv = s.take<T>(kChunk * Vp), *part = s.take<T>(kChunk * Mp);
        T *lanes = s.zeros<T>(mine * area), *rows = s.zeros<T>(mine * area);  // value x latent; latent x value
        // The log-normalisers at chunk starts are all that is kept between the two directions.
        double* norms = s.take<double>(mine * (1 + chunks) * line);
        T* total = s.zeros<T>(mine * round_up(Mp, 64 / sizeof(T)));  // U'

        auto load_chunk = [&](int64_t u, int64_t t, int64_t m, double* a) {
            const int64_t b = u / g.H, h = u % g.H;
            const uint8_t* mask = shift(g.mask, b * g.T + t);
            gates.fill(a, at<T>(g.p, b, t, h), g.p.t, at<T>(g.k, b, t, h), g.k.t, mask, shift(g.reset, b * g.T + t), m);
            gather(v, Vp, at<T>(g.v, b, t, h), g.v.t, m, g.V, mask);
            gather(dy, Vp, at<T>(g.dy, b, t, h), g.dy.t, m, g.V, mask);
        };

        for (int64_t u = first; u < last; ++u) {
            double* a = norms + (u - first) * (1 + chunks) * line;
            for (int64_t l = 0; l < Mp; ++l) a[l] = l < g.M ? g.log_norm0[u * g.M + l] : kEmpty;
            transpose(lanes + (u - first) * area, Mp, (const T*)g.mean0 + u * g.M * g.V, g.V, g.M, g.V);
        }
        // Left to right: the means again, for dp_t = S_t dy_t.
        for (int64_t t = 0, i = 0; t < g.T; t += kChunk, ++i) {
            const int64_t m = min64(kChunk, g.T - t);
            for (int64_t u = first; u < last; ++u) {
                double* a = norms + ((u - first) * (1 + chunks) + i) * line;
                memcpy(a + line, a, size_t(Mp) * sizeof(double));
                load_chunk(u, t, m, a + line);
                T* acc = lanes + (u - first) * area;
                sweep<T, Decay::rare_lane, false>({acc, Vp, Mp, v, gates.w, dy, part, gates.f, gates.flag, m, gates.end});
                for (int64_t j = 0; j < m * Mp; ++j) part[j] *= gates.rz[j];
                scatter(part, Mp, at<T>(g.dp, u / g.H, t, u % g.H), g.dp.t, m, g.M);
            }
        }
        // The gradient of the final state opens the way back; `lanes` now holds that state.
        for (int64_t u = first; u < last; ++u) {
            T *acc = lanes + (u - first) * area, *sum = total + (u - first) * round_up(Mp, 64 / sizeof(T));
            const T* dS = (const T*)g.dmean1 + u * g.M * g.V;
            for (int64_t l = 0; l < g.M; ++l) {
                double dot = 0;
                for (int64_t c = 0; c < g.V; ++c) dot += double(dS[l * g.V + c]) * double(acc[c * Mp + l]);
                sum[l] = T(dot - g.dlog_norm1[u * g.M + l]);
            }
            transpose(acc, Mp, dS, g.V, g.M, g.V);
            gather(rows + (u - first) * area, Vp, dS, g.V, g.M, g.V, nullptr);
        }
        // Right to left.
        for (int64_t i = chunks - 1; i >= 0; --i) {
            const int64_t t = i * kChunk, m = min64(kChunk, g.T - t);
            for (int64_t u = first; u < last; ++u) {
                const int64_t b = u / g.H, h = u % g.H;
                double* a = norms + ((u - first) * (1 + chunks) + i) * line;
                load_chunk(u, t, m, a);
                T *accl = lanes + (u - first) * area, *accr = rows + (u - first) * area;
                T* sum = total + (u - first) * round_up(Mp, 64 / sizeof(T));
                for (int64_t l = 0; l < Mp; ++l) sum[l] *= gates.end[l];
                sweep<T, Decay::rare_row, true>({accr, Mp, Vp, gates.q, dy, gates.w, dv, gates.f, gates.flag, m, gates.end});
                scatter(dv, Vp, at<T>(g.dv, b, t, h), g.dv.t, m, g.V);
                sweep<T, Decay::rare_lane, true>({accl, Vp, Mp, dy, gates.q, v, part, gates.f, gates.flag, m, gates.end});
                for (int64_t j = m - 1; j >= 0; --j)
                    key_gradient(sum, at<T>(g.dk, b, t + j, h), at<T>(g.dp, b, t + j, h), gates.q + j * Mp, gates.w + j * Mp,
                                 part + j * Mp, gates.flag[j] ? gates.f + j * Mp : nullptr, g.M);
            }
        }
        for (int64_t u = first; u < last; ++u) {
            T *acc = rows + (u - first) * area, *sum = total + (u - first) * round_up(Mp, 64 / sizeof(T));
            const T* mean = (const T*)g.mean0 + u * g.M * g.V;
            for (int64_t l = 0; l < g.M; ++l) {
                double dot = 0;
                for (int64_t c = 0; c < g.V; ++c) dot += double(acc[l * Vp + c]) * double(mean[l * g.V + c]);
                g.dlog_norm0[u * g.M + l] = dot - double(sum[l]);
            }
            scatter(acc, Vp, (T*)g.dmean0 + u * g.M * g.V, g.V, g.M, g.V);
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void latte_forward(const LatteForward* g) { g->is_double ? forward<double>(*g) : forward<float>(*g); }
void latte_backward(const LatteBackward* g) { g->is_double ? backward<double>(*g) : backward<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
