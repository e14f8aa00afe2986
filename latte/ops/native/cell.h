// The gates of the RG-LRU on one vector of channels.
#pragma once
#include "vec.h"

LATTE_BEGIN

LATTE_INLINE Vec<float> vsqrt(Vec<float> x) {
#if LATTE_BYTES == 64 && defined(__AVX512F__)
    return (Vec<float>)_mm512_sqrt_ps((__m512)x);
#elif LATTE_BYTES == 32 && defined(__AVX__)
    return (Vec<float>)_mm256_sqrt_ps((__m256)x);
#else
    Vec<float> y{};
    for (int i = 0; i < kWidth<float>; ++i) y[i] = ::sqrtf(x[i]);
    return y;
#endif
}
LATTE_INLINE Vec<double> vsqrt(Vec<double> x) {
    Vec<double> y{};
    for (int i = 0; i < kWidth<double>; ++i) y[i] = ::sqrt(x[i]);
    return y;
}

// 1 - e^{2 log a}: near a = 1 the difference would lose all its digits.
LATTE_INLINE Vec<float> complement(Vec<float> log_a, Vec<float> a) {
    const Vec<float> z = log_a * splat(2.0f);
    Vec<float> s = splat(1.0f / 5040);
    s = s * z + splat(1.0f / 720);
    s = s * z + splat(1.0f / 120);
    s = s * z + splat(1.0f / 24);
    s = s * z + splat(1.0f / 6);
    s = s * z + splat(0.5f);
    s = (s * z) * z + z;
    return z > splat(-0.4f) ? -s : splat(1.0f) - a * a;
}
LATTE_INLINE Vec<double> complement(Vec<double> log_a, Vec<double>) {
    Vec<double> y{};
    for (int i = 0; i < kWidth<double>; ++i) y[i] = -::expm1(2 * log_a[i]);
    return y;
}
template <class V>
LATTE_INLINE V sigmoid(V x) {
    return 1 / (1 + vexp(-x));
}

// One vector of a token.
template <class T>
struct Cell {
    Vec<T> r, i, a, m;
    LATTE_INLINE Cell(Vec<T> ga, Vec<T> gx, Vec<T> rate, bool first) {
        r = sigmoid(ga), i = sigmoid(gx);
        const Vec<T> log_a = -rate * r;
        a = vexp(log_a);
        m = first ? splat(T(1)) : vsqrt(complement(log_a, a));
    }
};

LATTE_END
