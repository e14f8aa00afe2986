// Tokens kept behind a window: one token looks at them, and the one that leaves its window may take the place of the worst.
#pragma once
#include "stages_attention.h"

LATTE_BEGIN

constexpr double kMostScore = 1e29;  // scores are bounded: an empty slot (kEmpty) is worse than every token

// A key-value head of a row through all tokens of the call is a piece.
template <class T>
class Stage<stage::Hold, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Hold& s)
        : f_(f), s_(s), shared_(s.heads / s.groups),
          mem_(2 * room(s.key_width, sizeof(T)) + room(s.value_width, sizeof(T)) + 2 * room(s.kept + kOut<T>, sizeof(T))),
          q_(mem_.take<T>(s.key_width)), distant_(mem_.take<T>(s.key_width)), mean_(mem_.take<T>(s.value_width)),
          logits_(mem_.take<T>(s.kept + kOut<T>)), others_(mem_.take<T>(s.kept + kOut<T>)) {}
    int64_t pieces() const override { return f_.g.B * s_.groups; }

    void run(int64_t piece) override {
        b_ = piece / s_.groups, g_ = piece % s_.groups;
        for (int64_t t = 0; t < f_.g.T; ++t) {
            const int64_t place = f_.place(t, b_);
            for (int64_t j = 0; j < shared_; ++j) look(t, place, g_ * shared_ + j);
            copy(t);
            take(t, place);
            if (s_.reach) turn_back(t, place);
        }
    }

  private:
    // The first number of this head in a part (B, slots, groups, width) of the state; slots are `groups` x width apart.
    template <class U>
    const U* before(int64_t t, int64_t part, int64_t slots, int64_t width) const {
        return f_.template before<U>(t, part) + (b_ * slots * s_.groups + g_) * width;
    }
    template <class U>
    U* after(int64_t t, int64_t part, int64_t slots, int64_t width) const {
        return f_.template after<U>(t, part) + (b_ * slots * s_.groups + g_) * width;
    }

    // One query's attention to the slots, put under one softmax with what the window gave it.
    void look(int64_t t, int64_t place, int64_t h) {
        const int64_t K = s_.key_width, V = s_.value_width, N = s_.kept, G = s_.groups, at = (t * f_.g.B + b_) * s_.heads + h;
        const int64_t* places = before<int64_t>(t, s_.places, N, 1);
        const T *scores = before<T>(t, s_.scores, N, 1), *keys = before<T>(t, s_.keys, N, K);
        const T weight = ((const T*)s_.weight)[g_];
        dots_of(q_, s_.angles, at, keys, logits_);
        const bool far = s_.reach && place > s_.reach;
        if (far) dots_of(distant_, s_.far_angles, at, keys, others_);
        T top = T(-INFINITY);
        for (int64_t i = 0; i < N; ++i) {
            const int64_t from = places[i * G];
            T logit = T(s_.scale) * (far && place - from > s_.reach ? others_[i] : logits_[i]);
            if (s_.softcap != 0) logit = T(s_.softcap) * T(::tanh(double(logit / T(s_.softcap))));
            logits_[i] = from < 0 ? T(-INFINITY) : logit + weight * scores[i * G];
            top = logits_[i] > top ? logits_[i] : top;
        }
        if (top == T(-INFINITY)) return;
        const T total = exponentials(logits_, N, top), norm = top + T(::log(double(total)));
        memset(mean_, 0, size_t(V) * sizeof(T));
        add_rows(mean_, before<T>(t, s_.values, N, V), G * V, logits_, N, V);
        T *y = f_.at(s_.y) + at * V, *log_norm = f_.at(s_.log_norm) + at;
        const T high = norm > *log_norm ? norm : *log_norm;
        const T both = high + T(::log(::exp(double(norm - high)) + ::exp(double(*log_norm - high))));
        const T mine = T(::exp(double(norm - both))) / total, others = T(::exp(double(*log_norm - both)));
        for (int64_t c = 0; c < V; ++c) y[c] = others * y[c] + mine * mean_[c];
        *log_norm = both;
    }

    void dots_of(T* q, int64_t angles, int64_t at, const T* keys, T* out) {
        const int64_t K = s_.key_width, apart = s_.groups * K;
        turned(q, f_.at(s_.q) + at * K, angles < 0 ? nullptr : f_.at(angles) + at / s_.heads * K, K);
        for (int64_t i = 0; i < s_.kept; i += kAtOnce) dots(keys + i * apart, apart, q, K, out + i, min64(kAtOnce, s_.kept - i));
    }

    // What does not change.
    void copy(int64_t t) {
        copy_part<int64_t>(t, s_.places, s_.kept, 1), copy_part<T>(t, s_.scores, s_.kept, 1), copy_part<T>(t, s_.ring, s_.window, 1);
        copy_part<T>(t, s_.keys, s_.kept, s_.key_width), copy_part<T>(t, s_.values, s_.kept, s_.value_width);
    }
    template <class U>
    void copy_part(int64_t t, int64_t part, int64_t slots, int64_t width) {
        const U* from = before<U>(t, part, slots, width);
        U* to = after<U>(t, part, slots, width);
        for (int64_t i = 0; i < slots; ++i, from += s_.groups * width, to += s_.groups * width) memcpy(to, from, size_t(width) * sizeof(U));
    }

    // How much the token is worth keeping: latte/layers/window.py.
    T score(int64_t t, int64_t place) const {
        const int64_t at = (t * f_.g.B + b_) * s_.groups + g_;
        const T recency = ((const T*)s_.recency)[g_];
        T found = f_.at(s_.score)[at] + T(place) / T(s_.unit) * recency;
        if (s_.life >= 0) {
            const T life = f_.at(s_.life)[at] + ((const T*)s_.life_bias)[g_];
            const T lasts = T(::exp(double(life > T(s_.longest) ? T(s_.longest) : life)) / (1 + s_.later * double(place)));
            const T lasting = ((const T*)s_.level)[g_] + recency * lasts;
            found = lasting > found || lasting != lasting ? lasting : found;
        }
        if (found != found) return T(-kMostScore);
        return found > T(kMostScore) ? T(kMostScore) : found < T(-kMostScore) ? T(-kMostScore) : found;
    }

    // The token that leaves the window takes the first empty slot, or that of the worst token if it is better; of the worst the latest.
    void take(int64_t t, int64_t place) {
        const int64_t K = s_.key_width, V = s_.value_width, N = s_.kept, G = s_.groups, leaves = place - s_.window;
        const T own = score(t, place);
        T leaving = own;
        if (s_.window) {
            T* ring = after<T>(t, s_.ring, s_.window, 1) + place % s_.window * G;
            leaving = *ring, *ring = own;
        }
        if (leaves < s_.sinks) return;
        int64_t* places = after<int64_t>(t, s_.places, N, 1);
        T* scores = after<T>(t, s_.scores, N, 1);
        int64_t worst = 0;
        for (int64_t i = 0; i < N && places[worst * G] >= 0; ++i) {
            const bool empty = places[i * G] < 0, same = scores[i * G] == scores[worst * G];
            if (empty || scores[i * G] < scores[worst * G] || (same && places[i * G] > places[worst * G])) worst = i;
        }
        if (places[worst * G] >= 0 && !(leaving > scores[worst * G])) return;
        places[worst * G] = leaves, scores[worst * G] = leaving;
        const Memory& m = f_.memory(s_.memory);
        const int64_t slot = (b_ * G + g_) * m.slots + leaves % m.slots;
        memcpy(after<T>(t, s_.keys, N, K) + worst * G * K, (const T*)m.keys + slot * K, size_t(K) * sizeof(T));
        memcpy(after<T>(t, s_.values, N, V) + worst * G * V, (const T*)m.values + slot * V, size_t(V) * sizeof(T));
    }

    // A key that is out of reach for the next query is stored as it is at place 0.
    void turn_back(int64_t t, int64_t place) {
        const int64_t K = s_.key_width, half = K / 2, N = s_.kept, G = s_.groups;
        const int64_t* places = after<int64_t>(t, s_.places, N, 1);
        for (int64_t i = 0; i < N; ++i) {
            const int64_t from = places[i * G];
            if (from < 0 || place - from != s_.reach) continue;
            T* key = after<T>(t, s_.keys, N, K) + i * G * K;
            for (int64_t c = 0; c < half; ++c) {
                const double angle = place_angle(from, ((const double*)s_.speeds)[c], s_.rounded);
                const T cosine = T(::cos(angle)), sine = T(::sin(angle)), x = key[c], y = key[c + half];
                key[c] = x * cosine + y * sine, key[c + half] = y * cosine - x * sine;
            }
            return;  // one token has this distance
        }
    }

    const Frame<T>& f_;
    const stage::Hold& s_;
    const int64_t shared_;
    Scratch mem_;
    T *q_, *distant_, *mean_, *logits_, *others_;
    int64_t b_ = 0, g_ = 0;
};

LATTE_END
