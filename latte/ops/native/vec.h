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

// Set from outside to try the code of another width: the compiler then builds a vector of narrower ones.
#if !defined(LATTE_BYTES)
#if defined(__AVX512F__)
#define LATTE_BYTES 64
#elif defined(__AVX__)
#define LATTE_BYTES 32
#else
#define LATTE_BYTES 16
#endif
#endif
constexpr int kBytes = LATTE_BYTES;

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

// A row is too short for a call of memcpy to pay.
template <class T>
LATTE_INLINE void copy_row(T* to, const T* from, int64_t n) {
    int64_t c = 0;
    for (; c + kWidth<T> <= n; c += kWidth<T>) store(to + c, load(from + c));
    for (; c < n; ++c) to[c] = from[c];
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
// Outputs of this many bytes have left the caches before their end is written.
LATTE_INLINE constexpr bool past_cache(int64_t bytes) { return bytes >= (int64_t(16) << 20); }
LATTE_INLINE void settle_past_cache() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

template <class M>
LATTE_INLINE bool any(M mask) {
#if LATTE_BYTES == 64 && defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif LATTE_BYTES == 32 && defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif LATTE_BYTES == 16 && defined(__SSE2__)
    return _mm_movemask_ps((__m128)mask) != 0;
#elif LATTE_BYTES == 16 && defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    uint64_t words[sizeof(M) / 8], all = 0;
    memcpy(words, &mask, sizeof(M));
    for (uint64_t w : words) all |= w;
    return all != 0;
#endif
}

// Reduces the lanes of a vector: halves onto halves, so that half as many steps wait for each other as one lane after another.
// The order is the same in memory and in registers; registers save a store and a load for each half.
template <class T, class Op>
LATTE_INLINE T fold_lanes(Vec<T> v, Op op) {
#if LATTE_BYTES >= 32 && defined(__AVX__)
    if constexpr (sizeof(T) == sizeof(float)) {
        __m256 eight[LATTE_BYTES / 32];
        memcpy(eight, &v, sizeof(v));
        if (LATTE_BYTES == 64) eight[0] = op(eight[0], eight[LATTE_BYTES / 32 - 1]);
        const __m128 four = op(_mm256_castps256_ps128(eight[0]), _mm256_extractf128_ps(eight[0], 1));
        const __m128 two = op(four, _mm_movehl_ps(four, four));
        return op(two, _mm_shuffle_ps(two, two, 1))[0];
    }
#endif
    T lane[kWidth<T>];
    store(lane, v);
    for (int half = kWidth<T> / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = op(lane[i], lane[i + half]);
    return lane[0];
}
template <class T>
LATTE_INLINE T sum_lanes(Vec<T> v) {
    return fold_lanes<T>(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
// The sums of the lanes of several vectors at once, by the additions of sum_lanes in the same order: bit by bit the same.
#if defined(__clang__) || __GNUC__ >= 12
template <int... i>
struct Indices {};
template <int n, int... i>
struct UpTo : UpTo<n - 1, n - 1, i...> {};
template <int... i>
struct UpTo<0, i...> {
    typedef Indices<i...> type;
};

// a and b hold sums of n lanes each, side by side; the result holds those of a and then those of b, of n / 2 lanes each.
template <int n, class V, int... i>
LATTE_INLINE V half_lanes(V a, V b, Indices<i...>) {
    constexpr int h = n / 2;
    return __builtin_shufflevector(a, b, (i / h * n + i % h)...) + __builtin_shufflevector(a, b, (i / h * n + i % h + h)...);
}
template <class T, int n, int count>
struct LaneSums {
    static LATTE_INLINE void write(const Vec<T>* v, T* out) {
        constexpr int less = count > 1 ? count / 2 : 1;
        Vec<T> halved[less];
        for (int j = 0; j < less; ++j) halved[j] = half_lanes<n>(v[j * count / less], v[count > 1 ? 2 * j + 1 : 0], typename UpTo<kWidth<T>>::type());
        LaneSums<T, n / 2, less>::write(halved, out);
    }
};
template <class T, int count>
struct LaneSums<T, 1, count> {
    static LATTE_INLINE void write(const Vec<T>* v, T* out) {
        for (int j = 0; j < count; ++j) store(out + j * kWidth<T>, v[j]);
    }
};
// `out` has room for whole vectors.
template <int count, class T>
LATTE_INLINE void sum_lanes_of(const Vec<T>* v, T* out) {
    LaneSums<T, kWidth<T>, count>::write(v, out);
}
#else
template <int count, class T>
LATTE_INLINE void sum_lanes_of(const Vec<T>* v, T* out) {
    for (int j = 0; j < count; ++j) out[j] = sum_lanes<T>(v[j]);
}
#endif
// Where one is NaN, the second: what x86's own instructions do. Written as a choice they would be a comparison and a blend.
template <class T>
LATTE_INLINE Vec<T> vmax(Vec<T> a, Vec<T> b) {
#if LATTE_BYTES == 64 && defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
#elif LATTE_BYTES == 32 && defined(__AVX__)
    if constexpr (sizeof(T) == sizeof(float)) return (Vec<T>)_mm256_max_ps((__m256)a, (__m256)b);
#endif
    return a > b ? a : b;
}
template <class T>
LATTE_INLINE Vec<T> vmin(Vec<T> a, Vec<T> b) {
#if LATTE_BYTES == 64 && defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(float)) return (Vec<T>)_mm512_min_ps((__m512)a, (__m512)b);
#elif LATTE_BYTES == 32 && defined(__AVX__)
    if constexpr (sizeof(T) == sizeof(float)) return (Vec<T>)_mm256_min_ps((__m256)a, (__m256)b);
#endif
    return a < b ? a : b;
}
template <class T>
LATTE_INLINE T max_lanes(Vec<T> v) {
    return fold_lanes<T>(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// exp(x) = 2^n (1 + r + r^2 q(r)), |r| <= ln(2)/2; q is a least-maximum fit of degree 4 (relative error 3e-9, so rounding
// decides: below 1.5 ulp). Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. From x = -127 ln(2) down the
// bits of 2^n are those of 0, and so is the result. Several vectors go step by step together: the steps of one wait for each
// other. This one is for x <= 0.
template <int K>
LATTE_INLINE void vexp_down(Vec<float> (&x)[K]) {
    typedef Vec<float> V;
    V shifted[K], r[K], q[K];
    for (int i = 0; i < K; ++i) x[i] = vmax<float>(splat(-88.03f), x[i]);
    for (int i = 0; i < K; ++i) shifted[i] = x[i] * splat(1.442695041f) + splat(12582912.0f);
    for (int i = 0; i < K; ++i) q[i] = shifted[i] - splat(12582912.0f);
    for (int i = 0; i < K; ++i) r[i] = x[i] - q[i] * splat(0.693145752f);
    for (int i = 0; i < K; ++i) r[i] = r[i] - q[i] * splat(1.428606820e-6f);
    for (int i = 0; i < K; ++i) q[i] = r[i] * splat(0.00138145348f) + splat(0.00836874545f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.0416683927f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.166665211f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.49999994f);
    for (int i = 0; i < K; ++i) q[i] = (q[i] * r[i]) * r[i] + r[i];
    for (int i = 0; i < K; ++i) {
        Mask<float> bits;
        memcpy(&bits, &shifted[i], sizeof(bits));
        bits = (bits + 127) << 23;
        V scale;
        memcpy(&scale, &bits, sizeof(scale));
        x[i] = q[i] * scale + scale;
    }
}
// 2^x = 2^n (1 + r q(r)), |r| <= 1/2, for x <= 0, in the same way: three products fewer, since x needs no ln(2) and r no rest of it.
template <int K>
LATTE_INLINE void vexp2_down(Vec<float> (&x)[K]) {
    typedef Vec<float> V;
    V shifted[K], r[K], q[K];
    for (int i = 0; i < K; ++i) x[i] = vmax<float>(splat(-127.0f), x[i]);
    for (int i = 0; i < K; ++i) shifted[i] = x[i] + splat(12582912.0f);
    for (int i = 0; i < K; ++i) q[i] = shifted[i] - splat(12582912.0f);
    for (int i = 0; i < K; ++i) r[i] = x[i] - q[i];
    for (int i = 0; i < K; ++i) q[i] = r[i] * splat(0.00015353362f) + splat(0.0013398875f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.00961843692f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.0555033237f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.240226477f);
    for (int i = 0; i < K; ++i) q[i] = q[i] * r[i] + splat(0.693147182f);
    for (int i = 0; i < K; ++i) {
        Mask<float> bits;
        memcpy(&bits, &shifted[i], sizeof(bits));
        bits = (bits + 127) << 23;
        V scale;
        memcpy(&scale, &bits, sizeof(scale));
        x[i] = (q[i] * r[i]) * scale + scale;
    }
}
template <int K>
LATTE_INLINE void vexp2_down(Vec<double> (&x)[K]) {
    for (int i = 0; i < K; ++i)
        for (int lane = 0; lane < kWidth<double>; ++lane) x[i][lane] = ::exp2(x[i][lane]);
}
template <int K>
LATTE_INLINE void vexp_down(Vec<double> (&x)[K]) {
    for (int i = 0; i < K; ++i)
        for (int lane = 0; lane < kWidth<double>; ++lane) x[i][lane] = ::exp(x[i][lane]);
}
template <int K>
LATTE_INLINE void vexp(Vec<float> (&x)[K]) {
    for (int i = 0; i < K; ++i) x[i] = vmin<float>(splat(88.37f), x[i]);
    vexp_down(x);
}
template <int K>
LATTE_INLINE void vexp(Vec<double> (&x)[K]) {
    vexp_down(x);
}
template <class V>
LATTE_INLINE V vexp(V x) {
    V one[1] = {x};
    vexp(one);
    return one[0];
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

// log(x) for positive normal numbers, NaN for NaN; below 1.5 ulp. The same series as below, in single precision.
LATTE_INLINE Vec<float> vlog(Vec<float> x) {
    typedef Vec<float> V;
    typedef Mask<float> I;
    I bits;
    memcpy(&bits, &x, sizeof(bits));
    const I n = (bits - 0x3F3504F3) >> 23, mantissa = bits - (n << 23);
    V m;
    memcpy(&m, &mantissa, sizeof(m));
    const V exponent = __builtin_convertvector(n, V), f = m - 1.0f, s = f / (m + 1.0f), z = s * s;
    V sum = splat(1.0f / 9);
    for (int k = 7; k >= 3; k -= 2) sum = sum * z + splat(1.0f / float(k));
    const V log_m = f - s * (f - 2.0f * (z * sum));
    // log(2) in two parts, so that its multiples are exact in the first.
    const V log_x = exponent * splat(0.693145752f) + (exponent * splat(1.428606820e-6f) + log_m);
    return x == x ? log_x : x;
}
LATTE_INLINE Vec<double> vlog(Vec<double> x) {
    for (int i = 0; i < kWidth<double>; ++i) x[i] = ::log(x[i]);
    return x;
}

// log(1 + x) for x >= 0. With u = 1 + x = 2^n m, m between sqrt(1/2) and sqrt(2), and s = (m - 1) / (m + 1), log m is
// 2 (s + s^3/3 + s^5/5 + ...): s^2 is below 0.03, so ten terms are exact to the last bit or two. What u lost of x comes back by
// (x - (u - 1)) / u. The exponent is shifted into the low bits of 1.5 * 2^52, where it reads as a number.
LATTE_INLINE Vec<double> vlog1p(Vec<double> x) {
    typedef Vec<double> V;
    typedef Mask<double> I;
    const V u = x + 1.0;
    I bits;
    memcpy(&bits, &u, sizeof(bits));
    const I n = (bits - 0x3FE6A09E667F3BCD) >> 52, mantissa = bits - (n << 52), shifted = n + 0x4338000000000000;
    V m, exponent;
    memcpy(&m, &mantissa, sizeof(m));
    memcpy(&exponent, &shifted, sizeof(exponent));
    exponent = exponent - 6755399441055744.0;
    const V f = m - 1.0, s = f / (m + 1.0), z = s * s;
    V sum = splat(1.0 / 21);
    for (int k = 19; k >= 3; k -= 2) sum = sum * z + 1.0 / k;
    // 2s = f - s f: the large part stays exact.
    const V log_m = f - s * (f - 2.0 * (z * sum));
    return exponent * 0.6931471805599453 + (log_m + (x - (u - 1.0)) / u);
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
