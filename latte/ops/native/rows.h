// Weighted sums of rows, in registers.
#pragma once
#include "vec.h"

LATTE_BEGIN

// y += s x
template <class T>
LATTE_INLINE void add_scaled(T* y, const T* x, T s, int64_t n) {
    for (int64_t c = 0; c < n; c += kWidth<T>) {
        const int64_t k = min64(kWidth<T>, n - c);
        store_some(y + c, load_some(x + c, k, T(0)) * splat(s) + load_some(y + c, k, T(0)), k);
    }
}

template <int n>
struct Count {
    static constexpr int value = n;
};

// Cuts a row in stripes of vectors that stay in registers while body(first column, number of vectors, lanes) walks over rows.
template <class T, class F>
LATTE_INLINE void each_stripe(int64_t width, F body) {
    constexpr int64_t W = kWidth<T>;
    int64_t c = 0;
    for (; c + 8 * W <= width; c += 8 * W) body(c, Count<8>{}, W);
    for (; c + 4 * W <= width; c += 4 * W) body(c, Count<4>{}, W);
    for (; c < width; c += W) body(c, Count<1>{}, min64(W, width - c));
}

// y += sum_i weight_i row_i
template <class T>
LATTE_INLINE void add_rows(T* y, const T* row, int64_t stride, const T* weight, int64_t rows, int64_t width) {
    each_stripe<T>(width, [=](int64_t c, auto vectors, int64_t lanes) __attribute__((always_inline)) {
        constexpr int n = decltype(vectors)::value, W = kWidth<T>;
        Vec<T> sum[n];
        for (int j = 0; j < n; ++j) sum[j] = load_some(y + c + j * W, lanes, T(0));
        for (int64_t i = 0; i < rows; ++i) {
            const Vec<T> w = splat(weight[i]);
            for (int j = 0; j < n; ++j) sum[j] = load_some(row + i * stride + c + j * W, lanes, T(0)) * w + sum[j];
        }
        for (int j = 0; j < n; ++j) store_some(y + c + j * W, sum[j], lanes);
    });
}

// e^{x - top} in the place of x, and their sum.
template <class T>
LATTE_INLINE T exponentials(T* x, int64_t n, T top) {
    T total = 0;
    for (int64_t i = 0; i < n; i += kWidth<T>) {
        const int64_t k = min64(kWidth<T>, n - i);
        const Vec<T> e = vexp(load_some(x + i, k, T(-INFINITY)) - splat(top));
        store_some(x + i, e, k);
        total += sum_lanes<T>(e);
    }
    return total;
}

LATTE_END
