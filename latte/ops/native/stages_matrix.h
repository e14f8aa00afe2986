// Stages of mechanisms whose heads remember a matrix.
#pragma once
#include "norm.h"
#include "rows.h"
#include "stage.h"

LATTE_BEGIN

// A head of a row through all tokens of the call is a piece.
template <class T>
class Stage<stage::Matrix, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Matrix& s)
        : f_(f), s_(s), rows_(s.key_width + s.shift), columns_(s.value_width + (s.mean || s.shift)), mem_(5 * room(rows_, sizeof(T)) + 2 * room(columns_, sizeof(T))), query_(take()), key_(take()),
          kept_(take()), read_(take()), erased_(take()), value_(mem_.take<T>(columns_)), y_(mem_.take<T>(columns_)) {}
    int64_t pieces() const override { return f_.g.B * s_.heads; }
    void run(int64_t piece) override {
        const int64_t b = piece / s_.heads, h = piece % s_.heads, V = s_.value_width, at = (b * s_.heads + h) * rows_ * columns_;
        for (int64_t t = 0; t < f_.g.T; ++t) {
            const int64_t row = t * f_.g.B + b;
            prepare(row, h);
            T* y = f_.at(s_.y) + (row * s_.heads + h) * V;
            if (s_.blocks) {
                levels(t, b, h, y);
                continue;
            }
            T *to = f_.after(t, s_.state) + at, *sums = to + s_.key_width * columns_;
            step(f_.before(t, s_.state) + at, to);
            if (s_.shift) add_scaled(y_, (const T*)sums, 1 - y_[V] / sums[V], V);
            const T scale = s_.shift ? 1 / sums[V] : s_.mean ? 1 / y_[V] : T(1), skip = s_.skip ? ((const T*)s_.skip)[h] : T(0);
            for (int64_t c = 0; c < V; ++c) y[c] = scale * y_[c] + skip * value_[c];
        }
    }

  private:
    T* take() { return mem_.template take<T>(rows_); }

    // The vectors of a head that has one of `heads` heads of an activation.
    const T* head(int64_t buffer, int64_t row, int64_t h, int64_t heads, int64_t width) const { return f_.at(buffer) + (row * heads + h * heads / s_.heads) * width; }

    void prepare(int64_t row, int64_t h) {
        const int64_t K = s_.key_width, V = s_.value_width;
        const T *q = head(s_.q, row, h, s_.q_heads, K), *k = head(s_.k, row, h, s_.k_heads, K);
        const T write = T(s_.key_scale) * (s_.write < 0 ? T(1) : f_.at(s_.write)[row * s_.heads + h]);
        fade(row, h);
        for (int64_t i = 0; i < K; ++i) query_[i] = T(s_.query_scale) * q[i], key_[i] = write * k[i];
        if (s_.delta)
            for (int64_t i = 0; i < K; ++i) read_[i] = kept_[i] * k[i], erased_[i] = key_[i];
        else if (s_.a >= 0)
            copy_row(read_, head(s_.a, row, h, s_.heads, K), K), copy_row(erased_, head(s_.b, row, h, s_.heads, K), K);
        copy_row(value_, head(s_.v, row, h, s_.v_heads, V), V);
        if (columns_ > V) value_[V] = 1;
        if (s_.shift) query_[K] = 0, key_[K] = 1;
    }

    // What each key channel keeps.
    void fade(int64_t row, int64_t h) {
        const int64_t K = rows_, n = s_.decays;
        const T* g = s_.g < 0 ? nullptr : f_.at(s_.g) + (row * s_.heads + h) * n;
        const T rate = T(s_.decay_scale) * (s_.log_rate ? T(-::exp(double(((const T*)s_.log_rate)[h]))) : T(1));
        const T whole = s_.decay ? ((const T*)s_.decay)[h] : T(0);
        for (int64_t i = 0; i < K; ++i) kept_[i] = g ? rate * g[n == 1 ? 0 : i] : whole;
        T* kept = kept_;
        each_vector<T>(K, [=](int64_t i, int64_t k) __attribute__((always_inline)) { store_some(kept + i, vexp(load_some((const T*)kept + i, k, T(0))), k); });
    }

    // Binary addition of the token to the blocks: those below the lowest bit that is 0 join in the block there. Blocks of bits that are
    // 0 are neither read nor written.
    void levels(int64_t t, int64_t b, int64_t h, T* y) {
        const int64_t K = s_.key_width, V = s_.value_width, size = K * V, first = b * s_.blocks * s_.heads + h, place = f_.place(t, b);
        const T *weights = f_.at(s_.levels) + ((t * f_.g.B + b) * s_.heads + h) * s_.blocks, *from = f_.before(t, s_.state);
        const int64_t carry = __builtin_ctzll(uint64_t(place) + 1);
        T *to = f_.after(t, s_.state), *joined = to + (first + carry * s_.heads) * size;
        T own = s_.skip ? ((const T*)s_.skip)[h] : T(0);
        for (int64_t i = 0; i < K; ++i) {
            own += weights[0] * query_[i] * key_[i];
            for (int64_t c = 0; c < V; ++c) joined[i * V + c] = key_[i] * value_[c];
        }
        for (int64_t c = 0; c < V; ++c) y[c] = own * value_[c], value_[c] = 0;
        for (int64_t i = 0; place >> i; ++i) {
            if (!(place >> i & 1)) continue;
            const int64_t at = (first + i * s_.heads) * size;
            step(from + at, i < carry ? joined : to + at, i < carry);
            add_scaled(y, (const T*)y_, weights[1 + i], V);
        }
    }

    // `joins`: added to what is there.
    void step(const T* from, T* to, bool joins = false) {
        const T *query = query_, *key = key_, *kept = kept_, *read = read_, *erased = erased_, *value = value_;
        const int64_t K = rows_, C = columns_;
        const bool erases = s_.delta || s_.a >= 0, earlier = s_.earlier;
        T* y = y_;
        each_stripe<T>(C, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
            constexpr int n = decltype(vectors)::value, W = kWidth<T>;
            Vec<T> sum[n] = {}, given[n] = {}, v[n];
            for (int j = 0; j < n; ++j) v[j] = load_some(value + c + j * W, lanes, T(0));
            for (int64_t i = 0; erases && i < K; ++i)
                for (int j = 0; j < n; ++j) given[j] = splat(read[i]) * load_some(from + i * C + c + j * W, lanes, T(0)) + given[j];
            for (int64_t i = 0; i < K; ++i)
                for (int j = 0; j < n; ++j) {
                    const Vec<T> old = load_some(from + i * C + c + j * W, lanes, T(0));
                    Vec<T> now = splat(kept[i]) * old + splat(key[i]) * v[j];
                    if (erases) now = now - splat(erased[i]) * given[j];
                    store_some(to + i * C + c + j * W, joins ? now + load_some((const T*)to + i * C + c + j * W, lanes, T(0)) : now, lanes);
                    sum[j] = splat(query[i]) * (earlier ? old : now) + sum[j];
                }
            for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
        });
    }

    const Frame<T>& f_;
    const stage::Matrix& s_;
    const int64_t rows_, columns_;
    Scratch mem_;
    T *query_, *key_, *kept_, *read_, *erased_, *value_, *y_;
};

template <class T>
class Stage<stage::Bonus, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Bonus& s) : f_(f), s_(s) {}
    int64_t pieces() const override { return f_.rows; }
    void run(int64_t r) override {
        const int64_t K = s_.key_width, V = s_.value_width;
        for (int64_t h = 0; h < s_.heads; ++h) {
            const int64_t at = r * s_.heads + h;
            const T *q = f_.at(s_.q) + at * K, *k = f_.at(s_.k) + at * K, *weight = (const T*)s_.weight + h * K;
            T sum = 0;
            for (int64_t i = 0; i < K; ++i) sum += q[i] * weight[i] * k[i];
            add_scaled(f_.at(s_.y) + at * V, (const T*)f_.at(s_.v) + at * V, sum, V);
        }
    }

  private:
    const Frame<T>& f_;
    const stage::Bonus& s_;
};

LATTE_END
