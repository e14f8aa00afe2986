// Attention to tokens that are kept behind a window: which keys a block of queries sees, for the forward and the backward pass.
//
// A task is a block of C queries of one key-value head. It has N + C sources: the slots before its first query, then the tokens
// that come in at its queries. A source is seen by a range of the block's queries; where keys may be out of reach, the part of
// this range beyond it is an entry of its own, with the key turned back and another query.
#pragma once
#include "args.h"
#include "gemm.h"
#include "work.h"

LATTE_BEGIN

constexpr double kNothing = -1e30;
// Queries of a vector pair, and keys that meet them at a time.
constexpr int kPair = 2;
constexpr int kMeet = kBytes == 64 ? 8 : 6;
template <class T>
constexpr int64_t kGroup = kPair * kWidth<T>;
// Queries whose outputs are summed at a time: they divide those of a vector pair.
template <class T>
constexpr int kRowsOut = kBytes == 64 ? 8 : kWidth<T> < 4 ? kWidth<T> : 4;
// Rows behind the last entry that tiles may touch.
constexpr int64_t kSpare = 8;

struct Entry {
    int64_t source;
    Int<double> first, last;  // queries of the block, both included
};

template <class T>
LATTE_INLINE T* row_of(const View& v, int64_t b, int64_t t, int64_t h) {
    return (T*)v.data + b * v.b + t * v.t + h * v.h;
}

// The entries of block n: near ones, then those out of reach. Returns how many there are of both.
struct Count {
    int64_t near, all;
};
template <class A>
Count list_entries(const A& w, int64_t b, int64_t n, int64_t g, Entry* to) {
    const int64_t I = w.N + w.C, row = ((b * w.blocks + n) * w.G + g) * I;
    const int32_t *source = w.source + row, *last = w.last + row;
    const int64_t end = min64(w.C, w.T - n * w.C) - 1;
    Count count{0, 0};
    for (int far = 0; far < (w.reach ? 2 : 1); ++far) {
        for (int64_t i = 0; i < I; ++i) {
            int64_t lo = i < w.N ? 0 : i - w.N + 1, hi = min64(last[i], end);
            if (hi < lo) continue;
            if (w.reach) {
                // Within a document queries follow each other: the last one within reach.
                const int64_t distance = w.place_q[b * w.T + n * w.C + lo] - w.place_k[(b * w.S + source[i]) * w.G + g];
                const int64_t near = lo + w.reach - distance;
                far ? lo = max64(lo, near + 1) : hi = min64(hi, near);
                if (hi < lo) continue;
            }
            to[count.all++] = {source[i], lo, hi};
        }
        if (!far) count.near = count.all;
    }
    return count;
}

// Keys or values of the entries, one row after another; rows up to a multiple of what a tile takes are zero.
template <class T>
void gather_rows(T* to, int64_t ld, const View& near, const View& far, int64_t width, int64_t b, int64_t g, const Entry* entries,
                 Count count) {
    for (int64_t i = 0; i < count.all + kSpare; ++i) {
        T* row = to + i * ld;
        int64_t filled = 0;
        if (i < count.all) {
            if (i + kAhead < count.all) fetch_row(row_of<T>(i + kAhead < count.near ? near : far, b, entries[i + kAhead].source, g), width);
            copy_row(row, row_of<T>(i < count.near ? near : far, b, entries[i].source, g), width);
            filled = width;
        }
        for (int64_t c = filled; c < ld; ++c) row[c] = 0;
    }
}

// p[entry][kGroup] = rows . turned, for all entries; the near ones meet one matrix of columns, the others another.
template <class T>
void entry_products(const T* rows, int64_t ld, int64_t width, Count count, const T* turned, const T* turned_far, T* p) {
    constexpr int64_t Q = kGroup<T>;
    const auto part = [&](int64_t from, int64_t to, const T* columns) __attribute__((always_inline)) {
        for (int64_t j = from; j < to; j += kMeet) product<T, false, kMeet, kPair>(rows + j * ld, ld, 1, columns, Q, width, p + j * Q, Q);
    };
    // A tile may write behind its part: what belongs to the far entries is written afterwards.
    part(0, count.near, turned);
    if (count.near < count.all) part(count.near, count.all, turned_far);
}

// Lanes of vector `at` of the queries that see an entry.
template <class T>
LATTE_INLINE Mask<T> sees(const Entry& e, int64_t at) {
    Mask<T> lane;
    for (int i = 0; i < kWidth<T>; ++i) lane[i] = Int<T>(at + i);
    return (lane >= Int<T>(e.first)) & (lane <= Int<T>(e.last));
}

LATTE_END
