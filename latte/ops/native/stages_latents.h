// The latents of Latte: slots, normalisers and means of one token.
#pragma once
#include "log_sum.h"
#include "rows.h"
#include "stage.h"

LATTE_BEGIN

// A head of a row through all tokens of the call is a piece.
template <class T>
class Stage<stage::Latents, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Latents& s)
        : f_(f), s_(s), slots_(s.latents + (s.seen >= 0)), mem_(2 * room(slots_, sizeof(T))), p_(mem_.take<T>(slots_)), shares_(mem_.take<T>(slots_)) {}
    int64_t pieces() const override { return f_.g.B * s_.heads; }

    void run(int64_t piece) override {
        const int64_t b = piece / s_.heads, h = piece % s_.heads, V = s_.value_width, windowed = s_.seen >= 0;
        for (int64_t t = 0; t < f_.g.T; ++t) {
            const int64_t at = (t * f_.g.B + b) * s_.heads + h;
            T* y = f_.at(s_.y) + at * V;
            weigh(at, h);
            memset(y, 0, size_t(V) * sizeof(T));
            if (windowed) add_scaled(y, (const T*)f_.at(s_.seen) + at * V, p_[0], V);
            read(t, b, h, p_ + windowed, y);
        }
    }

  private:
    // Softmax over the slots of a head, the bias of slot 0 and what the window says added.
    void weigh(int64_t at, int64_t h) {
        memcpy(p_, f_.at(s_.slots) + at * slots_, size_t(slots_) * sizeof(T));
        if (s_.bias) p_[0] += ((const T*)s_.bias)[h];
        if (s_.window_norm >= 0) p_[0] += f_.at(s_.window_norm)[at];
        T top = p_[0];
        for (int64_t i = 1; i < slots_; ++i) top = p_[i] > top ? p_[i] : top;
        const T total = exponentials(p_, slots_, top);
        for (int64_t i = 0; i < slots_; ++i) p_[i] /= total;
    }

    // Move the latents of a head on by one token and add what they say to y.
    void read(int64_t t, int64_t b, int64_t h, const T* p, T* y) {
        const int64_t M = s_.latents, V = s_.value_width, at = (b * s_.heads + h) * M, row = t * f_.g.B + b;
        const T *v = f_.at(s_.v) + (row * s_.groups + h / (s_.heads / s_.groups)) * V, *k = f_.at(s_.k) + (row * s_.heads + h) * M;
        const T* rates = s_.rates < 0 ? nullptr : f_.at(s_.rates) + (row * s_.heads + h) * M;
        const double* sums = f_.template before<double>(t, s_.log_norm) + at;
        double* moved = f_.template after<double>(t, s_.log_norm) + at;
        for (int64_t l = 0; l < M; l += kWidth<T>) add_to_log_sums(sums + l, moved + l, k + l, rates ? rates + l : nullptr, min64(kWidth<T>, M - l), shares_ + l);
        const T *from = f_.before(t, s_.mean) + at * V, *shares = shares_;
        T* to = f_.after(t, s_.mean) + at * V;
        each_stripe<T>(V, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
            constexpr int n = decltype(vectors)::value, W = kWidth<T>;
            Vec<T> sum[n];
            for (int j = 0; j < n; ++j) sum[j] = load_some(y + c + j * W, lanes, T(0));
            for (int64_t l = 0; l < M; ++l) {
                const Vec<T> share = splat(shares[l]), weight = splat(p[l]);
                for (int j = 0; j < n; ++j) {
                    const int64_t i = c + j * W;
                    const Vec<T> old = load_some(from + l * V + i, lanes, T(0));
                    const Vec<T> now = old + share * (load_some(v + i, lanes, T(0)) - old);
                    store_some(to + l * V + i, now, lanes);
                    sum[j] = weight * now + sum[j];
                }
            }
            for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
        });
    }

    const Frame<T>& f_;
    const stage::Latents& s_;
    const int64_t slots_;
    Scratch mem_;
    T *p_, *shares_;
};

LATTE_END
