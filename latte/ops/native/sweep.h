// The one inner loop of the recurrent kernels: a chunk of tokens through a matrix-valued state.
//
//     forward   acc[r][c] = f_t acc[r][c] + a_t[r] b_t[c];   out_t[c] += sum_r d_t[r] acc[r][c]
//     reverse   acc[r][c] += a_t[r] b_t[c];   out_t[c] += sum_r d_t[r] acc[r][c];   acc[r][c] = f_t acc[r][c]
//
// A tile of the state (4 rows, 2 vectors) stays in registers while all tokens of the chunk pass, so a token costs two fused
// multiply-adds a state element and next to no memory traffic. Outputs and all gradients of causal Latte and of decay attention
// are this loop with the roles of the operands exchanged:
//
//     output     acc = S    (key x value)   a = key    b = value   d = query  out = y
//     d query    acc = S^T  (value x key)   a = value  b = key     d = dy     out = dq
//     d value    acc = R    (key x value)   a = query  b = dy      d = key    out = dv   (reverse)
//     d key      acc = R^T  (value x key)   a = dy     b = query   d = value  out = dk   (reverse)
#pragma once
#include "vec.h"

LATTE_BEGIN

enum class Decay {
    rare_row,   // f_t[r], only at tokens with a flag
    rare_lane,  // f_t[c], only at tokens with a flag
    scalar,     // f_t, every token
    row,        // f_t[r], every token
    lane,       // f_t[c], every token
};

constexpr int kRows = 4;

template <class T>
struct Sweep {
    T* acc;  // (rows, cols)
    int64_t rows, cols;
    const T *a, *b, *d;  // (n, rows), (n, cols), (n, rows)
    T* out;              // (n, cols)
    const T* f;          // (n, rows), (n, cols) or (n)
    const uint8_t* flag;
    int64_t n;
    const T* rescale = nullptr;  // (rows) or (cols), as f: of the whole state, after a forward sweep, before a reverse one
};

template <class T>
LATTE_INLINE constexpr int64_t padded(int64_t n) {
    return round_up(n, kWidth<T> > kRows ? kWidth<T> : kRows);
}

// `First`: the tile that opens its outputs.
template <class T, Decay D, bool R, int NV, bool First>
LATTE_INLINE void sweep_tile(const Sweep<T>& s, int64_t row, int64_t col) {
    constexpr int W = kWidth<T>;
    constexpr bool rare = D == Decay::rare_row || D == Decay::rare_lane, by_row = D == Decay::rare_row || D == Decay::row;
    // In registers, or the compiler reads them again after every store.
    const int64_t rows = s.rows, cols = s.cols, n = s.n, ldf = D == Decay::scalar ? 1 : by_row ? rows : cols;
    const uint8_t* const flag = s.flag;
    const T* const factor = s.f + (D == Decay::scalar ? 0 : by_row ? row : col);
    Vec<T> acc[kRows][NV];
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = load(s.acc + (row + r) * cols + col + j * W);

    auto scale = [&](const T* f) __attribute__((always_inline)) {
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < NV; ++j) acc[r][j] *= D == Decay::scalar ? splat(f[0]) : by_row ? splat(f[r]) : load(f + j * W);
    };

    if (R && s.rescale) scale(s.rescale + (by_row ? row : col));
    const int64_t step = R ? -1 : 1, begin = R ? n - 1 : 0;
    const T *a = s.a + begin * rows + row, *d = s.d + begin * rows + row, *b = s.b + begin * cols + col;
    T* out = s.out + begin * cols + col;
    for (int64_t i = 0, t = begin; i < n; ++i, t += step, a += step * rows, d += step * rows, b += step * cols, out += step * cols) {
        if (!R && (!rare || __builtin_expect(flag[t], 0))) scale(factor + t * ldf);
        Vec<T> y[NV], bv[NV];
        for (int j = 0; j < NV; ++j) y[j] = First ? Vec<T>{} : load(out + j * W), bv[j] = load(b + j * W);
        for (int r = 0; r < kRows; ++r) {
            const Vec<T> av = splat(a[r]), dv = splat(d[r]);
            for (int j = 0; j < NV; ++j) {
                acc[r][j] = av * bv[j] + acc[r][j];
                y[j] = dv * acc[r][j] + y[j];
            }
        }
        for (int j = 0; j < NV; ++j) store(out + j * W, y[j]);
        if (R && (!rare || __builtin_expect(flag[t], 0))) scale(factor + t * ldf);
    }
    if (!R && s.rescale) scale(s.rescale + (by_row ? row : col));
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < NV; ++j) store(s.acc + (row + r) * cols + col + j * W, acc[r][j]);
}

// `out` is written, not added to.
template <class T, Decay D, bool R>
void sweep(const Sweep<T>& s) {
    constexpr int W = kWidth<T>;
    for (int64_t col = 0; col < s.cols; col += 2 * W) {
        const bool two = col + 2 * W <= s.cols;
        two ? sweep_tile<T, D, R, 2, true>(s, 0, col) : sweep_tile<T, D, R, 1, true>(s, 0, col);
        for (int64_t row = kRows; row < s.rows; row += kRows)
            two ? sweep_tile<T, D, R, 2, false>(s, row, col) : sweep_tile<T, D, R, 1, false>(s, row, col);
    }
}

// Rows of a chunk of one head into contiguous memory, padded with zeros: with heads innermost in memory, consecutive tokens are
// kilobytes apart and would fall into the same few cache sets. Masked tokens become zeros, so that their content (NaN, say)
// reaches nothing.
template <class T>
void gather(T* to, int64_t ld, const T* from, int64_t stride, int64_t n, int64_t width, const uint8_t* mask) {
    for (int64_t t = 0; t < n; ++t) {
        T* row = to + t * ld;
        if (mask && !mask[t]) {
            memset(row, 0, size_t(ld) * sizeof(T));
            continue;
        }
        copy_row(row, from + t * stride, width);
        for (int64_t i = width; i < ld; ++i) row[i] = 0;
    }
}
template <class T>
void scatter(const T* from, int64_t ld, T* to, int64_t stride, int64_t n, int64_t width, bool past = false) {
    for (int64_t t = 0; t < n; ++t) {
        if (past)
            copy_past_cache(to + t * stride, from + t * ld, width);
        else
            copy_row(to + t * stride, from + t * ld, width);
    }
}
// (rows, cols) -> padded (cols, rows)
template <class T>
void transpose(T* to, int64_t ld, const T* from, int64_t stride, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) to[c * ld + r] = from[r * stride + c];
}

LATTE_END
