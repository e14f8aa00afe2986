// Logs of sums of exponentials, moved on by one token: the normalisers of latents and of WKV.
#pragma once
#include "vec.h"

LATTE_BEGIN

// after = log(e^{before - rates} + e^k) for up to a vector of them, and the shares e^{k - after} that the token has. Differences are
// taken in double precision; what is left of them after exp is a number that T's precision is enough for. rates: none where null.
template <class T>
void add_to_log_sums(const double* before, double* after, const T* k, const T* rates, int64_t n, T* shares) {
    constexpr int W = kWidth<T>, L = kWidth<double>;
    double high[W] = {}, sum[W];
    T x[W] = {};
    for (int64_t i = 0; i < n; ++i) {
        const double now = double(k[i]), past = rates ? before[i] - double(rates[i]) : before[i];
        high[i] = past > now ? past : now;
        x[i] = T((past > now ? now : past) - high[i]);
    }
    store(x, vexp(load(x)));
    for (int64_t i = 0; i < W; i += L) {
        Vec<double> more;
        for (int j = 0; j < L; ++j) more[j] = double(x[i + j]);
        store(sum + i, load(high + i) + vlog1p(more));
    }
    for (int64_t i = 0; i < n; ++i) after[i] = sum[i], x[i] = T(double(k[i]) - sum[i]);
    store_some(shares, vexp(load(x)), n);
}

LATTE_END
