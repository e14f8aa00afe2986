// Stages that carry channels from token to token: convolution and RG-LRU.
#pragma once
#include "cell.h"
#include "product.h"
#include "stage.h"

LATTE_BEGIN

// A row of the batch through all its tokens is a piece.
template <class T>
class Stage<stage::Conv, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Conv& s) : f_(f), s_(s) {}
    int64_t pieces() const override { return f_.g.B; }
    void run(int64_t b) override {
        const int64_t D = s_.width, n = s_.taps, m = s_.near_taps, C = s_.channels, kept = (n - 1) * C, act = s_.act;
        for (int64_t t = 0; t < f_.g.T; ++t) {
            const int64_t row = (t * f_.g.B + b) * D;
            const T *x = f_.at(s_.x) + row, *tap = (const T*)s_.weight, *near = (const T*)s_.near, *past = n > 1 ? f_.before(t, s_.tail) + b * kept + s_.first : nullptr;
            T *y = f_.at(s_.y) + row, *tail = n > 1 ? f_.after(t, s_.tail) + b * kept + s_.first : nullptr;
            // The tail first: y may stand in the place of x.
            for (int64_t j = 0; j < n - 1; ++j) copy_row(tail + j * C, j < n - 2 ? past + (j + 1) * C : x, D);
            for (int64_t c = 0; c < D; ++c, tap += n) {
                T sum = tap[n - 1] * x[c];
                for (int64_t j = 0; j < n - 1; ++j) sum += tap[j] * past[j * C + c];
                for (int64_t j = n - m; j < n; ++j) sum += near[c * m + j - (n - m)] * (j < n - 1 ? past[j * C + c] : x[c]);
                y[c] = s_.bias ? sum + ((const T*)s_.bias)[c] : sum;
            }
            if (act != kIdentity)
                each_vector<T>(D, [=](int64_t c, int64_t k) __attribute__((always_inline)) { store_some(y + c, activated<T>(act, load_some((const T*)y + c, k, T(0))), k); });
        }
    }

  private:
    const Frame<T>& f_;
    const stage::Conv& s_;
};

// A head of all rows is a piece: its gates' weights are read once.
template <class T>
class Stage<stage::Rglru, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Rglru& s)
        : f_(f), s_(s), mem_(3 * room(s.width, sizeof(T))), recurrence_(mem_.take<T>(s.width)), input_(mem_.take<T>(s.width)), rate_(mem_.take<T>(s.width)) {}
    int64_t pieces() const override { return s_.heads; }
    void run(int64_t h) override {
        const int64_t W = s_.width;
        for (int64_t c = 0; c < W; ++c) {
            const double decay = double(((const T*)s_.decay)[h * W + c]);
            rate_[c] = T(s_.power * (decay > 20 ? decay : ::log1p(::exp(decay))));
        }
        for (int64_t t = 0; t < f_.g.T; ++t)
            for (int64_t b = 0; b < f_.g.B; ++b) token(h, t, b);
    }

  private:
    void token(int64_t h, int64_t t, int64_t b) {
        const int64_t W = s_.width, D = s_.heads * W, at = b * D + h * W, row = t * f_.g.B * D + at;
        const T *x = f_.at(s_.x) + row, *before = f_.before(t, s_.h) + at;
        T *y = f_.at(s_.y) + row, *after = f_.after(t, s_.h) + at, *gate[2] = {recurrence_, input_};
        const bool first = f_.place(t, b) == 0;
        for (int k = 0; k < 2; ++k) {
            const T* w = (const T*)s_.weight + (k * s_.heads + h) * W * W;
            memcpy(gate[k], (const T*)s_.bias + (k * s_.heads + h) * W, size_t(W) * sizeof(T));
            for (int64_t i = 0; i < W; ++i)
                for (int64_t c = 0; c < W; ++c) gate[k][c] += x[i] * w[i * W + c];
        }
        const T *recurrence = recurrence_, *input = input_, *rate = rate_;
        each_vector<T>(W, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
            const Cell<T> cell(load_some(recurrence + c, k, T(0)), load_some(input + c, k, T(0)), load_some(rate + c, k, T(0)), first);
            const Vec<T> now = cell.a * load_some(before + c, k, T(0)) + cell.m * cell.i * load_some(x + c, k, T(0));
            store_some(y + c, now, k), store_some(after + c, now, k);
        });
    }

    const Frame<T>& f_;
    const stage::Rglru& s_;
    Scratch mem_;
    T *recurrence_, *input_, *rate_;
};

LATTE_END
