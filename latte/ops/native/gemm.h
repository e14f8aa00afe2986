// Small dense products on packed operands.
#pragma once
#include "vec.h"

LATTE_BEGIN

constexpr int kTileRows = 6;  // 6 rows of 2 vectors: 12 of AVX2's 16 registers accumulate
template <class T>
constexpr int kTileCols = 2 * kWidth<T>;

// A matrix (n, width) cut into panels of kTileCols columns, each panel (n, kTileCols) contiguous: what the product streams
// through. Rows where `keep` is negative become zeros, so that padding (NaN, say) reaches nothing.
template <class T, class I>
void pack_rows(T* to, const T* from, int64_t stride, int64_t n, int64_t width, const I* keep) {
    constexpr int64_t N = kTileCols<T>;
    for (int64_t c = 0; c < width; c += N, to += n * N) {
        const int64_t m = min64(N, width - c);
        for (int64_t i = 0; i < n; ++i) {
            T* row = to + i * N;
            if (keep && keep[i] < 0) {
                memset(row, 0, N * sizeof(T));
            } else if (m == N) {
                memcpy(row, from + i * stride + c, N * sizeof(T));
            } else {
                for (int64_t j = 0; j < N; ++j) row[j] = j < m ? from[i * stride + c + j] : T(0);
            }
        }
    }
}

// The transpose (width, n) of the same, in panels of kTileCols rows of the original; the last panel is filled with zeros.
template <class T, class I>
void pack_columns(T* to, const T* from, int64_t stride, int64_t n, int64_t width, const I* keep) {
    constexpr int64_t N = kTileCols<T>;
    for (int64_t i = 0; i < n; i += N, to += width * N)
        for (int64_t j = 0; j < N; ++j) {
            if (i + j < n && !(keep && keep[i + j] < 0)) {
                const T* row = from + (i + j) * stride;
                for (int64_t c = 0; c < width; ++c) to[c * N + j] = row[c];
            } else {
                for (int64_t c = 0; c < width; ++c) to[c * N + j] = 0;
            }
        }
}

// C[6][2 vectors] (+)= A[6][K] B[K][2 vectors]; A is read one element at a time, at any strides; B is a panel.
template <class T, bool Add>
LATTE_INLINE void product(const T* a, int64_t row, int64_t col, const T* b, int64_t K, T* c, int64_t ldc) {
    constexpr int W = kWidth<T>;
    Vec<T> acc[kTileRows][2];
    for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < 2; ++j) acc[r][j] = Add ? load(c + r * ldc + j * W) : Vec<T>{};
    for (int64_t k = 0; k < K; ++k, a += col, b += 2 * W) {
        const Vec<T> b0 = load(b), b1 = load(b + W);
        for (int r = 0; r < kTileRows; ++r) {
            const Vec<T> x = splat(a[r * row]);
            acc[r][0] = x * b0 + acc[r][0];
            acc[r][1] = x * b1 + acc[r][1];
        }
    }
    for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < 2; ++j) store(c + r * ldc + j * W, acc[r][j]);
}

LATTE_END
