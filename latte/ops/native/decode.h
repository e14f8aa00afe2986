// One token of a Macchiato layer between its projections: slots, latents and window, from one state to the next.
//
//     p = softmax(slots)    a' = logaddexp(a, k)    S' = S + exp(k - a') (v - S)    y = p_0 window(q) + sum_l p_l S'_l
//
// where window(q) is softmax attention of the rotated query to the ring of past keys, to the present one, and to the sinks that
// lie behind the window. A thread owns key-value heads of rows: it attends, then copies their part of the ring with the one slot
// replaced. States are values, so the old one stays as it is; the copy is a second reading of what attention has just read. A ring
// with slots to spare is not copied: the token is written where the old state does not look.
#pragma once
#include "args.h"
#include "work.h"

LATTE_BEGIN

constexpr double kEmpty = -1e30;
constexpr int kStripe = 8;  // vectors of a row that stay in registers

// y += s x
template <class T>
LATTE_INLINE void add_scaled(T* y, const T* x, T s, int64_t n) {
    for (int64_t c = 0; c < n; c += kWidth<T>) {
        const int64_t k = min64(kWidth<T>, n - c);
        store_some(y + c, load_some(x + c, k, T(0)) * splat(s) + load_some(y + c, k, T(0)), k);
    }
}

template <int n>
struct Count {
    static constexpr int value = n;
};

// Cuts a row in stripes of vectors that stay in registers while body(first column, number of vectors, lanes) walks over rows.
template <class T, class F>
LATTE_INLINE void each_stripe(int64_t width, F body) {
    constexpr int64_t W = kWidth<T>, wide = kStripe * W;
    int64_t c = 0;
    for (; c + wide <= width; c += wide) body(c, Count<kStripe>{}, W);
    for (; c < width; c += W) body(c, Count<1>{}, min64(W, width - c));
}

// y += sum_i weight_i row_i
template <class T>
LATTE_INLINE void add_rows(T* y, const T* row, int64_t stride, const T* weight, int64_t rows, int64_t width) {
    each_stripe<T>(width, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
        constexpr int n = decltype(vectors)::value, W = kWidth<T>;
        Vec<T> sum[n];
        for (int j = 0; j < n; ++j) sum[j] = load_some(y + c + j * W, lanes, T(0));
        for (int64_t i = 0; i < rows; ++i) {
            const Vec<T> w = splat(weight[i]);
            for (int j = 0; j < n; ++j) sum[j] = load_some(row + i * stride + c + j * W, lanes, T(0)) * w + sum[j];
        }
        for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
    });
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

    // Softmax attention of one head, and the log of its normaliser; `scores` has room for ring, present and sinks.
    T attend(const T* q, const T* sunk, const T* key, int64_t group, T* scores, T* y) const {
        const int64_t held = g.R == 0 ? 0 : min64(count, g.R), sinks = max64(0, min64(g.N, count - g.R));
        // The ring's tokens, oldest first, lie in two runs of slots.
        const int64_t first = held ? (count - held) % g.S : 0, until_end = min64(held, g.S - first);
        const T* ring = (const T*)g.ring_k0 + (b * g.S * g.G + group) * g.K;
        const T* sink = (const T*)g.sink_k0 + (b * g.N * g.G + group) * g.K;
        int64_t n = 0;
        for (int64_t i = first; i < first + until_end; ++i) scores[n++] = dot(q, ring + i * g.G * g.K, g.K);
        for (int64_t i = 0; i < held - until_end; ++i) scores[n++] = dot(q, ring + i * g.G * g.K, g.K);
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
        for (int64_t i = 0; i < n; ++i) scores[i] *= share;
        const T *value = (const T*)g.ring_v0 + (b * g.S * g.G + group) * g.V, *present = (const T*)g.v + b * g.vb + group * g.V;
        const T* sink_value = (const T*)g.sink_v0 + (b * g.N * g.G + group) * g.V;
        memset(y, 0, size_t(g.V) * sizeof(T));
        add_rows(y, value + first * g.G * g.V, g.G * g.V, scores, until_end, g.V);
        add_rows(y, value, g.G * g.V, scores + until_end, held - until_end, g.V);
        add_rows(y, present, 0, scores + held, 1, g.V);
        add_rows(y, sink_value, g.G * g.V, scores + held + 1, sinks, g.V);
        return top + T(::log(double(total)));
    }

    // Softmax over the slots of a head, the bias of slot 0 and what the window says added.
    void weigh(int64_t h, T* p, T said) const {
        const int64_t slots = g.M + (g.windowed ? 1 : 0);
        memcpy(p, (const T*)g.slots + b * g.slotsb + h * slots, size_t(slots) * sizeof(T));
        if (g.bias) p[0] += ((const T*)g.bias)[h];
        p[0] += said;
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

    // The log-normalisers of a few latents moved on by one token, and the share that its value has of each mean. Differences are
    // taken in double precision; what is left of them after exp is a number that T's precision is enough for.
    void move_on(const T* k, int64_t at, int64_t n, T* shares) const {
        constexpr int W = kWidth<T>, L = kWidth<double>;
        double high[W] = {}, after[W];
        T x[W] = {};
        for (int64_t i = 0; i < n; ++i) {
            const double before = fresh ? kEmpty : g.log_norm0[at + i], now = double(k[i]);
            high[i] = before > now ? before : now;
            x[i] = T((before > now ? now : before) - high[i]);
        }
        store(x, vexp(load(x)));
        for (int64_t i = 0; i < W; i += L) {
            Vec<double> more;
            for (int j = 0; j < L; ++j) more[j] = double(x[i + j]);
            store(after + i, load(high + i) + vlog1p(more));
        }
        for (int64_t i = 0; i < n; ++i) g.log_norm1[at + i] = after[i], x[i] = T(double(k[i]) - after[i]);
        store_some(shares, vexp(load(x)), n);
    }

    // Move the latents of a head on by one token and add what they say to y; `shares` has room for each latent.
    void read_latents(int64_t h, const T* p, T* shares, T* y) const {
        const int64_t at = (b * g.H + h) * g.M, M = g.M, V = g.V;
        const T *v = (const T*)g.v + b * g.vb + h / (g.H / g.G) * g.V, *k_latent = (const T*)g.k_latent + b * g.klb + h * g.M;
        for (int64_t l = 0; l < M; l += kWidth<T>) move_on(k_latent + l, at + l, min64(kWidth<T>, M - l), shares + l);
        const T* from = (const T*)g.mean0 + at * V;
        T* to = (T*)g.mean1 + at * V;
        const bool forgets = fresh;
        each_stripe<T>(V, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
            constexpr int n = decltype(vectors)::value, W = kWidth<T>;
            Vec<T> sum[n];
            for (int j = 0; j < n; ++j) sum[j] = load_some(y + c + j * W, lanes, T(0));
            for (int64_t l = 0; l < M; ++l) {
                const Vec<T> share = splat(shares[l]), weight = splat(p[l]);
                for (int j = 0; j < n; ++j) {
                    const int64_t i = c + j * W;
                    const Vec<T> old = forgets ? Vec<T>{} : load_some(from + l * V + i, lanes, T(0));
                    const Vec<T> now = old + share * (load_some(v + i, lanes, T(0)) - old);
                    store_some(to + l * V + i, now, lanes);
                    sum[j] = weight * now + sum[j];
                }
            }
            for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
        });
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
        for (int64_t i = 0; i < slots; ++i) copy_past_cache(to + i * stride, i == place ? now : from + i * stride, width);
    }
};

// All of one key-value head of one row: a unit of work. The rotary angles of a row are kept from unit to unit.
template <class T>
class Mixing {
  public:
    explicit Mixing(const Decode& g)
        : g_(g),
          mem_(4 * room(g.K / 2, 8) + 2 * room(slots(), sizeof(T)) + room(g.R + g.N + 1, sizeof(T)) + 3 * room(g.K, sizeof(T)) + room(g.V, sizeof(T))),
          near_(mem_.take<double>(g.K / 2)),
          near_s_(mem_.take<double>(g.K / 2)),
          far_(mem_.take<double>(g.K / 2)),
          far_s_(mem_.take<double>(g.K / 2)),
          p_(mem_.take<T>(slots())),
          shares_(mem_.take<T>(slots())),
          scores_(mem_.take<T>(g.R + g.N + 1)),
          q_(mem_.take<T>(g.K)),
          sunk_(mem_.take<T>(g.K)),
          key_(mem_.take<T>(g.K)),
          seen_(mem_.take<T>(g.V)) {}

    // The unit's token `later` tokens behind the counts in g.
    void operator()(int64_t unit, int64_t later = 0) {
        const int64_t b = unit / g_.G, group = unit % g_.G, shared = g_.H / g_.G;
        const bool real = !g_.mask || g_.mask[b], fresh = g_.reset && g_.reset[b];
        const int64_t count = fresh || !g_.windowed ? 0 : g_.count0[b] + later;
        const Row<T> row{g_, b, count, fresh};
        if (g_.windowed && g_.rope && (turned_ != b || turned_at_ != count)) turn(b, count);
        const double *c = g_.rope ? near_ : nullptr, *cf = g_.rope ? far_ : nullptr;
        if (g_.windowed) rotated(key_, (const T*)g_.k + b * g_.kb + group * g_.K, c, near_s_, g_.K);
        for (int64_t h = group * shared; h < (group + 1) * shared; ++h) {
            T* y = (T*)g_.y + (b * g_.H + h) * g_.V;
            memset(y, 0, size_t(g_.V) * sizeof(T));
            if (!real) {
                row.keep_latents(h);
                continue;
            }
            T said = 0;
            if (g_.windowed) {
                const T* raw = (const T*)g_.q + b * g_.qb + h * g_.K;
                rotated(q_, raw, c, near_s_, g_.K);
                if (g_.N) rotated(sunk_, raw, cf, far_s_, g_.K);
                const T log_norm = row.attend(q_, sunk_, key_, group, scores_, seen_);
                if (g_.coupled) said = log_norm;
            }
            row.weigh(h, p_, said);
            if (g_.windowed) add_scaled(y, seen_, p_[0], g_.V);
            row.read_latents(h, p_ + (g_.windowed ? 1 : 0), shares_, y);
        }
        if (g_.windowed) keep_window(b, group, count, real);
    }

  private:
    int64_t slots() const { return g_.M + (g_.windowed ? 1 : 0); }

    void turn(int64_t b, int64_t count) {
        const int64_t sunken = min64(count, g_.N + g_.R);
        for (int64_t i = 0; i < g_.K / 2; ++i) {
            const double speed = ((const double*)g_.speeds)[i], here = angle(count, speed), there = angle(sunken, speed);
            near_[i] = g_.stretch * ::cos(here), near_s_[i] = g_.stretch * ::sin(here);
            if (g_.N) far_[i] = g_.stretch * ::cos(there), far_s_[i] = g_.stretch * ::sin(there);
        }
        turned_ = b, turned_at_ = count;
    }

    // A pretrained model knows the places it was made for by rounded angles.
    double angle(int64_t place, double speed) const {
        return place < g_.exact_from ? double(float(place) * float(speed)) : double(place) * speed;
    }

    void keep_window(int64_t b, int64_t group, int64_t count, bool real) const {
        const int64_t place = real && g_.S ? count % g_.S : -1, sink = real && count < g_.N ? count : -1;
        const T* value = (const T*)g_.v + b * g_.vb + group * g_.V;
        const int64_t ring = (b * g_.S * g_.G + group), sinks = (b * g_.N * g_.G + group), key_step = g_.G * g_.K, value_step = g_.G * g_.V;
        T *keys = (T*)g_.ring_k1 + ring * g_.K, *values = (T*)g_.ring_v1 + ring * g_.V;
        if (g_.S > g_.R) {
            if (place >= 0) copy_row(keys + place * key_step, key_, g_.K), copy_row(values + place * value_step, value, g_.V);
        } else {
            Row<T>::copy_ring(keys, (const T*)g_.ring_k0 + ring * g_.K, key_, place, g_.R, key_step, g_.K);
            Row<T>::copy_ring(values, (const T*)g_.ring_v0 + ring * g_.V, value, place, g_.R, value_step, g_.V);
        }
        Row<T>::copy_ring((T*)g_.sink_k1 + sinks * g_.K, (const T*)g_.sink_k0 + sinks * g_.K, key_, sink, g_.N, key_step, g_.K);
        Row<T>::copy_ring((T*)g_.sink_v1 + sinks * g_.V, (const T*)g_.sink_v0 + sinks * g_.V, value, sink, g_.N, value_step, g_.V);
        settle_past_cache();
        if (group == 0) g_.count1[b] = count + (real ? 1 : 0);
    }

    const Decode& g_;
    Scratch mem_;
    double *near_, *near_s_, *far_, *far_s_;  // cosines and sines of the token's place, and of where sinks are looked at from
    T *p_, *shares_, *scores_, *q_, *sunk_, *key_, *seen_;
    int64_t turned_ = -1, turned_at_ = -1;  // the row and place that the angles are of
};

LATTE_END
