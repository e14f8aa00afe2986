// What the kernels of matrix-valued states share: rows of heads, factors of decay, and overlaps of states.
#pragma once
#include "args.h"
#include "sweep.h"

LATTE_BEGIN

constexpr int64_t kChunk = 32, kAnchor = 8;

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}
LATTE_INLINE const uint8_t* shift(const uint8_t* p, int64_t n) { return p ? p + n : p; }

// exp(g) of a chunk: (n) for one decay a head, (n, Kp) for one a channel, nothing but resets without decay. A masked token
// keeps the state (1), a reset drops it (0).
template <class T>
void factors(T* f, uint8_t* flag, int64_t decays, int64_t Kp, const T* g, int64_t stride, const uint8_t* mask,
             const uint8_t* reset, int64_t n) {
    constexpr int W = kWidth<T>;
    const int64_t ld = decays == 1 ? 1 : Kp;
    for (int64_t t = 0; t < n; ++t) flag[t] = reset && reset[t];
    if (decays) {
        gather(f, ld, g, stride, n, decays, mask);
        for (int64_t i = 0; i < n * ld; i += W) store_some(f + i, vexp(load_some(f + i, n * ld - i, T(0))), n * ld - i);
    }
    for (int64_t t = 0; t < n; ++t)
        if (flag[t]) memset(f + t * ld, 0, size_t(ld) * sizeof(T));
}

// sum over values of A . B, for A and B (V, Kp)
template <class T>
void overlap(double* to, const T* A, const T* B, int64_t V, int64_t Kp) {
    for (int64_t i = 0; i < Kp; ++i) to[i] = 0;
    for (int64_t c = 0; c < V; ++c)
        for (int64_t i = 0; i < Kp; ++i) to[i] += double(A[c * Kp + i]) * double(B[c * Kp + i]);
}

LATTE_END
