// Stages whose channels have states of their own: state-space models, filters and WKV.
#pragma once
#include "cell.h"
#include "log_sum.h"
#include "stage.h"

LATTE_BEGIN

// Some channels of a row of the batch through all its tokens are a piece.
template <class T>
class ChannelTask : public Task<T> {
  public:
    ChannelTask(const Frame<T>& f, int64_t width) : f_(f), width_(width) {}
    int64_t pieces() const override { return f_.g.B * cuts(); }
    void run(int64_t piece) override {
        const int64_t b = piece / cuts(), first = piece % cuts() * kChannels;
        for (int64_t t = 0; t < f_.g.T; ++t) token(t, b, first, min64(width_, first + kChannels));
    }

  protected:
    virtual void token(int64_t t, int64_t b, int64_t first, int64_t last) = 0;
    const Frame<T>& f_;

  private:
    static constexpr int64_t kChannels = 128;
    int64_t cuts() const { return (width_ + kChannels - 1) / kChannels; }
    const int64_t width_;
};

template <class T>
class Stage<stage::Selective, T> : public ChannelTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Selective& s) : ChannelTask<T>(f, s.width), s_(s) {}

  protected:
    void token(int64_t t, int64_t b, int64_t first, int64_t last) override {
        const Frame<T>& f = this->f_;
        const int64_t D = s_.width, P = s_.size, row = t * f.g.B + b;
        const T *B = f.at(s_.b) + row * P, *C = f.at(s_.c) + row * P, most = T(s_.most);
        for (int64_t d = first; d < last; ++d) {
            const T x = f.at(s_.x)[row * D + d], delta = f.at(s_.delta)[row * D + d], *rate = (const T*)s_.log_rate + d * P, *from = f.before(t, s_.h) + (b * D + d) * P;
            T* to = f.after(t, s_.h) + (b * D + d) * P;
            Vec<T> sum = {};
            for (int64_t p = 0; p < P; p += kWidth<T>) {
                const int64_t k = min64(kWidth<T>, P - p);
                const Vec<T> gate = vexp(-splat(delta) * vexp(vmin<T>(load_some(rate + p, k, T(0)), splat(most))));
                const Vec<T> h = gate * load_some(from + p, k, T(0)) + splat(delta * x) * load_some(B + p, k, T(0));
                store_some(to + p, h, k);
                sum = h * load_some(C + p, k, T(0)) + sum;
            }
            f.at(s_.y)[row * D + d] = sum_lanes<T>(sum) + ((const T*)s_.skip)[d] * x;
        }
    }

  private:
    const stage::Selective& s_;
};

// One number of a diagonal model, discretised by zero-order hold: a = re + i im = e^{A step} with A = -rate + i speed. In double precision,
// as a constant factor repeats its rounding at every token. It is made anew at each: weights may have changed.
struct Pole {
    double rate, speed, re, im;
    Pole() {}
    Pole(double rate, double speed, double step) : rate(rate), speed(speed) {
        const double size = ::exp(-rate * step);
        re = size * ::cos(speed * step), im = size * ::sin(speed * step);
    }
    // (a - 1) / A . (x + i y)
    void held(double x, double y, double& to_re, double& to_im) const {
        const double norm = rate * rate + speed * speed, gain_re = ((1 - re) * rate + im * speed) / norm, gain_im = ((1 - re) * speed - im * rate) / norm;
        to_re = gain_re * x - gain_im * y, to_im = gain_re * y + gain_im * x;
    }
};
template <class T>
double bounded_exp(const void* exponents, int64_t i, double most) {
    const double exponent = double(((const T*)exponents)[i]);
    return ::exp(exponent < most ? exponent : most);
}

template <class T>
class Stage<stage::StateSpace, T> : public ChannelTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::StateSpace& s) : ChannelTask<T>(f, s.width), s_(s) {}

  protected:
    void token(int64_t t, int64_t b, int64_t first, int64_t last) override {
        const Frame<T>& f = this->f_;
        const int64_t D = s_.width, N = s_.size, row = (t * f.g.B + b) * D;
        for (int64_t d = first; d < last; ++d) {
            const T x = f.at(s_.x)[row + d], *from = f.before(t, s_.h) + (b * D + d) * N * 2;
            T* to = f.after(t, s_.h) + (b * D + d) * N * 2;
            const double step = s_.log_step ? bounded_exp<T>(s_.log_step, d, s_.longest) : 1.0;
            double y = s_.skip ? double(((const T*)s_.skip)[d]) * double(x) : 0.0;
            for (int64_t n = 0; n < N; ++n) {
                const Pole a(s_.slowest + bounded_exp<T>(s_.log_rate, d * N + n, s_.most), double(((const T*)s_.frequency)[d * N + n]), step);
                const double h_re = a.re * double(from[2 * n]) - a.im * double(from[2 * n + 1]) + double(x), h_im = a.re * double(from[2 * n + 1]) + a.im * double(from[2 * n]);
                to[2 * n] = T(h_re), to[2 * n + 1] = T(h_im);
                y += s_.read ? seen(a, h_re, h_im, (const T*)s_.read + (d * N + n) * 2) : h_re;
            }
            f.at(s_.y)[row + d] = T(y);
        }
    }

  private:
    // 2 Re(c (a - 1) / A . h)
    static double seen(const Pole& a, double h_re, double h_im, const T* c) {
        double by_re, by_im;
        a.held(double(c[0]), double(c[1]), by_re, by_im);
        return 2 * (by_re * h_re - by_im * h_im);
    }
    const stage::StateSpace& s_;
};

// Some of the models for all rows are a piece: their weights are read once.
template <class T>
class Stage<stage::Modes, T> : public Task<T> {
  public:
    Stage(const Frame<T>& f, const stage::Modes& s) : f_(f), s_(s), mem_(room(2 * s.width + 1, sizeof(T))), spread_(mem_.zeros<T>(2 * s.width + 1)) {}
    int64_t pieces() const override { return (s_.size + kAtOnce - 1) / kAtOnce; }
    void run(int64_t piece) override {
        const int64_t D = s_.width, first = piece * kModes, n = min64(s_.size - first, kModes);
        const T* weights = (const T*)s_.in + first * 2 * D;
        Pole poles[kModes];
        for (int64_t p = 0; p < n; ++p) {
            const double rate = s_.slowest + bounded_exp<T>(s_.log_rate, first + p, INFINITY);
            poles[p] = Pole(rate, double(((const T*)s_.frequency)[first + p]), bounded_exp<T>(s_.log_step, first + p, INFINITY));
        }
        for (int64_t r = 0; r < f_.rows; ++r) {
            const T* x = f_.at(s_.x) + r * D;
            for (int64_t d = 0; d < D; ++d) spread_[1 + 2 * d] = x[d];
            for (int64_t p = 0; p < n; ++p) token(poles[p], r, first + p, weights + p * 2 * D);
        }
    }

  private:
    static constexpr int64_t kModes = 8;
    // `spread_` has a 0 before each number of x and behind it: so it meets the real or the imaginary parts of the weight.
    void token(const Pole& a, int64_t r, int64_t p, const T* weight) {
        const int64_t t = r / f_.g.B, at = (r % f_.g.B * s_.size + p) * 2;
        const T* from = f_.before(t, s_.h) + at;
        T *to = f_.after(t, s_.h) + at, *y = f_.at(s_.y) + (r * s_.size + p) * 2;
        double u_re, u_im;
        a.held(double(dot(weight, (const T*)spread_ + 1, 2 * s_.width)), double(dot(weight, (const T*)spread_, 2 * s_.width)), u_re, u_im);
        to[0] = T(a.re * double(from[0]) - a.im * double(from[1]) + u_re), to[1] = T(a.re * double(from[1]) + a.im * double(from[0]) + u_im);
        y[0] = 2 * to[0], y[1] = -2 * to[1];
    }

    const Frame<T>& f_;
    const stage::Modes& s_;
    Scratch mem_;
    T* spread_;
};

template <class T>
class Stage<stage::Wkv, T> : public ChannelTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Wkv& s) : ChannelTask<T>(f, s.width), s_(s) {}

  protected:
    void token(int64_t t, int64_t b, int64_t first, int64_t last) override {
        const Frame<T>& f = this->f_;
        const int64_t D = s_.width, row = (t * f.g.B + b) * D;
        const T *k = f.at(s_.k) + row, *v = f.at(s_.v) + row, *from = f.before(t, s_.mean) + b * D, *bonus = (const T*)s_.first;
        const double* sums = f.template before<double>(t, s_.log_norm) + b * D;
        double* moved = f.template after<double>(t, s_.log_norm) + b * D;
        T *y = f.at(s_.y) + row, *to = f.after(t, s_.mean) + b * D, rates[kWidth<T>], shares[kWidth<T>];
        for (int64_t c = first; c < last; c += kWidth<T>) {
            const int64_t n = min64(kWidth<T>, last - c);
            for (int64_t i = 0; i < n; ++i) {
                const T own = T(1 / (1 + ::exp(sums[c + i] - double(bonus[c + i]) - double(k[c + i]))));
                y[c + i] = from[c + i] + own * (v[c + i] - from[c + i]);
                rates[i] = T(::exp(double(((const T*)s_.decay)[c + i])));
            }
            add_to_log_sums(sums + c, moved + c, k + c, rates, n, shares);
            for (int64_t i = 0; i < n; ++i) to[c + i] = from[c + i] + shares[i] * (v[c + i] - from[c + i]);
        }
    }

  private:
    const stage::Wkv& s_;
};

template <class T>
class Stage<stage::Kalman, T> : public ChannelTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Kalman& s) : ChannelTask<T>(f, s.width), s_(s) {}

  protected:
    void token(int64_t t, int64_t b, int64_t first, int64_t last) override {
        const Frame<T>& f = this->f_;
        const int64_t D = s_.width, N = s_.size, row = t * f.g.B + b;
        for (int64_t d = first; d < last; ++d) {
            const int64_t own = (b * D + d) * N;
            const T v = f.at(s_.v)[row * D + d], noise = 1 / (f.at(s_.variance)[row * D + d] + T(s_.least)), *k = f.at(s_.k) + row * N, *q = f.at(s_.q) + row * N;
            Vec<T> sum = {};
            for (int64_t n = 0; n < N; n += kWidth<T>) {
                const int64_t lanes = min64(kWidth<T>, N - n);
                auto some = [&](const T* from) __attribute__((always_inline)) { return load_some(from + n, lanes, T(0)); };
                auto weight = [&](const void* from) __attribute__((always_inline)) { return vexp(vmax<T>(splat(T(-15)), vmin<T>(some((const T*)from + d * N), splat(T(5))))); };
                const Vec<T> rate = weight(s_.log_rate), fade = vmin<T>(weight(s_.log_step) * rate, splat(T(20))), a = vexp(-fade);
                const Vec<T> p = weight(s_.log_variance) / (rate + rate) * complement(-fade, a), key = some(k), precision = some(f.before(t, s_.precision) + own);
                const Vec<T> predicted = precision / (a * a + p * precision), now = predicted + splat(noise) * key * key;
                const Vec<T> mean = predicted / now * a * some(f.before(t, s_.mean) + own) + splat(noise * v) * key / now;
                store_some(f.after(t, s_.precision) + own + n, now, lanes), store_some(f.after(t, s_.mean) + own + n, mean, lanes);
                if (lanes == kWidth<T>)
                    sum = mean * some(q) + sum;
                else  // lanes behind the last have no precision
                    for (int64_t i = 0; i < lanes; ++i) sum[i] += mean[i] * q[n + i];
            }
            f.at(s_.y)[row * D + d] = sum_lanes<T>(sum) + *(const T*)s_.skip * v;
        }
    }

  private:
    const stage::Kalman& s_;
};

template <class T>
class Stage<stage::Average, T> : public ChannelTask<T> {
  public:
    Stage(const Frame<T>& f, const stage::Average& s) : ChannelTask<T>(f, s.width), s_(s) {}

  protected:
    void token(int64_t t, int64_t b, int64_t first, int64_t last) override {
        const Frame<T>& f = this->f_;
        const int64_t D = s_.width, N = s_.size, row = (t * f.g.B + b) * D;
        for (int64_t d = first; d < last; ++d) {
            const T x = f.at(s_.x)[row + d], *from = f.before(t, s_.h) + (b * D + d) * N;
            T* to = f.after(t, s_.h) + (b * D + d) * N;
            Vec<T> sum = {};
            for (int64_t n = 0; n < N; n += kWidth<T>) {
                const int64_t lanes = min64(kWidth<T>, N - n);
                auto weight = [&](const void* w) __attribute__((always_inline)) { return load_some((const T*)w + d * N + n, lanes, T(0)); };
                const Vec<T> p = sigmoid(weight(s_.rate)), old = load_some(from + n, lanes, T(0));
                // Not (1 - p d) h: near 1 that factor's rounding, the same at every token, would add up.
                const Vec<T> h = old + (p * weight(s_.entry) * splat(x) - vmin<T>(p * sigmoid(weight(s_.damping)), splat(T(1 - 1e-6))) * old);
                store_some(to + n, h, lanes);
                sum = h * weight(s_.read) + sum;
            }
            f.at(s_.y)[row + d] = ((const T*)s_.skip)[d] * x + sum_lanes<T>(sum) / T(::sqrt(double(N)));
        }
    }

  private:
    const stage::Average& s_;
};

LATTE_END
