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

// Sixteen numbers at a time, which is as many bytes as make sense to load at once; a compiler builds them of narrower vectors where
// it has to. Shapes are the same on every machine, and so are the results.
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef float Sixteen __attribute__((vector_size(64)));

LATTE_INLINE Bytes bytes_at(const uint8_t* p) {
    Bytes v;
    memcpy(&v, p, 16);
    return v;
}
// Passed by reference: where vectors of 64 bytes are no registers, the calling convention would depend on the compiler.
// By name on x86, where some compilers convert loaded bytes one by one.
#if defined(__AVX512F__)
LATTE_INLINE void to_floats(Sixteen& y, const Bytes& x) { y = (Sixteen)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)x)); }
LATTE_INLINE void to_floats(Sixteen& y, const SignedBytes& x) { y = (Sixteen)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)); }
#elif defined(__AVX2__)
LATTE_INLINE void to_floats(Sixteen& y, const Bytes& x) {
    const __m128i low = (__m128i)x, high = _mm_unpackhi_epi64(low, low);
    const __m256 both[2] = {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))};
    memcpy(&y, both, 64);
}
LATTE_INLINE void to_floats(Sixteen& y, const SignedBytes& x) {
    const __m128i low = (__m128i)x, high = _mm_unpackhi_epi64(low, low);
    const __m256 both[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))};
    memcpy(&y, both, 64);
}
#else
LATTE_INLINE void to_floats(Sixteen& y, const Bytes& x) { y = __builtin_convertvector(__builtin_convertvector(x, Integers), Sixteen); }
LATTE_INLINE void to_floats(Sixteen& y, const SignedBytes& x) { y = __builtin_convertvector(__builtin_convertvector(x, Integers), Sixteen); }
#endif

// Sixteen weights d n + m of 4 bits each, in the low half of a byte (shift 0) or the high one (4). d n is exact in single precision,
// so one rounding remains however it is computed.
template <int shift>
LATTE_INLINE void four_bits(Sixteen& y, const Bytes& q, float d, float m) {
#if defined(__AVX512F__)
    // The bits choose among the sixteen weights there can be, by the low four bits of each lane.
    const Sixteen all = (Sixteen)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) * d + m;
    y = (Sixteen)_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32((__m128i)q), shift), (__m512)all);
#else
    to_floats(y, shift ? q >> 4 : q & 15);
    y = y * d + m;
#endif
}

template <int format>
struct Block;

template <>
struct Block<kQ8_0> {
    static constexpr int64_t numbers = 32, bytes = 34;
    static LATTE_INLINE void read(const uint8_t* from, Sixteen* to) {
        const float d = half(from);
        const SignedBytes first = (SignedBytes)bytes_at(from + 2), second = (SignedBytes)bytes_at(from + 18);
        to_floats(to[0], first), to_floats(to[1], second);
        to[0] = to[0] * d, to[1] = to[1] * d;
    }
};
template <>
struct Block<kQ4_0> {
    static constexpr int64_t numbers = 32, bytes = 18;
    static LATTE_INLINE void read(const uint8_t* from, Sixteen* to) {
        const float d = half(from);
        const Bytes q = bytes_at(from + 2);
        four_bits<0>(to[0], q, d, -8 * d), four_bits<4>(to[1], q, d, -8 * d);
    }
};
template <>
struct Block<kQ4_1> {
    static constexpr int64_t numbers = 32, bytes = 20;
    static LATTE_INLINE void read(const uint8_t* from, Sixteen* to) {
        const float d = half(from), m = half(from + 2);
        const Bytes q = bytes_at(from + 4);
        four_bits<0>(to[0], q, d, m), four_bits<4>(to[1], q, d, m);
    }
};
// Eight parts of 32 with scales and minimums of 6 bits.
template <>
struct Block<kQ4_K> {
    static constexpr int64_t numbers = 256, bytes = 144;
    static LATTE_INLINE void read(const uint8_t* from, Sixteen* to) {
        const float d = half(from), low = half(from + 2);
        const uint8_t *s = from + 4, *q = from + 16;
        for (int part = 0; part < 8; ++part) {
            const int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | (s[part - 4] >> 6 << 4);
            const int least = part < 4 ? s[part + 4] & 63 : (s[part + 4] >> 4) | (s[part] >> 6 << 4);
            const float one = d * float(scale), m = -(low * float(least));
            for (int i = 0; i < 2; ++i) {
                const Bytes packed = bytes_at(q + part / 2 * 32 + 16 * i);
                part % 2 ? four_bits<4>(to[part * 2 + i], packed, one, m) : four_bits<0>(to[part * 2 + i], packed, one, m);
            }
        }
    }
};
// Sixteen parts of 16 with scales of 8 bits; four bits of a number are in one place and two in another.
template <>
struct Block<kQ6_K> {
    static constexpr int64_t numbers = 256, bytes = 210;
    static LATTE_INLINE void read(const uint8_t* from, Sixteen* to) {
        const float d = half(from + 208);
        const int8_t* scales = (const int8_t*)from + 192;
        for (int side = 0; side < 2; ++side)
            for (int part = 0; part < 4; ++part)
                for (int i = 0; i < 2; ++i) {
                    const Bytes low = bytes_at(from + side * 64 + part % 2 * 32 + 16 * i), high = bytes_at(from + 128 + side * 32 + 16 * i);
                    const Bytes q = (part / 2 ? low >> 4 : low & 15) | (((high >> (2 * part)) & 3) << 4);
                    Sixteen& y = to[side * 8 + part * 2 + i];
                    to_floats(y, (SignedBytes)q - 32);
                    y = y * (d * float(scales[side * 8 + part * 2 + i]));
                }
    }
};

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
        for (int64_t c = 0; c < K; c += B::numbers) {
            Sixteen numbers[B::numbers / 16];
            B::read((const uint8_t*)from + c / B::numbers * B::bytes, numbers);
            memcpy(to + c, numbers, sizeof(numbers));
        }
    });
}

LATTE_END
