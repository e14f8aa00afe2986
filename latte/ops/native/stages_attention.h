// Softmax attention of one token to the keys and values of those before it, in a ring or in memory that grows.
//
// A long row is cut in parts of keys, so that threads share it and GQA heads read a key once. Where the cuts are depends on the
// token's place alone: what a row gives is bit by bit the same whatever the batch, the threads and the tokens of a call.
#pragma once
#include "product.h"
#include "rows.h"
#include "stage.h"

LATTE_BEGIN

constexpr int64_t kKeys = 256, kMostParts = 32;  // keys of a part at least; parts of a row at most
constexpr int64_t kKeysAtOnce = 64;              // scores that are in hand before values are added

// The keys that a token sees, counted from the document's start.
struct Reach {
    int64_t first, keys, size, parts;  // parts of `size` keys
    Reach(int64_t place, int64_t window, int64_t chunked) {
        keys = 1 + (chunked ? place % (window + 1) : window < 0 ? place : min64(place, window));
        first = place + 1 - keys;
        size = max64(kKeys, round_up((keys + kMostParts - 1) / kMostParts, kKeys));
        parts = (keys + size - 1) / size;
    }
};

// The most parts of any row of a call.
template <class T>
int64_t most_parts(const Frame<T>& f, int64_t window, int64_t chunked) {
    int64_t most = 1;
    for (int64_t b = 0; b < f.g.B; ++b)
        for (int64_t t = 0; t < f.g.T; ++t) most = max64(most, Reach(f.place(t, b), window, chunked).parts);
    return most;
}

// angles: half cosines and half sines, or null.
template <class T>
LATTE_INLINE void turned(T* to, const T* from, const T* angles, int64_t K) {
    if (!angles) {
        memcpy(to, from, size_t(K) * sizeof(T));
        return;
    }
    const int64_t half = K / 2;
    for (int64_t i = 0; i < half; ++i) {
        const T c = angles[i], s = angles[half + i], x = from[i], y = from[i + half];
        to[i] = x * c - y * s, to[i + half] = y * c + x * s;
    }
}

// A query or key with `behind` put behind it, that alone turned; without, as above. What is given has own_width channels.
LATTE_INLINE int64_t own_width(int64_t K, const void* behind) { return behind ? K / 2 : K; }
template <class T>
LATTE_INLINE void placed(T* to, const T* from, const void* behind, const T* angles, int64_t K) {
    const int64_t first = K - own_width(K, behind);
    copy_row(to, from, first);
    turned(to + first, behind ? (const T*)behind : from, angles, K - first);
}

// A pretrained model knows the places it was made for by rounded angles.
LATTE_INLINE double place_angle(int64_t place, double speed, int64_t rounded) {
    return place < rounded ? double(float(place) * float(speed)) : double(place) * speed;
}

template <class T>
class Stage<stage::Angles, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Angles& s) : f_(f), s_(s) {}
    int64_t pieces() const override { return f_.rows; }
    void run(int64_t r) override {
        const int64_t half = s_.half, place = min64(f_.place(r / f_.g.B, r % f_.g.B), s_.nearest);
        T* y = f_.at(s_.y) + r * 2 * half;
        for (int64_t i = 0; i < half; ++i) {
            const double angle = place_angle(place, ((const double*)s_.speeds)[i], s_.rounded);
            y[i] = T(s_.stretch * ::cos(angle)), y[half + i] = T(s_.stretch * ::sin(angle));
        }
    }

  private:
    const Frame<T>& f_;
    const stage::Angles& s_;
};

template <class T>
class Stage<stage::Turn, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Turn& s) : f_(f), s_(s), mem_(room(s.turned, sizeof(T))), raw_(mem_.take<T>(s.turned)) {}
    int64_t pieces() const override { return f_.rows; }
    void run(int64_t r) override {
        const int64_t K = s_.width;
        for (int64_t h = 0; h < s_.heads; ++h) {
            T* x = f_.at(s_.x) + (r * s_.heads + h) * K;
            memcpy(raw_, x, size_t(s_.turned) * sizeof(T));
            turned(x, raw_, f_.at(s_.angles) + r * s_.turned, s_.turned);
        }
    }

  private:
    const Frame<T>& f_;
    const stage::Turn& s_;
    Scratch mem_;
    T* raw_;
};

// A key-value head of a row is a piece.
template <class T>
class Stage<stage::Keep, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Keep& s) : f_(f), s_(s) {}
    int64_t pieces() const override { return f_.rows; }
    void run(int64_t r) override {
        const Memory& m = f_.memory(s_.memory);
        const int64_t b = r % f_.g.B, place = f_.place(r / f_.g.B, b), K = s_.key_width, V = s_.value_width, own = own_width(K, s_.behind);
        const T* angles = s_.angles < 0 ? nullptr : f_.at(s_.angles) + r * own;
        for (int64_t g = 0; g < s_.groups; ++g) {
            const int64_t head = b * s_.groups + g, slot = head * m.slots + place % m.slots, sink = head * m.sinks + place;
            const T* value = f_.at(s_.v) + (r * s_.groups + g) * V;
            T* key = (T*)m.keys + slot * K;
            placed(key, f_.at(s_.k) + (r * s_.groups + g) * own, s_.behind, angles, K);
            copy_row((T*)m.values + slot * V, value, V);
            if (place < m.sinks) copy_row((T*)m.sink_keys + sink * K, key, K), copy_row((T*)m.sink_values + sink * V, value, V);
        }
    }

  private:
    const Frame<T>& f_;
    const stage::Keep& s_;
};

// A part of the keys of a key-value head of a row is a piece.
template <class T>
class Stage<stage::Attend, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Attend& s)
        : f_(f), s_(s), parts_(most_parts(f, s.window, s.chunked)), shared_(s.heads / s.groups),
          mem_(2 * room(shared_ * s.key_width, sizeof(T)) + room(shared_ * s.value_width, sizeof(T)) + room(kKeysAtOnce + kOut<T>, sizeof(T)) + 2 * room(shared_, sizeof(T))),
          q_(mem_.take<T>(shared_ * s.key_width)), sunk_(mem_.take<T>(shared_ * s.key_width)), sum_(mem_.take<T>(shared_ * s.value_width)),
          scores_(mem_.take<T>(kKeysAtOnce + kOut<T>)), top_(mem_.take<T>(shared_)), total_(mem_.take<T>(shared_)) {}
    int64_t pieces() const override { return f_.rows * s_.groups * parts_; }

    void run(int64_t piece) override {
        const int64_t part = piece % parts_, g = piece / parts_ % s_.groups, r = piece / parts_ / s_.groups, b = r % f_.g.B;
        const int64_t K = s_.key_width, V = s_.value_width, place = f_.place(r / f_.g.B, b);
        const Reach reach(place, s_.window, s_.chunked);
        if (part >= reach.parts) return;
        const Memory& m = f_.memory(s_.memory);
        const int64_t head = b * s_.groups + g;
        begin(r, g, part, reach.keys);
        const T *keys = (const T*)m.keys + head * m.slots * K, *values = (const T*)m.values + head * m.slots * V;
        const int64_t until = min64(reach.keys, (part + 1) * reach.size) + reach.first;
        for (int64_t t = part * reach.size + reach.first; t < until;) {
            const int64_t slot = t % m.slots, n = min64(min64(kKeysAtOnce, until - t), m.slots - slot);
            look(q_, keys + slot * K, values + slot * V, n);
            t += n;
        }
        if (part == 0)  // sinks that the window has left behind
            for (int64_t t = 0, n; t < min64(m.sinks, reach.first); t += n) {
                n = min64(kKeysAtOnce, min64(m.sinks, reach.first) - t);
                look(sunk_, (const T*)m.sink_keys + (head * m.sinks + t) * K, (const T*)m.sink_values + (head * m.sinks + t) * V, n);
            }
        for (int64_t j = 0; j < shared_; ++j) end(r, g * shared_ + j, j, part, reach.parts);
    }

  private:
    void begin(int64_t r, int64_t g, int64_t part, int64_t keys) {
        const int64_t K = s_.key_width, V = s_.value_width, own = own_width(K, s_.behind);
        const T *angles = s_.angles < 0 ? nullptr : f_.at(s_.angles) + r * own, *far = s_.sink_angles < 0 ? nullptr : f_.at(s_.sink_angles) + r * own;
        for (int64_t j = 0; j < shared_; ++j) {
            const T* q = f_.at(s_.q) + (r * s_.heads + g * shared_ + j) * own;
            placed(q_ + j * K, q, s_.behind, angles, K);
            placed(sunk_ + j * K, q, s_.behind, far, K);
            for (int64_t i = 0; s_.laplace && i < own; ++i) q_[j * K + i] /= T(keys);
            // The sums of a row's parts are divided by the sum of their totals: by 1 if nothing is normalised.
            top_[j] = s_.laplace ? T(0) : T(-INFINITY), total_[j] = s_.laplace && part == 0;
        }
        memset(sum_, 0, size_t(shared_ * V) * sizeof(T));
    }

    // n keys and their values, which lie in a row; the sums are relative to the largest score so far.
    void look(const T* q, const T* keys, const T* values, int64_t n) {
        const int64_t K = s_.key_width, V = s_.value_width;
        for (int64_t j = 0; j < shared_; ++j) {
            for (int64_t i = 0; i < n; i += kAtOnce) dots(keys + i * K, K, q + j * K, K, scores_ + i, min64(kAtOnce, n - i));
            if (s_.laplace)
                for (int64_t i = 0; i < n; ++i) scores_[i] = T(0.5 * ::erfc((::sqrt(0.5) - s_.scale * double(scores_[i])) * ::sqrt(6.283185307179586)));
            else
                exponents(j, n);
            add_rows(sum_ + j * V, values, V, scores_, n, V);
        }
    }

    // n scores become weights of a softmax.
    void exponents(int64_t j, int64_t n) {
        const int64_t V = s_.value_width;
        T top = top_[j];
        for (int64_t i = 0; i < n; ++i) {
            T score = scores_[i] * T(s_.scale);
            if (s_.softcap != 0) score = T(s_.softcap) * T(::tanh(double(score / T(s_.softcap))));
            scores_[i] = score;
            top = score > top ? score : top;
        }
        if (top > top_[j]) {
            const T factor = T(::exp(double(top_[j] - top)));
            total_[j] *= factor, top_[j] = top;
            for (int64_t c = 0; c < V; ++c) sum_[j * V + c] *= factor;
        }
        total_[j] += exponentials(scores_, n, top);
    }

    void end(int64_t r, int64_t h, int64_t j, int64_t part, int64_t parts) {
        const int64_t V = s_.value_width, at = r * s_.heads + h;
        const T* sum = sum_ + j * V;
        if (parts > 1) {
            T* to = f_.partial + (at * kMostParts + part) * (V + 2);
            to[0] = top_[j], to[1] = total_[j];
            memcpy(to + 2, sum, size_t(V) * sizeof(T));
            return;
        }
        T *y = f_.at(s_.y) + at * V, share = 1 / total_[j];
        for (int64_t c = 0; c < V; ++c) y[c] = sum[c] * share;
        if (s_.log_norm >= 0) f_.at(s_.log_norm)[at] = top_[j] + T(::log(double(total_[j])));
    }

    const Frame<T>& f_;
    const stage::Attend& s_;
    const int64_t parts_, shared_;
    Scratch mem_;
    T *q_, *sunk_, *sum_, *scores_, *top_, *total_;
};

template <class T>
class Stage<stage::Merge, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Merge& s) : f_(f), s_(s), pieces_(most_parts(f, s.window, s.chunked) > 1 ? f.rows * s.heads : 0) {}
    int64_t pieces() const override { return pieces_; }
    void run(int64_t at) override {
        const int64_t V = s_.value_width, r = at / s_.heads, parts = Reach(f_.place(r / f_.g.B, r % f_.g.B), s_.window, s_.chunked).parts;
        if (parts == 1) return;
        const T* part = f_.partial + at * kMostParts * (V + 2);
        T *y = f_.at(s_.y) + at * V, top = part[0], total = 0;
        for (int64_t i = 1; i < parts; ++i) top = part[i * (V + 2)] > top ? part[i * (V + 2)] : top;
        memset(y, 0, size_t(V) * sizeof(T));
        for (int64_t i = 0; i < parts; ++i) {
            const T* one = part + i * (V + 2);
            const T factor = T(::exp(double(one[0] - top)));
            total += factor * one[1];
            add_scaled(y, one + 2, factor, V);
        }
        const T share = 1 / total;
        for (int64_t c = 0; c < V; ++c) y[c] *= share;
        if (s_.log_norm >= 0) f_.at(s_.log_norm)[at] = top + T(::log(double(total)));
    }

  private:
    const Frame<T>& f_;
    const stage::Merge& s_;
    const int64_t pieces_;
};

LATTE_END
