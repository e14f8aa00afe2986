// Recurrences of D channels with N slots each, whose state would fill memory if it were written out for every token.
//
// Lanes are channels. A thread owns some of the channels of a row, in tiles of one vector, and walks the tokens in blocks: within
// one, tile after tile, so that a tile's state stays in the first-level cache. The state before every block is kept; the gradient
// computes a block's states again from there, and walks back. What all channels share (N numbers a token) has gradients that
// are sums over channels: every thread writes sums over its own.
//
// A Cell says how one slot of a tile takes a token. `in` are a token's inputs of the channels, `shared` those of the slot, `par`
// constants, `s` the state; `g` is its gradient, which `back` turns from that after the token into that before it. Lanes behind
// the last channel have inputs of 0, and kFill for constants and state: sums over channels must stay numbers.
#pragma once
#include "args.h"
#include "work.h"

LATTE_BEGIN

constexpr int64_t kBlock = 64;

// Vectors of R from numbers of type T.
template <class R, class T>
LATTE_INLINE Vec<R> load_as(const T* p, int64_t n) {
    if constexpr (sizeof(R) == sizeof(T)) return load_some(p, n, T(0));
    Vec<R> v{};
    if (n >= kWidth<R>)
        for (int i = 0; i < kWidth<R>; ++i) v[i] = R(p[i]);
    else
        for (int64_t i = 0; i < n; ++i) v[i] = R(p[i]);
    return v;
}
template <class R, class T>
LATTE_INLINE void store_as(T* p, Vec<R> v, int64_t n) {
    if constexpr (sizeof(R) == sizeof(T)) return store_some((R*)p, v, n);
    for (int64_t i = 0; i < min64(n, kWidth<R>); ++i) p[i] = T(v[i]);
}

// Where a unit of work lies: tiles [first, last) of row b.
struct Span {
    int64_t b, cut, first, last;
};
template <class R, class A>
Span span(const A& g, int64_t unit) {
    const int64_t tiles = (g.D + kWidth<R> - 1) / kWidth<R>, cut = unit % g.cuts;
    return {unit / g.cuts, cut, tiles * cut / g.cuts, tiles * (cut + 1) / g.cuts};
}

// One token of a tile: state s, n slots.
template <class Cell, class T, class A>
LATTE_INLINE Vec<typename Cell::R> take(const A& g, int64_t row, int64_t c, int64_t n, const Vec<typename Cell::R>* par,
                                        const Vec<typename Cell::R>* before, Vec<typename Cell::R>* after) {
    typedef typename Cell::R R;
    Vec<R> in[Cell::I], y{};
    for (int i = 0; i < Cell::I; ++i) in[i] = load_as<R>((const T*)g.in[i] + row * g.D + c, n);
    const R* shared = (const R*)g.shared + row * Cell::H * g.N;
    for (int64_t k = 0; k < g.N; ++k) y = y + Cell::step(in, shared + k, g.N, par + k * Cell::P, before + k * Cell::S, after + k * Cell::S);
    return y;
}

template <class Cell, class A>
LATTE_INLINE void load_parameters(const A& g, int64_t c, int64_t n, Vec<typename Cell::R>* par) {
    typedef typename Cell::R R;
    for (int64_t k = 0; k < g.N; ++k)
        for (int p = 0; p < Cell::P; ++p) par[k * Cell::P + p] = load_some((const R*)g.par + (p * g.N + k) * g.D + c, n, R(Cell::kFill));
}

template <class R>
LATTE_INLINE void load_state(const void* from, int64_t slots, int64_t D, int64_t c, int64_t n, R fill, Vec<R>* s) {
    for (int64_t k = 0; k < slots; ++k) s[k] = load_some((const R*)from + k * D + c, n, fill);
}
template <class R>
LATTE_INLINE void store_state(void* to, int64_t slots, int64_t D, int64_t c, int64_t n, const Vec<R>* s) {
    for (int64_t k = 0; k < slots; ++k) store_some((R*)to + k * D + c, s[k], n);
}

template <class Cell, class T>
void filter_forward_typed(const FilterForward& g) {
    typedef typename Cell::R R;
    typedef Vec<R> V;
    constexpr int64_t W = kWidth<R>;
    const int64_t slots = g.N * Cell::S, blocks = (g.T + kBlock - 1) / kBlock;
    parallel(g.B * g.cuts, useful_threads(g.threads, 8.0 * double(g.B * g.T * g.D) * double(g.N)), [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u) {
            const Span at = span<R>(g, u);
            Scratch mem(((at.last - at.first) * slots + g.N * Cell::P) * int64_t(sizeof(V)) + 128);
            V *states = mem.take<V>((at.last - at.first) * slots), *par = mem.take<V>(g.N * Cell::P);
            for (int64_t block = 0; block < blocks; ++block)
                for (int64_t tile = at.first; tile < at.last; ++tile) {
                    const int64_t c = tile * W, n = min64(W, g.D - c), stop = min64(g.T, (block + 1) * kBlock);
                    V* s = states + (tile - at.first) * slots;
                    load_parameters<Cell>(g, c, n, par);
                    if (block == 0) load_state<R>((const R*)g.h0 + at.b * slots * g.D, slots, g.D, c, n, R(Cell::kFill), s);
                    store_state<R>((R*)g.kept + (at.b * blocks + block) * slots * g.D, slots, g.D, c, n, s);
                    for (int64_t t = block * kBlock; t < stop; ++t) {
                        const int64_t row = at.b * g.T + t;
                        if (g.reset && g.reset[row]) for (int64_t k = 0; k < slots; k += Cell::S) Cell::clear(s + k);
                        V y{};
                        if (!g.mask || g.mask[row]) y = take<Cell, T>(g, row, c, n, par, s, s);
                        store_as<R>((T*)g.y + row * g.D + c, y, n);
                    }
                    if (block == blocks - 1) store_state<R>((R*)g.h1 + at.b * slots * g.D, slots, g.D, c, n, s);
                }
        }
    });
}

// One tile's way through a block, forth and back.
template <class Cell, class T>
struct Sweep {
    typedef typename Cell::R R;
    typedef Vec<R> V;
    const FilterBackward& g;
    int64_t b, c, n, start, stop, slots;
    V *par, *path, *slope, *dpar, *dshared, *fresh;

    bool resets(int64_t t) const { return g.reset && g.reset[b * g.T + t]; }
    bool real(int64_t t) const { return !g.mask || g.mask[b * g.T + t]; }
    // The state that token t meets: `path` holds those after each token, the block's first one in front.
    const V* before(int64_t t) const { return resets(t) ? fresh : path + (t - start) * slots; }

    void forth() const {
        for (int64_t t = start; t < stop; ++t) {
            V* after = path + (t - start + 1) * slots;
            if (real(t))
                take<Cell, T>(g, b * g.T + t, c, n, par, before(t), after);
            else
                memcpy((void*)after, (const void*)before(t), size_t(slots) * sizeof(V));
        }
    }
    void back() const {
        for (int64_t t = stop - 1; t >= start; --t) {
            const int64_t row = b * g.T + t;
            V in[Cell::I], din[Cell::I] = {};
            if (real(t)) {
                for (int i = 0; i < Cell::I; ++i) in[i] = load_as<R>((const T*)g.in[i] + row * g.D + c, n);
                const V dy = load_as<R>((const T*)g.dy + row * g.D + c, n), *s0 = before(t), *s1 = path + (t - start + 1) * slots;
                const R* shared = (const R*)g.shared + row * Cell::H * g.N;
                V* dsum = dshared + (t - start) * Cell::H * g.N;
                for (int64_t k = 0; k < g.N; ++k)
                    Cell::back(in, shared + k, g.N, par + k * Cell::P, s0 + k * Cell::S, s1 + k * Cell::S, dy, slope + k * Cell::S, din, dsum + k * Cell::H, dpar + k * Cell::P);
            }
            for (int i = 0; i < Cell::I; ++i) store_as<R>((T*)g.din[i] + row * g.D + c, din[i], n);
            if (resets(t)) memset((void*)slope, 0, size_t(slots) * sizeof(V));
        }
    }
};

template <class Cell, class T>
void filter_backward_typed(const FilterBackward& g) {
    typedef typename Cell::R R;
    typedef Vec<R> V;
    constexpr int64_t W = kWidth<R>;
    const int64_t slots = g.N * Cell::S, blocks = (g.T + kBlock - 1) / kBlock, params = g.N * Cell::P, sums = kBlock * g.N * Cell::H;
    parallel(g.B * g.cuts, useful_threads(g.threads, 8.0 * double(g.B * g.T * g.D) * double(g.N)), [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u) {
            const Span at = span<R>(g, u);
            const int64_t tiles = at.last - at.first;
            Scratch mem((tiles * slots + 2 * params + (kBlock + 2) * slots + sums) * int64_t(sizeof(V)) + tiles * params * W * 8 + 640);
            V *slopes = mem.take<V>(tiles * slots), *par = mem.take<V>(params), *path = mem.take<V>((kBlock + 1) * slots), *fresh = mem.take<V>(slots);
            V *dpar = mem.take<V>(params), *dshared = mem.take<V>(sums);
            double* totals = mem.zeros<double>(tiles * params * W);
            for (int64_t k = 0; k < slots; k += Cell::S) Cell::clear(fresh + k);
            for (int64_t block = blocks - 1; block >= 0; --block) {
                const int64_t start = block * kBlock, stop = min64(g.T, start + kBlock);
                memset((void*)dshared, 0, size_t(sums) * sizeof(V));
                for (int64_t tile = at.first; tile < at.last; ++tile) {
                    const int64_t c = tile * W, n = min64(W, g.D - c);
                    V* slope = slopes + (tile - at.first) * slots;
                    load_parameters<Cell>(g, c, n, par);
                    memset((void*)dpar, 0, size_t(params) * sizeof(V));
                    if (block == blocks - 1) load_state<R>((const R*)g.dh1 + at.b * slots * g.D, slots, g.D, c, n, R(0), slope);
                    load_state<R>((const R*)g.kept + (at.b * blocks + block) * slots * g.D, slots, g.D, c, n, R(Cell::kFill), path);
                    const Sweep<Cell, T> sweep{g, at.b, c, n, start, stop, slots, par, path, slope, dpar, dshared, fresh};
                    sweep.forth();
                    sweep.back();
                    double* total = totals + (tile - at.first) * params * W;
                    for (int64_t k = 0; k < params; ++k)
                        for (int i = 0; i < W; ++i) total[k * W + i] += double(dpar[k][i]);
                    if (block == 0) store_state<R>((R*)g.dh0 + at.b * slots * g.D, slots, g.D, c, n, slope);
                }
                for (int64_t t = start; t < stop; ++t)
                    for (int64_t k = 0; k < g.N * Cell::H; ++k)
                        ((R*)g.dshared)[((at.cut * g.B + at.b) * g.T + t) * g.N * Cell::H + k] = sum_lanes<R>(dshared[(t - start) * g.N * Cell::H + k]);
            }
            for (int64_t tile = at.first; tile < at.last; ++tile)
                for (int64_t k = 0; k < params; ++k)
                    for (int64_t i = 0; i < min64(W, g.D - tile * W); ++i)
                        ((R*)g.dpar)[(at.b * params + k) * g.D + tile * W + i] = R(totals[((tile - at.first) * params + k) * W + i]);
        }
    });
}

LATTE_END
