// RMS norm of one row.
#pragma once
#include "vec.h"

LATTE_BEGIN

template <class T, class F>
LATTE_INLINE void each_vector(int64_t width, F body) {
    int64_t c = 0;
    for (; c + kWidth<T> <= width; c += kWidth<T>) body(c, int64_t(kWidth<T>));
    if (c < width) body(c, width - c);
}

// 1 / sqrt(mean(x^2) + eps). Sums of squares in four streams: one would wait for itself.
template <class T>
T inverse_rms(const T* x, int64_t D, double eps) {
    constexpr int W = kWidth<T>;
    Vec<T> sum[4] = {};
    int64_t c = 0;
    for (; c + 4 * W <= D; c += 4 * W)
        for (int j = 0; j < 4; ++j) {
            const Vec<T> v = load(x + c + j * W);
            sum[j] = v * v + sum[j];
        }
    for (; c < D; c += W) {
        const Vec<T> v = load_some(x + c, D - c, T(0));
        sum[0] = v * v + sum[0];
    }
    return T(1 / ::sqrt(double(sum_lanes<T>((sum[0] + sum[1]) + (sum[2] + sum[3]))) / double(D) + eps));
}

// y = x / rms(x) . weight
template <class T>
void norm_row(T* y, const T* x, const T* weight, int64_t D, double eps) {
    const Vec<T> inv = splat(inverse_rms(x, D, eps));
    each_vector<T>(D, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
        store_some(y + c, load_some(x + c, k, T(0)) * inv * load_some(weight + c, k, T(0)), k);
    });
}

LATTE_END
