// Linear attention with decay: S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, y_t = q_t^T S_t, forward and backward.
//
// The state passes through the tokens as it is (sweep.h); every exponent is a log-decay, so at most 0, whatever has
// accumulated. The gradient of the log-decay needs no state per token:
//
//     dg_t = sum over values of R_t . (exp(g_t) S_{t-1}) = dg_{t+1} + q_t . dq_t - k_t . dk_t
//
// which is exact but adds up rounding errors, so it starts afresh from R and S every kAnchor chunks; those S are all that is
// kept.
#include "heads.h"
#include "work.h"

LATTE_BEGIN

template <class T, bool R>
LATTE_INLINE void sweep_rows(int64_t decays, const Sweep<T>& s) {
    decays == 0 ? sweep<T, Decay::rare_row, R>(s) : decays == 1 ? sweep<T, Decay::scalar, R>(s) : sweep<T, Decay::row, R>(s);
}
template <class T, bool R>
LATTE_INLINE void sweep_lanes(int64_t decays, const Sweep<T>& s) {
    decays == 0 ? sweep<T, Decay::rare_lane, R>(s) : decays == 1 ? sweep<T, Decay::scalar, R>(s) : sweep<T, Decay::lane, R>(s);
}

template <class T>
void forward(const DecayForward& g) {
    const int64_t Kp = padded<T>(g.K), units = g.B * g.H;
    const int64_t threads = useful_threads(g.threads, double(units) * double(g.T) * double(g.K * g.V));
    const int64_t cuts = pieces(units, threads, max64(1, g.V / (2 * kWidth<T>))), width = round_up((g.V + cuts - 1) / cuts, kWidth<T>);
    const int64_t Vp = padded<T>(width), area = round_up(Kp * Vp, 64 / sizeof(T)), size = sizeof(T);
    const int64_t bytes = units * g.T * g.V * size;
    const bool past = past_cache(bytes);
    large_pages(g.y.data, bytes, g.threads);

    parallel(units * cuts, threads, [&](int64_t first, int64_t last) {
        Scratch s(3 * room(kChunk * Kp, size) + room(kChunk, 1) + 2 * room(kChunk * Vp, size) + (last - first) * area * size);
        T *q = s.take<T>(kChunk * Kp), *k = s.take<T>(kChunk * Kp), *f = s.take<T>(kChunk * Kp);
        T *v = s.take<T>(kChunk * Vp), *y = s.take<T>(kChunk * Vp), *state = s.zeros<T>((last - first) * area);
        uint8_t* flag = s.take<uint8_t>(kChunk);
        for (int64_t u = first; u < last; ++u) {
            const int64_t c = u % cuts * width, n = min64(width, g.V - c);
            if (n > 0) gather(state + (u - first) * area, Vp, (const T*)g.S0 + u / cuts * g.K * g.V + c, g.V, g.K, n, nullptr);
        }
        for (int64_t t = 0; t < g.T; t += kChunk) {
            const int64_t m = min64(kChunk, g.T - t);
            for (int64_t u = first; u < last; ++u) {
                const int64_t b = u / cuts / g.H, h = u / cuts % g.H, c = u % cuts * width, n = min64(width, g.V - c);
                if (n <= 0) continue;
                const uint8_t *mask = shift(g.mask, b * g.T + t), *reset = shift(g.reset, b * g.T + t);
                factors(f, flag, g.decays, Kp, at<T>(g.g, b, t, h), g.g.t, mask, reset, m);
                gather(q, Kp, at<T>(g.q, b, t, h), g.q.t, m, g.K, mask);
                gather(k, Kp, at<T>(g.k, b, t, h), g.k.t, m, g.K, mask);
                gather(v, Vp, at<T>(g.v, b, t, h) + c, g.v.t, m, n, mask);
                sweep_rows<T, false>(g.decays, {state + (u - first) * area, Kp, Vp, k, v, q, y, f, flag, m});
                scatter(y, Vp, at<T>(g.y, b, t, h) + c, g.y.t, m, n, past);
            }
        }
        for (int64_t u = first; u < last; ++u) {
            const int64_t c = u % cuts * width, n = min64(width, g.V - c);
            if (n > 0) scatter(state + (u - first) * area, Vp, (T*)g.S1 + u / cuts * g.K * g.V + c, g.V, g.K, n);
        }
        settle_past_cache();
    });
}

// One token of dg_t = dg_{t+1} + q dq - k dk, nothing where a document starts; returns the sum over channels.
template <class T>
LATTE_INLINE T gate_gradient(double* __restrict sum, const T* __restrict q, const T* __restrict dq, const T* __restrict k,
                             const T* __restrict dk, bool drop, int64_t K) {
    double total = 0;
    if (drop) {
        memset(sum, 0, size_t(K) * sizeof(double));
        return 0;
    }
    for (int64_t c = 0; c < K; ++c) sum[c] += double(q[c]) * double(dq[c]) - double(k[c]) * double(dk[c]);
    for (int64_t c = 0; c < K; ++c) total += sum[c];
    return T(total);
}

template <class T>
void backward(const DecayBackward& g) {
    const int64_t Kp = padded<T>(g.K), Vp = padded<T>(g.V), units = g.B * g.H, chunks = (g.T + kChunk - 1) / kChunk;
    const int64_t threads = useful_threads(g.threads, 3.0 * double(units) * double(g.T) * double(g.K * g.V));
    const int64_t area = round_up(Kp * Vp, 64 / sizeof(T)), line = round_up(Kp, 8), size = sizeof(T);
    const int64_t anchors = g.decays ? (chunks + kAnchor - 1) / kAnchor : 0;
    large_pages(g.dq.data, units * g.T * g.K * size, g.threads);
    large_pages(g.dk.data, units * g.T * g.K * size, g.threads);
    large_pages(g.dv.data, units * g.T * g.V * size, g.threads);

    parallel(units, threads, [&](int64_t first, int64_t last) {
        const int64_t mine = last - first;
        Scratch s(4 * room(kChunk * Kp, size) + room(kChunk, 1) + 3 * room(kChunk * Vp, size) +
                  mine * ((2 + anchors) * area * size + line * 8));
        T *q = s.take<T>(kChunk * Kp), *k = s.take<T>(kChunk * Kp), *f = s.take<T>(kChunk * Kp), *part = s.take<T>(kChunk * Kp);
        T *v = s.take<T>(kChunk * Vp), *dy = s.take<T>(kChunk * Vp), *dv = s.take<T>(kChunk * Vp);
        T *lanes = s.zeros<T>(mine * area), *rows = s.zeros<T>(mine * area), *kept = s.take<T>(mine * anchors * area);
        double* flow = s.zeros<double>(mine * line);  // dg of the token to the right
        uint8_t* flag = s.take<uint8_t>(kChunk);

        auto load_chunk = [&](int64_t b, int64_t h, int64_t t, int64_t m) {
            const uint8_t *mask = shift(g.mask, b * g.T + t), *reset = shift(g.reset, b * g.T + t);
            factors(f, flag, g.decays, Kp, at<T>(g.g, b, t, h), g.g.t, mask, reset, m);
            gather(q, Kp, at<T>(g.q, b, t, h), g.q.t, m, g.K, mask);
            gather(k, Kp, at<T>(g.k, b, t, h), g.k.t, m, g.K, mask);
            gather(v, Vp, at<T>(g.v, b, t, h), g.v.t, m, g.V, mask);
            gather(dy, Vp, at<T>(g.dy, b, t, h), g.dy.t, m, g.V, mask);
        };

        for (int64_t u = first; u < last; ++u)
            transpose(lanes + (u - first) * area, Kp, (const T*)g.S0 + u * g.K * g.V, g.V, g.K, g.V);
        for (int64_t i = 0; i < chunks; ++i)
            for (int64_t u = first; u < last; ++u) {
                const int64_t b = u / g.H, h = u % g.H, t = i * kChunk, m = min64(kChunk, g.T - t);
                T* acc = lanes + (u - first) * area;
                if (anchors && i % kAnchor == 0)
                    memcpy(kept + ((u - first) * anchors + i / kAnchor) * area, acc, size_t(Kp * Vp * size));
                load_chunk(b, h, t, m);
                sweep_lanes<T, false>(g.decays, {acc, Vp, Kp, v, k, dy, part, f, flag, m});
                scatter(part, Kp, at<T>(g.dq, b, t, h), g.dq.t, m, g.K);
            }
        for (int64_t u = first; u < last; ++u) {
            const T* dS = (const T*)g.dS1 + u * g.K * g.V;
            T *acc = lanes + (u - first) * area, *other = rows + (u - first) * area;
            // `rows` serves once as room for the transpose of dS beside the final state.
            transpose(other, Kp, dS, g.V, g.K, g.V);
            overlap(flow + (u - first) * line, acc, other, g.V, Kp);
            memcpy(acc, other, size_t(Kp * Vp * size));
            memset(other, 0, size_t(Kp * Vp * size));
            gather(other, Vp, dS, g.V, g.K, g.V, nullptr);
        }
        for (int64_t i = chunks - 1; i >= 0; --i)
            for (int64_t u = first; u < last; ++u) {
                const int64_t b = u / g.H, h = u % g.H, t = i * kChunk, m = min64(kChunk, g.T - t);
                T *accl = lanes + (u - first) * area, *accr = rows + (u - first) * area;
                double* sum = flow + (u - first) * line;
                load_chunk(b, h, t, m);
                sweep_rows<T, true>(g.decays, {accr, Kp, Vp, q, dy, k, dv, f, flag, m});
                scatter(dv, Vp, at<T>(g.dv, b, t, h), g.dv.t, m, g.V);
                sweep_lanes<T, true>(g.decays, {accl, Vp, Kp, dy, q, v, part, f, flag, m});
                // A masked token's key is 0, but what it would have received is not.
                for (int64_t j = 0; j < m; ++j)
                    if (g.mask && !g.mask[b * g.T + t + j]) memset(part + j * Kp, 0, size_t(Kp * size));
                scatter(part, Kp, at<T>(g.dk, b, t, h), g.dk.t, m, g.K);
                if (!g.decays) continue;
                for (int64_t j = m - 1; j >= 0; --j) {
                    T* dg = at<T>(g.dg, b, t + j, h);
                    const T total = gate_gradient(sum, q + j * Kp, at<T>(g.dq, b, t + j, h), k + j * Kp, part + j * Kp, flag[j], g.K);
                    const bool real = !g.mask || g.mask[b * g.T + t + j];
                    if (g.decays == 1)
                        *dg = real ? total : T(0);
                    else
                        for (int64_t c = 0; c < g.K; ++c) dg[c] = real ? T(sum[c]) : T(0);
                }
                if (i % kAnchor == 0) overlap(sum, accl, kept + ((u - first) * anchors + i / kAnchor) * area, g.V, Kp);
            }
        for (int64_t u = first; u < last; ++u)
            scatter(rows + (u - first) * area, Vp, (T*)g.dS0 + u * g.K * g.V, g.V, g.K, g.V);
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void decay_forward(const DecayForward* g) { g->is_double ? forward<double>(*g) : forward<float>(*g); }
void decay_backward(const DecayBackward* g) { g->is_double ? backward<double>(*g) : backward<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
