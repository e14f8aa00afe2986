// Stages that work on each channel, or on each head, of a row by itself.
#pragma once
#include "rows.h"
#include "stages_rows.h"

LATTE_BEGIN

template <class T>
class Stage<stage::Map, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Map& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const T *x = s_.x < 0 ? nullptr : this->f_.at(s_.x) + r * s_.width, *bias = (const T*)s_.bias, *weight = (const T*)s_.weight;
        T* y = this->f_.at(s_.y) + r * s_.width;
        const int64_t act = s_.act;
        each_vector<T>(s_.width, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
            Vec<T> v = x ? load_some(x + c, k, T(0)) : Vec<T>{};
            if (weight) v = v * load_some(weight + c, k, T(0));
            if (bias) v = v + load_some(bias + c, k, T(0));
            store_some(y + c, activated<T>(act, v), k);
        });
    }

  private:
    const stage::Map& s_;
};

template <class T>
class Stage<stage::Gate, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Gate& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const T *x = this->f_.at(s_.x) + r * s_.width, *gate = s_.gate < 0 ? nullptr : this->f_.at(s_.gate) + r * s_.width, *weight = (const T*)s_.weight;
        T* y = this->f_.at(s_.y) + r * s_.width;
        const bool added = s_.added;
        each_vector<T>(s_.width, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
            Vec<T> v = load_some(x + c, k, T(0));
            if (gate) v = v * load_some(gate + c, k, T(0));
            if (weight) v = v * load_some(weight + c, k, T(0));
            store_some(y + c, added ? v + load_some(y + c, k, T(0)) : v, k);
        });
    }

  private:
    const stage::Gate& s_;
};

template <class T>
class Stage<stage::Lerp, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Lerp& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const int64_t at = r * s_.width;
        const T *x = this->f_.at(s_.x) + at, *to = this->f_.at(s_.to) + at, *share = s_.share < 0 ? nullptr : this->f_.at(s_.share) + at, *weight = (const T*)s_.weight;
        T* y = this->f_.at(s_.y) + at;
        each_vector<T>(s_.width, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
            Vec<T> part = weight ? load_some(weight + c, k, T(0)) : Vec<T>{};
            if (share) part = part + load_some(share + c, k, T(0));
            const Vec<T> from = load_some(x + c, k, T(0));
            store_some(y + c, from + part * (load_some(to + c, k, T(0)) - from), k);
        });
    }

  private:
    const stage::Lerp& s_;
};

// A block of a row is a piece.
template <class T>
class Stage<stage::Blocks, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Blocks& s) : f_(f), s_(s), mem_(room(s.format ? s.outputs : 0, sizeof(T))), row_(mem_.take<T>(s.format ? s.outputs : 0)) {}
    int64_t pieces() const override { return f_.rows * s_.blocks; }
    void run(int64_t piece) override {
        const int64_t N = s_.inputs, M = s_.outputs, i = piece / f_.rows, at = piece % f_.rows * s_.blocks + i, bytes = row_bytes(s_.format, M, sizeof(T));
        const char* w = (const char*)s_.weight + (s_.shared ? 0 : s_.across ? i * N * bytes : i * N * M * int64_t(sizeof(T)));
        const T* x = f_.at(s_.x) + at * N;
        T* y = f_.at(s_.y) + at * M;
        if (s_.across) {
            memset(y, 0, size_t(M) * sizeof(T));
            if (s_.format == kFloats)
                add_rows(y, (const T*)w, M, x, N, M);
            else
                for (int64_t j = 0; j < N; ++j) read_row(s_.format, w + j * bytes, (float*)row_, M), add_scaled(y, (const T*)row_, x[j], M);
        } else
            for (int64_t j = 0; j < M; ++j) y[j] = dot((const T*)w + j * N, x, N);
    }

  private:
    const Frame<T>& f_;
    const stage::Blocks& s_;
    Scratch mem_;
    T* row_;  // only in single precision
};

template <class T>
class Stage<stage::Features, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Features& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const int64_t K = s_.width, widths[] = {K, 2 * K, 1 + K + K * (K + 1) / 2, K, K, K + 1, K + 1};
        const T read = T(this->f_.place(r / this->f_.g.B, r % this->f_.g.B) + 1);
        for (int64_t h = 0; h < s_.heads; ++h) {
            const T* x = this->f_.at(s_.x) + (r * s_.groups + h * s_.groups / s_.heads) * K;
            T* y = this->f_.at(s_.y) + (r * s_.heads + h) * widths[s_.kind];
            switch (s_.kind) {
                case 0:
                    for (int64_t i = 0; i < K; ++i) y[i] = (x[i] > 0 ? x[i] + 1 : T(::exp(double(x[i])))) + T(s_.floor);
                    break;
                case 1: softmax(y, x, T(1)), softmax(y + K, x, T(-1)); break;
                case 2: second_order(y, x); break;
                case 3:
                    for (int64_t i = 0; i < K; ++i) y[i] = (x[i] > 0 ? x[i] : T(0)) + T(s_.floor);
                    break;
                case 4:
                    softmax(y, x, 1 / read);
                    for (int64_t i = 0; i < K; ++i) y[i] /= read;
                    break;
                default: squares(y, x, h);
            }
        }
    }

  private:
    void softmax(T* y, const T* x, T scale) const {
        T top = T(-INFINITY);
        for (int64_t i = 0; i < s_.width; ++i) y[i] = scale * x[i], top = y[i] > top ? y[i] : top;
        const T total = exponentials(y, s_.width, top);
        for (int64_t i = 0; i < s_.width; ++i) y[i] = y[i] / total + T(s_.floor);
    }
    void squares(T* y, const T* x, int64_t h) const {
        const int64_t K = s_.width;
        const double constant = double(((const T*)s_.constant)[h]);
        double size = 0, factor = s_.scale ? double(((const T*)s_.scale)[h]) / ::sqrt(2.0 * double(K)) : 1.0;
        if (!s_.scale) {
            for (int64_t i = 0; i < K; ++i) size += double(x[i]) * double(x[i]) * double(x[i]) * double(x[i]);
            factor = size > 0 ? 1 / ::sqrt(size) : 0.0;
        }
        for (int64_t i = 0; i < K; ++i) y[i] = T(factor * double(x[i]) * double(x[i]));
        y[K] = T(s_.scale ? ::sqrt(0.5 * (1 + constant * constant)) : ::sqrt(constant * constant + s_.floor));
    }
    void second_order(T* y, const T* x) const {
        const int64_t K = s_.width;
        const T scale = T(1 / ::sqrt(::sqrt(double(K)))), half = T(::sqrt(0.5));
        y[0] = 1;
        for (int64_t i = 0; i < K; ++i) y[1 + i] = scale * x[i];
        T* pair = y + 1 + K;
        // A pair i < j stands for two.
        for (int64_t i = 0; i < K; ++i)
            for (int64_t j = i; j < K; ++j) *pair++ = y[1 + i] * y[1 + j] * (i == j ? half : T(1));
    }
    const stage::Features& s_;
};

template <class T>
class Stage<stage::Energy, T> : public RowTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Energy& s) : RowTask<T>(f), s_(s) {}

  protected:
    void row(int64_t r) override {
        const int64_t K = s_.width;
        const T floor = T(s_.floor), range = T(s_.range);
        for (int64_t h = 0; h < s_.heads; ++h) {
            const int64_t at = (r * s_.heads + h) * K;
            const T *x = this->f_.at(s_.x), *choice = s_.choice < 0 ? nullptr : this->f_.at(s_.choice) + at, *weight = (const T*)s_.weight + h * K;
            T* y = this->f_.at(s_.y);
            each_vector<T>(K, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
                const Vec<T> beta = activated<T>(kSoftplus, load_some(weight + c, k, T(0))) + splat(floor), v = load_some(x + (choice ? 2 : 1) * at + c, k, T(0));
                if (!choice) {
                    store_some(y + 2 * at + c, v, k);
                    store_some(y + 2 * at + K + c, vexp(vmax<T>(splat(-range), vmin<T>(beta * v, splat(range)))), k);
                    return;
                }
                Vec<T> most = load_some(x + 2 * at + K + c, k, T(1));
                for (int i = 0; i < kWidth<T>; ++i) most[i] = T(::log(double(most[i])));
                store_some(y + at + c, v + load_some(choice + c, k, T(0)) * (most / beta - v), k);
            });
        }
    }

  private:
    const stage::Energy& s_;
};

LATTE_END
