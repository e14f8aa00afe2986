// The recurrence of ZeroS: sums of weights that cancel, in double precision.
#pragma once
#include "rows.h"
#include "stage.h"

LATTE_BEGIN

// to = kept from + key value^T and y = query^T to, for a matrix (rows, width).
LATTE_INLINE void fade_and_read(const double* from, double* to, double kept, const double* key, const double* value, const double* query, double* y, int64_t rows, int64_t width) {
    each_stripe<double>(width, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
        constexpr int n = decltype(vectors)::value, W = kWidth<double>;
        Vec<double> sum[n] = {}, v[n];
        for (int j = 0; j < n; ++j) v[j] = load_some(value + c + j * W, lanes, 0.0);
        for (int64_t i = 0; i < rows; ++i)
            for (int j = 0; j < n; ++j) {
                const int64_t at = i * width + c + j * W;
                const Vec<double> now = splat(kept) * load_some(from + at, lanes, 0.0) + splat(key[i]) * v[j];
                store_some(to + at, now, lanes);
                sum[j] = splat(query[i]) * now + sum[j];
            }
        for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
    });
}

// A head of a row through all tokens of the call is a piece.
template <class T>
class Stage<stage::ZeroSum, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::ZeroSum& s) : f_(f), s_(s), mem_(7 * room(s.width, sizeof(double))),
          query_(take(1)), key_(take(1)), values_(take(2)), soft_(take(1)), both_(take(2)) {}
    int64_t pieces() const override { return f_.g.B * s_.heads; }
    void run(int64_t piece) override {
        const int64_t b = piece / s_.heads, h = piece % s_.heads;
        for (int64_t t = 0; t < f_.g.T; ++t) token(t, b, h);
    }

  private:
    double* take(int64_t times) { return mem_.take<double>(times * s_.width); }

    void token(int64_t t, int64_t b, int64_t h) {
        const int64_t K = s_.width, own = b * s_.heads + h, row = t * f_.g.B + b, at = (row * s_.heads + h) * K;
        const double count = double(f_.place(t, b) + 1), fresh = 1 / count, kept = 1 - fresh, logit = score(t, own, h, at, count);
        const double before = f_.template before<double>(t, s_.log_norm)[own], sum = add_logs(before, logit);
        const double mean = kept * f_.template before<double>(t, s_.logits)[own] + fresh * logit;
        f_.template after<double>(t, s_.log_norm)[own] = sum, f_.template after<double>(t, s_.logits)[own] = mean;
        unit(query_, f_.at(s_.q) + at, 1.0), unit(key_, f_.at(s_.k) + at, ::exp(logit - sum));
        for (int64_t c = 0; c < K; ++c) values_[K + c] = double(f_.at(s_.v)[at + c]), values_[c] = logit * values_[K + c];
        move(t, s_.soft, own, ::exp(before - sum), values_ + K, soft_, K);
        unit(key_, f_.at(s_.k) + at, fresh);
        move(t, s_.plain, own, kept, values_, both_, 2 * K);
        const T* gates = f_.at(s_.gates) + row * 2 * s_.heads;
        const double first = double(gates[h]), high = double(gates[s_.heads + h]);
        T* y = f_.at(s_.y) + at;
        // The weights of a first token cancel: a norm would magnify what rounding leaves.
        for (int64_t c = 0; c < K; ++c) y[c] = count == 1 ? T(0) : T(high * (soft_[c] - both_[K + c]) + (first - high) * (both_[c] - mean * both_[K + c]));
    }

    void move(int64_t t, int64_t part, int64_t own, double kept, const double* values, double* y, int64_t width) {
        const int64_t at = own * s_.width * width;
        fade_and_read(f_.template before<double>(t, part) + at, f_.template after<double>(t, part) + at, kept, key_, values, query_, y, s_.width, width);
    }
    // s = -u . m / sqrt(width), with m the mean of u and of virtual copies of mu.
    double score(int64_t t, int64_t own, int64_t h, int64_t at, double count) {
        const int64_t K = s_.width;
        const T *u = f_.at(s_.u) + at, *from = f_.before(t, s_.direction) + own * K, *mu = (const T*)s_.mu + h * K;
        T* to = f_.after(t, s_.direction) + own * K;
        const double tau = double(((const T*)s_.tau)[h]), copies = ::exp(tau < 20 ? tau : 20.0);
        double sum = 0;
        for (int64_t c = 0; c < K; ++c) {
            to[c] = T((1 - 1 / count) * double(from[c]) + double(u[c]) / count);
            sum += double(u[c]) * (copies * double(mu[c]) + count * double(to[c])) / (copies + count);
        }
        return -sum / ::sqrt(double(K));
    }
    static double add_logs(double a, double b) { return (a > b ? a : b) + ::log1p(::exp(-::fabs(a - b))); }
    void unit(double* to, const T* x, double length) const {
        double sum = 0;
        for (int64_t c = 0; c < s_.width; ++c) sum += double(x[c]) * double(x[c]);
        const double norm = ::sqrt(sum), scale = length / (norm > s_.least ? norm : s_.least);
        for (int64_t c = 0; c < s_.width; ++c) to[c] = scale * double(x[c]);
    }

    const Frame<T>& f_;
    const stage::ZeroSum& s_;
    Scratch mem_;
    double *query_, *key_, *values_, *soft_, *both_;
};

LATTE_END
