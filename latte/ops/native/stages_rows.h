// Stages that work on each row by itself: embedding, norms, products.
#pragma once
#include "norm.h"
#include "product.h"
#include "stage.h"

LATTE_BEGIN

constexpr int64_t kRowsAtOnce = 4;

// Rows in pieces of a few: `work` is called with each.
template <class T>
class RowTask : public Task<T> {
  public:
    explicit RowTask(const Frame<T>& f) : f_(f) {}
    int64_t pieces() const override { return (f_.rows + kRowsAtOnce - 1) / kRowsAtOnce; }
    void run(int64_t piece) override {
        for (int64_t r = piece * kRowsAtOnce; r < min64(f_.rows, (piece + 1) * kRowsAtOnce); ++r) row(r);
    }

  protected:
    virtual void row(int64_t r) = 0;
    const Frame<T>& f_;
};

template <class T>
class Stage<stage::Embed, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Embed& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const int64_t D = s_.width, place = this->f_.place(r / this->f_.g.B, r % this->f_.g.B);
        const int64_t id = ((const int64_t*)this->f_.g.input)[r];
        const T* position = s_.positions ? (const T*)s_.positions + place * D : nullptr;
        T *to = this->f_.at(s_.y) + r * D, scale = T(s_.scale);
        const char* from = (const char*)s_.table + id * row_bytes(s_.format, D, sizeof(T));
        if (s_.format == kFloats)
            memcpy(to, from, size_t(D) * sizeof(T));
        else
            read_row(s_.format, from, (float*)to, D);  // only in single precision
        for (int64_t c = 0; c < D; ++c) to[c] = scale * to[c] + (position ? position[c] : T(0));
    }

  private:
    const stage::Embed& s_;
};

template <class T>
class Stage<stage::Given, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Given& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        memcpy(this->f_.at(s_.y) + r * s_.width, (const T*)this->f_.g.input + r * s_.width, size_t(s_.width) * sizeof(T));
    }

  private:
    const stage::Given& s_;
};

template <class T>
class Stage<stage::Norm, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Norm& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const int64_t D = s_.width;
        for (int64_t g = 0, i = r * s_.groups; g < s_.groups; ++g, ++i) part(this->f_.at(s_.y) + i * D, this->f_.at(s_.x) + i * D, s_.own ? g * D : 0);
    }

  private:
    // `own`: where the weights of this part begin.
    void part(T* y, const T* x, int64_t own) const {
        const int64_t D = s_.width;
        T mean = 0;
        if (s_.centred) {
            double sum = 0;
            for (int64_t c = 0; c < D; ++c) sum += double(x[c]);
            mean = T(sum / double(D));
        }
        T inverse = s_.centred ? T(0) : inverse_rms(x, D, s_.eps);
        if (inverse == 0) inverse = inverse_deviation(x, mean);  // or squares overflow
        const T plus = T(s_.plus), *weight = s_.weight ? (const T*)s_.weight + own : nullptr, *bias = s_.bias ? (const T*)s_.bias + own : nullptr;
        const bool added = s_.added;
        each_vector<T>(D, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
            Vec<T> v = (load_some(x + c, k, T(0)) - splat(mean)) * splat(inverse);
            if (weight) v = v * (load_some(weight + c, k, T(0)) + splat(plus));
            if (bias) v = v + load_some(bias + c, k, T(0));
            if (added) v = v + load_some(y + c, k, T(0));
            store_some(y + c, v, k);
        });
    }
    T inverse_deviation(const T* x, T mean) const {
        double sum = 0;
        for (int64_t c = 0; c < s_.width; ++c) sum += double(x[c] - mean) * double(x[c] - mean);
        return T(1 / ::sqrt(sum / double(s_.width) + s_.eps));
    }
    const stage::Norm& s_;
};

template <class T>
class Stage<stage::Product, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Product& s)
        : p_{f.g.is_double, f.g.threads, f.rows, s.width, s.w2 ? 3 : s.w1 ? 2 : 1, s.act, s.gated, s.added, f.at(s.x), s.width,
             {{s.w0, s.bias0, s.rows0, s.format0, f.at(s.y0)}, {s.w1, s.bias1, s.rows1, s.format1, f.at(s.y1)}, {s.w2, s.bias2, s.rows2, s.format2, f.at(s.y2)}, {}}},
          rows_(p_) {}
    int64_t pieces() const override { return rows_.pieces(); }
    void run(int64_t piece) override { rows_(piece); }

  private:
    const Products p_;
    const Rows<T> rows_;
};

LATTE_END
