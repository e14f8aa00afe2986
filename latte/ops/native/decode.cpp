// One token of a Macchiato layer between its projections: slots, latents and window, from one state to the next.
//
//     p = softmax(slots)    a' = logaddexp(a, k)    S' = S + exp(k - a') (v - S)    y = p_0 window(q) + sum_l p_l S'_l
//
// where window(q) is softmax attention of the rotated query to the ring of past keys, to the present one, and to the sinks that
// lie behind the window. A thread owns key-value heads of rows: it attends, then copies their part of the ring with the one slot
// replaced. States are values, so the old one stays as it is; the copy is a second reading of what attention has just read.
#include "args.h"
#include "work.h"

LATTE_BEGIN

constexpr double kEmpty = -1e30;

template <class T>
T dot(const T* a, const T* b, int64_t n) {
    Vec<T> sum[2] = {};
    int64_t c = 0;
    for (; c + 2 * kWidth<T> <= n; c += 2 * kWidth<T>)
        for (int j = 0; j < 2; ++j) sum[j] = load(a + c + j * kWidth<T>) * load(b + c + j * kWidth<T>) + sum[j];
    for (; c < n; c += kWidth<T>) sum[0] = load_some(a + c, n - c, T(0)) * load_some(b + c, n - c, T(0)) + sum[0];
    return sum_lanes<T>(sum[0] + sum[1]);
}
// y += s x
template <class T>
LATTE_INLINE void add_scaled(T* y, const T* x, T s, int64_t n) {
    for (int64_t c = 0; c < n; c += kWidth<T>) {
        const int64_t k = min64(kWidth<T>, n - c);
        store_some(y + c, load_some(x + c, k, T(0)) * splat(s) + load_some(y + c, k, T(0)), k);
    }
}

template <class T>
void rotated(T* to, const T* from, const double* cosine, const double* sine, int64_t K) {
    if (!cosine) {
        memcpy(to, from, size_t(K) * sizeof(T));
        return;
    }
    const int64_t half = K / 2;
    for (int64_t i = 0; i < half; ++i) {
        const T c = T(cosine[i]), s = T(sine[i]), x = from[i], y = from[i + half];
        to[i] = x * c - y * s, to[i + half] = y * c + x * s;
    }
}

template <class T>
struct Row {
    const Decode& g;
    int64_t b, count;  // tokens of the document before this one
    bool fresh;        // the state is of another document

    // Softmax attention of one head; `scores` has room for ring, present and sinks.
    void attend(const T* q, const T* sunk, const T* key, int64_t group, T* scores, T* y) const {
        const int64_t held = g.R == 0 ? 0 : min64(count, g.R), sinks = max64(0, min64(g.N, count - g.R));
        const T* ring = (const T*)g.ring_k0 + (b * g.R * g.G + group) * g.K;
        const T* sink = (const T*)g.sink_k0 + (b * g.N * g.G + group) * g.K;
        int64_t n = 0;
        for (int64_t i = 0; i < held; ++i) scores[n++] = dot(q, ring + i * g.G * g.K, g.K);
        scores[n++] = dot(q, key, g.K);
        for (int64_t i = 0; i < sinks; ++i) scores[n++] = dot(sunk, sink + i * g.G * g.K, g.K);
        T top = T(-INFINITY);
        for (int64_t i = 0; i < n; ++i) {
            T s = scores[i] * T(g.scale);
            if (g.softcap != 0) s = T(g.softcap) * T(::tanh(double(s / T(g.softcap))));
            scores[i] = s;
            top = s > top ? s : top;
        }
        T total = 0;
        for (int64_t i = 0; i < n; i += kWidth<T>) {
            const int64_t k = min64(kWidth<T>, n - i);
            const Vec<T> e = vexp(load_some(scores + i, k, T(-INFINITY)) - splat(top));
            store_some(scores + i, e, k);
            total += sum_lanes<T>(e);
        }
        const T share = 1 / total;
        const T* value = (const T*)g.ring_v0 + (b * g.R * g.G + group) * g.V;
        const T* sink_value = (const T*)g.sink_v0 + (b * g.N * g.G + group) * g.V;
        memset(y, 0, size_t(g.V) * sizeof(T));
        n = 0;
        for (int64_t i = 0; i < held; ++i) add_scaled(y, value + i * g.G * g.V, scores[n++] * share, g.V);
        add_scaled(y, (const T*)g.v + b * g.vb + group * g.V, scores[n++] * share, g.V);
        for (int64_t i = 0; i < sinks; ++i) add_scaled(y, sink_value + i * g.G * g.V, scores[n++] * share, g.V);
    }

    // Softmax over the slots of a head, the bias of slot 0 added.
    void weigh(int64_t h, T* p) const {
        const int64_t slots = g.M + (g.windowed ? 1 : 0);
        memcpy(p, (const T*)g.slots + b * g.slotsb + h * slots, size_t(slots) * sizeof(T));
        if (g.bias) p[0] += ((const T*)g.bias)[h];
        T top = p[0], total = 0;
        for (int64_t i = 1; i < slots; ++i) top = p[i] > top ? p[i] : top;
        for (int64_t i = 0; i < slots; i += kWidth<T>) {
            const int64_t k = min64(kWidth<T>, slots - i);
            const Vec<T> e = vexp(load_some(p + i, k, T(-INFINITY)) - splat(top));
            store_some(p + i, e, k);
            total += sum_lanes<T>(e);
        }
        for (int64_t i = 0; i < slots; ++i) p[i] /= total;
    }

    // Move the latents of a head on by one token and add what they say to y.
    void read_latents(int64_t h, const T* p, T* y) const {
        const int64_t at = (b * g.H + h) * g.M;
        const T* v = (const T*)g.v + b * g.vb + h / (g.H / g.G) * g.V;
        for (int64_t l = 0; l < g.M; ++l) {
            const double before = fresh ? kEmpty : g.log_norm0[at + l], k = double(((const T*)g.k_latent)[b * g.klb + h * g.M + l]);
            const double high = before > k ? before : k, after = high + ::log1p(::exp((before > k ? k : before) - high));
            const Vec<T> share = splat(T(::exp(k - after))), weight = splat(p[l]);
            g.log_norm1[at + l] = after;
            const T* from = (const T*)g.mean0 + (at + l) * g.V;
            T* to = (T*)g.mean1 + (at + l) * g.V;
            for (int64_t c = 0; c < g.V; c += kWidth<T>) {
                const int64_t n = min64(kWidth<T>, g.V - c);
                const Vec<T> old = fresh ? Vec<T>{} : load_some(from + c, n, T(0));
                const Vec<T> now = old + share * (load_some(v + c, n, T(0)) - old);
                store_some(to + c, now, n);
                store_some(y + c, weight * now + load_some(y + c, n, T(0)), n);
            }
        }
    }

    // Padding changes nothing but, with a reset, forgets.
    void keep_latents(int64_t h) const {
        const int64_t at = (b * g.H + h) * g.M;
        for (int64_t l = 0; l < g.M; ++l) g.log_norm1[at + l] = fresh ? kEmpty : g.log_norm0[at + l];
        const size_t bytes = size_t(g.M * g.V) * sizeof(T);
        if (fresh)
            memset((T*)g.mean1 + at * g.V, 0, bytes);
        else
            memcpy((T*)g.mean1 + at * g.V, (const T*)g.mean0 + at * g.V, bytes);
    }

    // `slots` rows of one group, `place` of them replaced by `now` (none if negative).
    static void copy_ring(T* to, const T* from, const T* now, int64_t place, int64_t slots, int64_t stride, int64_t width) {
        for (int64_t i = 0; i < slots; ++i)
            memcpy(to + i * stride, i == place ? now : from + i * stride, size_t(width) * sizeof(T));
    }
};

template <class T>
void decode_typed(const Decode& g) {
    const int64_t shared = g.H / g.G, half = g.K / 2, slots = g.M + (g.windowed ? 1 : 0);
    const double work = double(g.B * g.H) * (double(g.M * g.V) * 3 + (g.windowed ? double(g.R + g.N + 1) * double(g.K + g.V) : 0.0));
    parallel(g.B * g.G, useful_threads(g.threads, work), [&](int64_t begin, int64_t end) {
        Scratch mem(4 * room(half, 8) + room(slots, sizeof(T)) + room(g.R + g.N + 1, sizeof(T)) + 3 * room(g.K, sizeof(T)) + room(g.V, sizeof(T)));
        double *near = mem.take<double>(half), *near_s = mem.take<double>(half), *far = mem.take<double>(half), *far_s = mem.take<double>(half);
        T *p = mem.take<T>(slots), *scores = mem.take<T>(g.R + g.N + 1), *q = mem.take<T>(g.K), *sunk = mem.take<T>(g.K), *key = mem.take<T>(g.K);
        T* seen = mem.take<T>(g.V);
        int64_t turned = -1;  // the row that the angles are of
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / g.G, group = u % g.G;
            const bool real = !g.mask || g.mask[b], fresh = g.reset && g.reset[b];
            const int64_t count = fresh || !g.windowed ? 0 : g.count0[b];
            const Row<T> row{g, b, count, fresh};
            if (g.windowed && g.rope && turned != b) {
                const double sunken = double(min64(count, g.N + g.R));
                for (int64_t i = 0; i < half; ++i) {
                    const double speed = ((const double*)g.speeds)[i];
                    near[i] = ::cos(double(count) * speed), near_s[i] = ::sin(double(count) * speed);
                    if (g.N) far[i] = ::cos(sunken * speed), far_s[i] = ::sin(sunken * speed);
                }
                turned = b;
            }
            const double *c = g.rope ? near : nullptr, *cf = g.rope ? far : nullptr;
            if (g.windowed) rotated(key, (const T*)g.k + b * g.kb + group * g.K, c, near_s, g.K);
            for (int64_t h = group * shared; h < (group + 1) * shared; ++h) {
                T* y = (T*)g.y + (b * g.H + h) * g.V;
                memset(y, 0, size_t(g.V) * sizeof(T));
                if (!real) {
                    row.keep_latents(h);
                    continue;
                }
                row.weigh(h, p);
                if (g.windowed) {
                    const T* raw = (const T*)g.q + b * g.qb + h * g.K;
                    rotated(q, raw, c, near_s, g.K);
                    if (g.N) rotated(sunk, raw, cf, far_s, g.K);
                    row.attend(q, sunk, key, group, scores, seen);
                    add_scaled(y, seen, p[0], g.V);
                }
                row.read_latents(h, p + (g.windowed ? 1 : 0), y);
            }
            if (!g.windowed) continue;
            const int64_t place = real && g.R ? count % g.R : -1, sink = real && count < g.N ? count : -1;
            const T* value = (const T*)g.v + b * g.vb + group * g.V;
            const int64_t ring = (b * g.R * g.G + group), sinks = (b * g.N * g.G + group);
            Row<T>::copy_ring((T*)g.ring_k1 + ring * g.K, (const T*)g.ring_k0 + ring * g.K, key, place, g.R, g.G * g.K, g.K);
            Row<T>::copy_ring((T*)g.ring_v1 + ring * g.V, (const T*)g.ring_v0 + ring * g.V, value, place, g.R, g.G * g.V, g.V);
            Row<T>::copy_ring((T*)g.sink_k1 + sinks * g.K, (const T*)g.sink_k0 + sinks * g.K, key, sink, g.N, g.G * g.K, g.K);
            Row<T>::copy_ring((T*)g.sink_v1 + sinks * g.V, (const T*)g.sink_v0 + sinks * g.V, value, sink, g.N, g.G * g.V, g.V);
            if (group == 0) g.count1[b] = count + (real ? 1 : 0);
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void decode(const Decode* g) { g->is_double ? decode_typed<double>(*g) : decode_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
