// Sliding-window softmax attention: which keys a query sees, for the forward and the backward pass.
//
// A task is a span of queries of one key-value head with all the keys they see. The maximum of a row is over the keys that the
// row sees: nothing depends on a key outside its window.
#pragma once
#include "args.h"
#include "gemm.h"
#include "work.h"

LATTE_BEGIN

constexpr double kEmpty = -1e30;

// Where a task lies: queries [i0, i0 + n) see keys [j0, j0 + m).
struct Span {
    int64_t b, g, i0, n, j0, m;
};

template <class A>
Span span_of(const A& w, int64_t step, int64_t align, int64_t b, int64_t s, int64_t g) {
    const int64_t hist = w.S - w.T, i0 = s * step, n = min64(step, w.T - i0);
    const int64_t j0 = max64(0, hist + i0 - w.left) / align * align, j1 = min64(w.S, hist + i0 + n + w.right);
    return {b, g, i0, n, j0, j1 - j0};
}

// Keys [lo, hi) of a row, counted from the task's first key.
template <class A>
LATTE_INLINE void seen(const A& w, const Span& s, int64_t i, int64_t& lo, int64_t& hi) {
    const int64_t at = w.S - w.T + i;
    lo = max64(at - w.left, 0) - s.j0;
    hi = min64(at + w.right + 1, w.S) - s.j0;
}

template <class T>
LATTE_INLINE T* at(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}

// Keys [lo, hi) that any of the queries [i, i + n) sees.
template <class A>
LATTE_INLINE void seen_by(const A& w, const Span& s, int64_t i, int64_t n, int64_t& lo, int64_t& hi) {
    int64_t skip;
    seen(w, s, i, lo, skip);
    seen(w, s, i + n - 1, skip, hi);
}

// Ids of the keys of a task in integers as wide as T, so that a comparison gives a mask for T; -2 behind the end.
template <class T>
const Int<T>* key_ids(Int<T>* to, const int32_t* ids, int64_t m, int64_t padded_m) {
    if (!ids) return nullptr;
    for (int64_t j = 0; j < padded_m; ++j) to[j] = j < m ? ids[j] : -2;
    return to;
}

template <class T>
LATTE_INLINE Mask<T> visible(int64_t j, int64_t lo, int64_t hi, const Int<T>* ids, Int<T> id) {
    Mask<T> index;
    for (int i = 0; i < kWidth<T>; ++i) index[i] = Int<T>(j + i);
    Mask<T> ok = (index >= Int<T>(lo)) & (index < Int<T>(hi));
    if (ids) {
        Mask<T> other;
        memcpy(&other, ids + j, sizeof(other));
        ok &= other == id;
    }
    return ok;
}

LATTE_END
