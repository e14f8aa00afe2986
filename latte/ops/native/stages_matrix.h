// Stages of mechanisms whose heads remember a matrix.
#pragma once
#include "rows.h"
#include "stage.h"

LATTE_BEGIN

// A head of a row through all tokens of the call is a piece.
template <class T>
class Stage<stage::Decay, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Decay& s) : f_(f), s_(s), mem_(room(s.key_width, sizeof(T))), kept_(mem_.take<T>(s.key_width)) {}
    int64_t pieces() const override { return f_.g.B * s_.heads; }
    void run(int64_t piece) override {
        const int64_t b = piece / s_.heads, h = piece % s_.heads, K = s_.key_width, V = s_.value_width, at = (b * s_.heads + h) * K * V;
        for (int64_t t = 0; t < f_.g.T; ++t) {
            const int64_t head = (t * f_.g.B + b) * s_.heads + h;
            factors(head, h);
            const T *q = f_.at(s_.q) + head * K, *k = f_.at(s_.k) + head * K, *v = f_.at(s_.v) + head * V, *from = f_.before(t, s_.sum) + at, *kept = kept_;
            T *to = f_.after(t, s_.sum) + at, *y = f_.at(s_.y) + head * V;
            const T query_scale = T(s_.query_scale), key_scale = T(s_.key_scale);
            each_stripe<T>(V, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
                constexpr int n = decltype(vectors)::value, W = kWidth<T>;
                Vec<T> sum[n] = {}, value[n];
                for (int j = 0; j < n; ++j) value[j] = load_some(v + c + j * W, lanes, T(0));
                for (int64_t i = 0; i < K; ++i) {
                    const Vec<T> key = splat(k[i] * key_scale), query = splat(q[i] * query_scale), factor = splat(kept[i]);
                    for (int j = 0; j < n; ++j) {
                        const Vec<T> now = factor * load_some(from + i * V + c + j * W, lanes, T(0)) + key * value[j];
                        store_some(to + i * V + c + j * W, now, lanes);
                        sum[j] = query * now + sum[j];
                    }
                }
                for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
            });
        }
    }

  private:
    // What each key channel keeps.
    void factors(int64_t head, int64_t h) {
        const int64_t K = s_.key_width;
        const T* g = s_.g < 0 ? nullptr : f_.at(s_.g) + head * K;
        for (int64_t i = 0; i < K; ++i) {
            const double log_decay = g ? double(g[i]) * s_.decay_scale : s_.decay ? double(((const T*)s_.decay)[h]) : 0.0;
            kept_[i] = T(::exp(log_decay));
        }
    }
    const Frame<T>& f_;
    const stage::Decay& s_;
    Scratch mem_;
    T* kept_;
};

LATTE_END
