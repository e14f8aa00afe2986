// Small dense products on packed operands.
#pragma once
#include "vec.h"

LATTE_BEGIN

constexpr int kTileRows = 6;  // 6 rows of 2 vectors: 12 of AVX2's 16 registers accumulate
template <class T>
constexpr int kTileCols = 2 * kWidth<T>;

// With heads innermost in memory every row of a head lies on another page, where the machine's own prefetching stops.
constexpr int64_t kAhead = 16;
template <class T>
LATTE_INLINE void fetch_row(const T* row, int64_t width) {
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t c = 0; c < width; c += line) __builtin_prefetch(row + c);
}

// A matrix (n, width) cut into panels of kTileCols columns, each panel (n, kTileCols) contiguous: what the product streams
// through. Rows where `keep` is negative become zeros, so that padding (NaN, say) reaches nothing.
template <class T, class I>
void pack_rows(T* to, const T* from, int64_t stride, int64_t n, int64_t width, const I* keep) {
    constexpr int64_t N = kTileCols<T>;
    for (int64_t i = 0; i < n; ++i) {
        const T* row = from + i * stride;
        if (i + kAhead < n) fetch_row(row + kAhead * stride, width);
        for (int64_t c = 0; c < width; c += N) {
            T* cell = to + c * n + i * N;
            const int64_t m = min64(N, width - c);
            if (keep && keep[i] < 0) {
                memset(cell, 0, N * sizeof(T));
            } else if (m == N) {
                memcpy(cell, row + c, N * sizeof(T));
            } else {
                for (int64_t j = 0; j < N; ++j) cell[j] = j < m ? row[c + j] : T(0);
            }
        }
    }
}

#if defined(__AVX2__)
// Eight rows of eight floats, turned: to[c * step + r] = scale * from[r * stride + c].
LATTE_INLINE void turn_eight(float* to, int64_t step, const float* from, int64_t stride, float scale) {
    __m256 x[8], y[8];
    // A row's halves lie beside those of the row four further on, so that what follows stays within the halves of a register.
    for (int r = 0; r < 4; ++r)
        for (int half = 0; half < 2; ++half)
            x[4 * half + r] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + r * stride + 4 * half)),
                                                   _mm_loadu_ps(from + (r + 4) * stride + 4 * half), 1) * scale;
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 2; ++i) {
            const __m256 a = y[4 * half + i], b = y[4 * half + 2 + i];
            _mm256_storeu_ps(to + (4 * half + 2 * i) * step, _mm256_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0)));
            _mm256_storeu_ps(to + (4 * half + 2 * i + 1) * step, _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
        }
}
#endif
template <class T>
LATTE_INLINE void turn_eight(T* to, int64_t step, const T* from, int64_t stride, T scale) {
    for (int r = 0; r < 8; ++r)
        for (int c = 0; c < 8; ++c) to[c * step + r] = from[r * stride + c] * scale;
}

// The transpose (width, n) of the same, in panels of kTileCols rows of the original; the last panel is filled with zeros.
template <class T, class I>
void pack_columns(T* to, const T* from, int64_t stride, int64_t n, int64_t width, const I* keep) {
    constexpr int64_t N = kTileCols<T>;
    for (int64_t i = 0; i < n; i += N, to += width * N) {
        int64_t done = 0;  // rows of this panel
        if (!keep)
            for (; done + 8 <= min64(N, n - i); done += 8) {
                const T* rows = from + (i + done) * stride;
                for (int64_t r = kAhead; r < kAhead + 8 && i + done + r < n; ++r) fetch_row(rows + r * stride, width);
                int64_t c = 0;
                for (; c + 8 <= width; c += 8) turn_eight(to + c * N + done, N, rows + c, stride, T(1));
                for (; c < width; ++c)
                    for (int64_t j = 0; j < 8; ++j) to[c * N + done + j] = rows[j * stride + c];
            }
        for (int64_t j = done; j < N; ++j) {
            if (i + j < n && !(keep && keep[i + j] < 0)) {
                const T* row = from + (i + j) * stride;
                for (int64_t c = 0; c < width; ++c) to[c * N + j] = row[c];
            } else {
                for (int64_t c = 0; c < width; ++c) to[c * N + j] = 0;
            }
        }
    }
}

// The transpose (width, N) of n <= N rows times `scale`; columns behind the last row are zero.
template <int64_t N, class T>
LATTE_INLINE void turn_scaled(T* to, const T* from, int64_t stride, int64_t n, int64_t width, T scale) {
    int64_t done = 0;
    for (; done + 8 <= n; done += 8) {
        const T* rows = from + done * stride;
        int64_t c = 0;
        for (; c + 8 <= width; c += 8) turn_eight(to + c * N + done, N, rows + c, stride, scale);
        for (; c < width; ++c)
            for (int64_t r = 0; r < 8; ++r) to[c * N + done + r] = rows[r * stride + c] * scale;
    }
    for (int64_t c = 0; c < width && done < N; ++c)
        for (int64_t r = done; r < N; ++r) to[c * N + r] = r < n ? from[r * stride + c] * scale : T(0);
}

// to = scale * from.
template <class T>
LATTE_INLINE void copy_scaled(T* to, const T* from, int64_t n, T scale) {
    constexpr int W = kWidth<T>;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i) * scale);
    for (; i < n; ++i) to[i] = from[i] * scale;
}

// C[Rows][Vectors] (+)= A[Rows][K] B[K][Vectors]; A is read one element at a time, at any strides. Rows are scaled in the end if
// `scale` is given. `zero`: 0 times every number of C is added to it, so it stays 0 if all are finite.
template <class T, bool Add, int Rows = kTileRows, int Vectors = 2>
LATTE_INLINE void product(const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t K, T* c, int64_t ldc,
                          const T* scale = nullptr, Vec<T>* zero = nullptr) {
    constexpr int W = kWidth<T>;
    Vec<T> acc[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
        for (int j = 0; j < Vectors; ++j) acc[r][j] = Add ? load(c + r * ldc + j * W) : Vec<T>{};
    for (int64_t k = 0; k < K; ++k, a += col, b += ldb) {
        Vec<T> columns[Vectors];
        for (int j = 0; j < Vectors; ++j) columns[j] = load(b + j * W);
        for (int r = 0; r < Rows; ++r) {
            const Vec<T> x = splat(a[r * row]);
            for (int j = 0; j < Vectors; ++j) acc[r][j] = x * columns[j] + acc[r][j];
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int j = 0; j < Vectors; ++j) {
            if (scale) acc[r][j] *= scale[r];
            if (zero) *zero += acc[r][j] * T(0);
            store(c + r * ldc + j * W, acc[r][j]);
        }
}

LATTE_END
