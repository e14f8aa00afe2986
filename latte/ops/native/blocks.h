// Weights of 4 to 8 bits in blocks, as GGUF files keep them, and one block as floats.
//
// A weight is scale x number (+ minimum), of a block of 32 or of a block of 256 with scales of its parts. Rows are whole blocks.
// What a weight is does not depend on how it is read: a product of a few rows and a whole matrix as floats use the same numbers.
#pragma once
#include "args.h"
#include "vec.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

LATTE_BEGIN

// Numbers and bytes of a block, by format.
LATTE_INLINE int64_t block_numbers(int64_t format) { return format == kQ4_K || format == kQ6_K ? 256 : 32; }
LATTE_INLINE int64_t block_bytes(int64_t format) {
    switch (format) {
        case kQ8_0: return 34;
        case kQ4_0: return 18;
        case kQ4_1: return 20;
        case kQ4_K: return 144;
        default: return 210;
    }
}
// Bytes of a row of K numbers; 0: floats of their own type.
LATTE_INLINE int64_t row_bytes(int64_t format, int64_t K, int64_t float_size) {
    return format == kFloats ? K * float_size : K / block_numbers(format) * block_bytes(format);
}

// The number in a half-precision float; weights have no infinities.
LATTE_INLINE float half(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
#else
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    // Shifted to single precision the exponent is short by 112, which a product adds: also for subnormal numbers.
    const uint32_t bits = rest << 13;
    float x;
    memcpy(&x, &bits, 4);
    x *= 5.192296858534828e33f;  // 2^112
    uint32_t out;
    memcpy(&out, &x, 4);
    out |= sign;
    memcpy(&x, &out, 4);
    return x;
#endif
}

#if defined(__AVX2__) && defined(__F16C__)
LATTE_INLINE void sixteen_halves(__m256i from, float* to) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_cvtph_ps(from));
#else
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm256_castsi256_si128(from)));
    _mm256_storeu_ps(to + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(from, 1)));
#endif
}
#endif
LATTE_INLINE void sixteen_halves(const uint16_t* from, float* to) {
#if defined(__AVX2__) && defined(__F16C__)
    sixteen_halves(_mm256_loadu_si256((const __m256i*)from), to);
#else
    for (int i = 0; i < 16; ++i) to[i] = half((const uint8_t*)(from + i));
#endif
}

// Sixteen bytes are loaded at a time and become as many vectors of floats as it takes.
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));
constexpr int kSixteen = 16 / kWidth<float>;  // vectors of sixteen floats

LATTE_INLINE Bytes bytes_at(const uint8_t* p) {
    Bytes v;
    memcpy(&v, p, 16);
    return v;
}
// By name on x86, where compilers convert bytes one by one, or by way of memory.
#if LATTE_BYTES == 64 && defined(__AVX512F__)
LATTE_INLINE void to_floats(Vec<float>* y, Bytes x) { y[0] = (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)x)); }
LATTE_INLINE void to_floats(Vec<float>* y, SignedBytes x) { y[0] = (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)); }
#elif LATTE_BYTES == 32 && defined(__AVX2__)
LATTE_INLINE void to_floats(Vec<float>* y, Bytes x) {
    y[0] = (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)x));
    y[1] = (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64((__m128i)x, (__m128i)x)));
}
LATTE_INLINE void to_floats(Vec<float>* y, SignedBytes x) {
    y[0] = (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)x));
    y[1] = (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)x, (__m128i)x)));
}
#elif LATTE_BYTES == 16 && defined(__SSE2__)
LATTE_INLINE void to_floats(Vec<float>* y, Bytes x) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i pairs[2] = {_mm_unpacklo_epi8((__m128i)x, zero), _mm_unpackhi_epi8((__m128i)x, zero)};
    for (int i = 0; i < 2; ++i) {
        y[2 * i] = (Vec<float>)_mm_cvtepi32_ps(_mm_unpacklo_epi16(pairs[i], zero));
        y[2 * i + 1] = (Vec<float>)_mm_cvtepi32_ps(_mm_unpackhi_epi16(pairs[i], zero));
    }
}
LATTE_INLINE void to_floats(Vec<float>* y, SignedBytes x) {
    const __m128i zero = _mm_setzero_si128();
    // A byte at the upper end of its lane, moved down with its sign.
    const __m128i pairs[2] = {_mm_unpacklo_epi8(zero, (__m128i)x), _mm_unpackhi_epi8(zero, (__m128i)x)};
    for (int i = 0; i < 2; ++i) {
        y[2 * i] = (Vec<float>)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(zero, pairs[i]), 24));
        y[2 * i + 1] = (Vec<float>)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpackhi_epi16(zero, pairs[i]), 24));
    }
}
#else
typedef int32_t Integers __attribute__((vector_size(64)));
typedef float Sixteen __attribute__((vector_size(64)));
template <class B>
LATTE_INLINE void to_floats(Vec<float>* y, B x) {
    const Sixteen floats = __builtin_convertvector(__builtin_convertvector(x, Integers), Sixteen);
    memcpy(y, &floats, 64);
}
#endif

// Thirty-two weights d n + m of 4 bits: sixteen in the low halves of the bytes, sixteen in the high ones. d n is exact in single
// precision, so one rounding remains however it is computed.
LATTE_INLINE void four_bits(const uint8_t* from, float d, float m, Vec<float>* low, Vec<float>* high) {
#if LATTE_BYTES == 64 && defined(__AVX512F__)
    // The bits choose among the sixteen weights there can be, by the low four bits of each lane.
    const Vec<float> all = (Vec<float>)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) * splat(d) + splat(m);
    const __m512i bits = _mm512_cvtepu8_epi32((__m128i)bytes_at(from));
    *low = (Vec<float>)_mm512_permutexvar_ps(bits, (__m512)all);
    *high = (Vec<float>)_mm512_permutexvar_ps(_mm512_srli_epi32(bits, 4), (__m512)all);
#else
    const Bytes q = bytes_at(from);
    to_floats(low, q & 15), to_floats(high, q >> 4);
    for (int i = 0; i < kSixteen; ++i) low[i] = low[i] * splat(d) + splat(m), high[i] = high[i] * splat(d) + splat(m);
#endif
}

// Each format: numbers and bytes of a block; `scales` floats of it, which its first bytes give or `weigh` computes; and `read`, the
// weights of a block from its bytes and those floats. `halves`: so many scales are halves at the block's beginning, and as converting
// them one by one takes as long as all the rest, those of many blocks become floats together.
template <int format>
struct Block;

template <>
struct Block<kQ8_0> {
    static constexpr int64_t numbers = 32, bytes = 34, scales = 1, halves = 1;
    static LATTE_INLINE void read(const uint8_t* from, const float* s, Vec<float>* to) {
        to_floats(to, (SignedBytes)bytes_at(from + 2)), to_floats(to + kSixteen, (SignedBytes)bytes_at(from + 18));
        for (int i = 0; i < 2 * kSixteen; ++i) to[i] = to[i] * splat(s[0]);
    }
};
template <>
struct Block<kQ4_0> {
    static constexpr int64_t numbers = 32, bytes = 18, scales = 1, halves = 1;
    static LATTE_INLINE void read(const uint8_t* from, const float* s, Vec<float>* to) {
        four_bits(from + 2, s[0], -8 * s[0], to, to + kSixteen);
    }
};
template <>
struct Block<kQ4_1> {
    static constexpr int64_t numbers = 32, bytes = 20, scales = 2, halves = 2;
    static LATTE_INLINE void read(const uint8_t* from, const float* s, Vec<float>* to) { four_bits(from + 4, s[0], s[1], to, to + kSixteen); }
};
// Eight parts of 32 with scales and minimums of 6 bits.
template <>
struct Block<kQ4_K> {
    static constexpr int64_t numbers = 256, bytes = 144, scales = 16, halves = 0;
    static LATTE_INLINE void weigh(const uint8_t* from, float* to) {
        const float d = half(from), low = half(from + 2);
        const uint8_t* s = from + 4;
        for (int part = 0; part < 8; ++part) {
            const int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | (s[part - 4] >> 6 << 4);
            const int least = part < 4 ? s[part + 4] & 63 : (s[part + 4] >> 4) | (s[part] >> 6 << 4);
            to[part] = d * float(scale), to[part + 8] = -(low * float(least));
        }
    }
    static LATTE_INLINE void read(const uint8_t* from, const float* s, Vec<float>* to) {
        // Two parts share their bytes, but not their scales.
        for (int part = 0; part < 8; part += 2)
            for (int i = 0; i < 2; ++i) {
                const uint8_t* q = from + 16 + part * 16 + 16 * i;
                Vec<float>* y = to + (part * 2 + i) * kSixteen;
                Vec<float> unused[kSixteen];
                four_bits(q, s[part], s[part + 8], y, unused);
                four_bits(q, s[part + 1], s[part + 9], unused, y + 2 * kSixteen);
            }
    }
};
// Sixteen parts of 16 with scales of 8 bits; four bits of a number are in one place and two in another.
template <>
struct Block<kQ6_K> {
    static constexpr int64_t numbers = 256, bytes = 210, scales = 16, halves = 0;
    static LATTE_INLINE void weigh(const uint8_t* from, float* to) {
        const float d = half(from + 208);
        for (int part = 0; part < 16; ++part) to[part] = d * float(((const int8_t*)from)[192 + part]);
    }
    static LATTE_INLINE void read(const uint8_t* from, const float* s, Vec<float>* to) {
        for (int side = 0; side < 2; ++side)
            for (int part = 0; part < 4; ++part)
                for (int i = 0; i < 2; ++i) {
                    const Bytes low = bytes_at(from + side * 64 + part % 2 * 32 + 16 * i), high = bytes_at(from + 128 + side * 32 + 16 * i);
                    const Bytes q = (part / 2 ? low >> 4 : low & 15) | (((high >> (2 * part)) & 3) << 4);
                    const int n = side * 8 + part * 2 + i;
                    to_floats(to + n * kSixteen, (SignedBytes)q - 32);
                    for (int j = 0; j < kSixteen; ++j) to[n * kSixteen + j] = to[n * kSixteen + j] * splat(s[n]);
                }
    }
};

// Scales of up to kBlocksAtOnce blocks in each of n rows, `ld` bytes apart: those of the first block of every row come first.
constexpr int64_t kScales = 256;
template <class B>
constexpr int64_t kBlocksAtOnce = kScales / B::scales;

#if defined(__AVX2__) && defined(__F16C__)
// Two scales a block, of n rows, collected in registers: by way of memory they would wait until the products before them are done.
template <class B, int n>
LATTE_INLINE void read_pairs(const uint8_t* w, int64_t ld, int64_t blocks, float* to) {
    for (int64_t i = 0; i < blocks; i += 8 / n, to += 16) {
        const auto pair = [=](int k) __attribute__((always_inline)) {
            int32_t both;
            memcpy(&both, w + k % n * ld + (n < 8 ? min64(i + k / n, blocks - 1) : i) * B::bytes, 4);
            return both;
        };
        sixteen_halves(_mm256_setr_epi32(pair(0), pair(1), pair(2), pair(3), pair(4), pair(5), pair(6), pair(7)), to);
    }
}
#endif

template <class B, int n>
LATTE_INLINE void read_scales(const uint8_t* w, int64_t ld, int64_t blocks, float* to) {
#if defined(__AVX2__) && defined(__F16C__)
    if constexpr (B::halves == 2 && (n == 4 || n == 8)) return read_pairs<B, n>(w, ld, blocks, to);
#endif
    if constexpr (B::halves > 0) {
        // All are read before any is converted: a load from two recent stores would wait for them.
        uint16_t close[n * kScales];
        for (int64_t i = 0; i < blocks; ++i) {
            for (int r = 0; r < n; ++r) memcpy(close + (i * n + r) * B::halves, w + r * ld + i * B::bytes, 2 * B::halves);
            asm volatile("");  // or the compiler builds vectors of them, byte by byte
        }
        for (int64_t i = 0; i < blocks * n * B::halves; i += 16) sixteen_halves(close + i, to + i);
    } else {
        for (int64_t i = 0; i < blocks; ++i)
            for (int r = 0; r < n; ++r) B::weigh(w + r * ld + i * B::bytes, to + (i * n + r) * B::scales);
    }
}

// Calls body(Block<format>) for the format at hand.
template <class F>
LATTE_INLINE void with_block(int64_t format, F body) {
    switch (format) {
        case kQ8_0: return body(Block<kQ8_0>{});
        case kQ4_0: return body(Block<kQ4_0>{});
        case kQ4_1: return body(Block<kQ4_1>{});
        case kQ4_K: return body(Block<kQ4_K>{});
        default: return body(Block<kQ6_K>{});
    }
}

// A row of K numbers as floats.
LATTE_INLINE void read_row(int64_t format, const void* from, float* to, int64_t K) {
    with_block(format, [=](auto block) __attribute__((always_inline)) {
        typedef decltype(block) B;
        const uint8_t* w = (const uint8_t*)from;
        float scales[kScales], *y = to;
        for (int64_t left = K / B::numbers; left > 0; left -= kBlocksAtOnce<B>) {
            const int64_t blocks = min64(left, kBlocksAtOnce<B>);
            read_scales<B, 1>(w, 0, blocks, scales);
            for (int64_t i = 0; i < blocks; ++i, w += B::bytes, y += B::numbers) {
                Vec<float> numbers[B::numbers / kWidth<float>];
                B::read(w, scales + i * B::scales, numbers);
                memcpy(y, numbers, sizeof(numbers));
            }
        }
    });
}

LATTE_END
