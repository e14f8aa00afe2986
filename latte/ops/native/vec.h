// Vectors of the widest registers the translation unit is compiled for.
//
// Every kernel source is compiled once per instruction set with LATTE_ISA naming the namespace, so the same text gives SSE2 or
// NEON (16 bytes), AVX2 (32) and AVX-512 (64) code. GCC and Clang vector extensions carry the arithmetic; `a * b + c` fuses to
// one FMA where the machine has it (-ffp-contract=fast).
//
// Everything is in an anonymous namespace on purpose: an inline function compiled for AVX-512 must never be the copy that the
// linker keeps for the portable unit. For the same reason no header-only parts of the C++ library are used in kernels.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef LATTE_ISA
#define LATTE_ISA portable
#endif
#define LATTE_BEGIN \
    namespace latte { \
    namespace LATTE_ISA { \
    namespace {
#define LATTE_END \
    } \
    } \
    }
#define LATTE_INLINE inline __attribute__((always_inline))

LATTE_BEGIN

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float type __attribute__((vector_size(kBytes)));
    typedef int32_t integer;
    typedef int32_t mask __attribute__((vector_size(kBytes)));
};
template <>
struct Lanes<double> {
    typedef double type __attribute__((vector_size(kBytes)));
    typedef int64_t integer;
    typedef int64_t mask __attribute__((vector_size(kBytes)));
};
template <class T>
using Vec = typename Lanes<T>::type;
template <class T>
using Mask = typename Lanes<T>::mask;
template <class T>
using Int = typename Lanes<T>::integer;
template <class T>
constexpr int kWidth = kBytes / int(sizeof(T));

template <class T>
LATTE_INLINE Vec<T> load(const T* p) {
    Vec<T> v;
    memcpy(&v, p, sizeof(v));
    return v;
}
template <class T>
LATTE_INLINE void store(T* p, Vec<T> v) {
    memcpy(p, &v, sizeof(v));
}
// `Vec<T>{} + x` would be shorter, but adding 0 to x is an instruction (it turns -0 into 0). This is one load.
template <class T>
LATTE_INLINE Vec<T> splat(T x) {
    return x - Vec<T>{};
}
// The first n lanes from memory, the rest `fill`: never reads past the row.
template <class T>
LATTE_INLINE Vec<T> load_some(const T* p, int64_t n, T fill) {
    if (n >= kWidth<T>) return load(p);
    T tmp[kWidth<T>];
    for (int i = 0; i < kWidth<T>; ++i) tmp[i] = i < n ? p[i] : fill;
    return load(tmp);
}
template <class T>
LATTE_INLINE void store_some(T* p, Vec<T> v, int64_t n) {
    if (n >= kWidth<T>) return store(p, v);
    T tmp[kWidth<T>];
    store(tmp, v);
    for (int64_t i = 0; i < n; ++i) p[i] = tmp[i];
}

// Copies a row that nobody reads soon: straight to memory where it can be, without reading first what it overwrites. Whoever
// hands the copy to another thread calls settle_past_cache() before.
template <class T>
LATTE_INLINE void copy_past_cache(T* to, const T* from, int64_t n) {
    int64_t c = 0;
#if defined(__AVX__)
    if (((uintptr_t)to & 31) == 0)
        for (; c + int64_t(32 / sizeof(T)) <= n; c += int64_t(32 / sizeof(T)))
            _mm256_stream_si256((__m256i*)(to + c), _mm256_loadu_si256((const __m256i*)(from + c)));
#endif
    if (c < n) memcpy(to + c, from + c, size_t(n - c) * sizeof(T));
}
LATTE_INLINE void settle_past_cache() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

template <class M>
LATTE_INLINE bool any(M mask) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)mask) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    uint64_t words[sizeof(M) / 8], all = 0;
    memcpy(words, &mask, sizeof(M));
    for (uint64_t w : words) all |= w;
    return all != 0;
#endif
}

// Halves onto halves: half as many steps as one lane after the other waits for.
template <class T>
LATTE_INLINE T sum_lanes(Vec<T> v) {
    T lane[kWidth<T>];
    store(lane, v);
    for (int half = kWidth<T> / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}
template <class T>
LATTE_INLINE Vec<T> vmax(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;
}
template <class T>
LATTE_INLINE T max_lanes(Vec<T> v) {
    T lane[kWidth<T>];
    store(lane, v);
    for (int half = kWidth<T> / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

// exp(x) = 2^n (1 + r + r^2 q(r)), |r| <= ln(2)/2; q is a least-maximum fit of degree 4 (relative error 3e-9, so rounding
// decides: below 1.5 ulp). Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. Below -87.33 the result is 0:
// no denormals, whose arithmetic is slow.
LATTE_INLINE Vec<float> vexp(Vec<float> x) {
    typedef Vec<float> V;
    typedef Mask<float> I;
    const I tiny = x < splat(-87.33f);
    V y = x > splat(88.37f) ? splat(88.37f) : x;
    y = tiny ? splat(-87.33f) : y;
    const V shifted = y * splat(1.442695041f) + splat(12582912.0f);
    const V n = shifted - splat(12582912.0f);
    V r = y - n * splat(0.693145752f);
    r = r - n * splat(1.428606820e-6f);
    V q = splat(0.00138145348f);
    q = q * r + splat(0.00836874545f);
    q = q * r + splat(0.0416683927f);
    q = q * r + splat(0.166665211f);
    q = q * r + splat(0.49999994f);
    q = (q * r) * r + r;
    I bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 127) << 23;
    V scale;
    memcpy(&scale, &bits, sizeof(scale));
    y = q * scale + scale;
    return tiny ? V{} : y;
}
LATTE_INLINE Vec<double> vexp(Vec<double> x) {
    Vec<double> y{};
    for (int i = 0; i < kWidth<double>; ++i) y[i] = ::exp(x[i]);
    return y;
}

// tanh through exp, with a series where 1 - exp(-2x) would cancel. No exponent is above 0.
LATTE_INLINE Vec<float> vtanh(Vec<float> x) {
    typedef Vec<float> V;
    const V ax = x < V{} ? -x : x;
    const V e = vexp(ax * splat(-2.0f));
    V big = (splat(1.0f) - e) / (splat(1.0f) + e);
    big = x < V{} ? -big : big;
    const V s = x * x;
    V small = splat(62.0f / 2835);
    small = small * s + splat(-17.0f / 315);
    small = small * s + splat(2.0f / 15);
    small = small * s + splat(-1.0f / 3);
    small = (small * s) * x + x;
    return ax < splat(0.2f) ? small : big;
}
LATTE_INLINE Vec<double> vtanh(Vec<double> x) {
    Vec<double> y{};
    for (int i = 0; i < kWidth<double>; ++i) y[i] = ::tanh(x[i]);
    return y;
}

// The sum of a_i b_i.
template <class T>
T dot(const T* a, const T* b, int64_t n) {
    Vec<T> sum[2] = {};
    int64_t c = 0;
    for (; c + 2 * kWidth<T> <= n; c += 2 * kWidth<T>)
        for (int j = 0; j < 2; ++j) sum[j] = load(a + c + j * kWidth<T>) * load(b + c + j * kWidth<T>) + sum[j];
    for (; c < n; c += kWidth<T>) sum[0] = load_some(a + c, n - c, T(0)) * load_some(b + c, n - c, T(0)) + sum[0];
    return sum_lanes<T>(sum[0] + sum[1]);
}

LATTE_INLINE constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
LATTE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
LATTE_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

LATTE_END
