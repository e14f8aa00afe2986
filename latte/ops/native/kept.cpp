// Tokens kept behind a window: which ones, event by event, and the forward pass of attention to them.
#include "kept.h"

LATTE_BEGIN

LATTE_INLINE float natural_log(float x) { return ::logf(x); }
LATTE_INLINE double natural_log(double x) { return ::log(x); }

// The slots of one key-value head while events pass.
template <class T>
struct Slots {
    int64_t N, held = 0, worst = -1;
    T* score;
    int64_t *order, *source;  // of equal scores the one of higher order is worse
    int32_t* entry;           // of the present block

    // The worst slot, of which there is one: all are held.
    void find_worst() {
        worst = 0;
        for (int64_t i = 1; i < N; ++i)
            if (score[i] < score[worst] || (score[i] == score[worst] && order[i] > order[worst])) worst = i;
    }
};

template <class T>
void select_head(const KeptSelect& w, int64_t b, int64_t g, Slots<T>& slots) {
    const int64_t N = w.N, C = w.C, I = N + C, blocks = (w.T + C - 1) / C;
    const T* score0 = (const T*)w.score + (b * w.G + g) * N;
    const int64_t* place0 = w.place + (b * w.G + g) * N;
    slots.held = 0, slots.worst = -1;
    for (int64_t i = 0; i < N; ++i) {
        slots.score[i] = score0[i], slots.order[i] = place0[i], slots.source[i] = place0[i] < 0 ? -1 : i;
        slots.held += place0[i] >= 0;
    }
    int64_t document = 0;
    bool over = false;  // behind the last token of the row
    for (int64_t n = 0; n < blocks; ++n) {
        int32_t* source = w.source + ((b * blocks + n) * w.G + g) * I;
        int32_t* last = w.last + ((b * blocks + n) * w.G + g) * I;
        for (int64_t i = 0; i < N; ++i) {
            source[i] = int32_t(slots.source[i] < 0 ? 0 : slots.source[i]);
            last[i] = slots.source[i] < 0 || over ? -1 : int32_t(C - 1);
            slots.entry[i] = int32_t(i);
        }
        for (int64_t c = 0; c < C; ++c) {
            const int64_t t = n * C + c;
            source[N + c] = int32_t(N + min64(t, w.T - 1)), last[N + c] = -1;
            if (t >= w.T || over) continue;
            const int64_t segment = w.segment[b * w.T + t];
            const auto end_all = [&] {
                for (int64_t i = 0; i < N; ++i)
                    if (slots.source[i] >= 0) last[slots.entry[i]] = int32_t(c - 1);
            };
            if (segment < 0) {
                end_all(), over = true;
                continue;
            }
            if (segment > document) {
                end_all();
                for (int64_t i = 0; i < N; ++i) slots.source[i] = -1;
                slots.held = 0, slots.worst = -1, document = segment;
            }
            if (!w.there[b * w.T + t]) continue;
            const T score = ((const T*)w.event)[(b * w.T + t) * w.G + g];
            int64_t slot = slots.held;
            if (slots.held < N) {
                // Empty slots are taken in order; those of a state are its first ones.
                while (slots.source[slot] >= 0) slot = (slot + 1) % N;
                ++slots.held;
            } else {
                if (slots.worst < 0) slots.find_worst();
                slot = slots.worst;
                if (!(score > slots.score[slot])) continue;
                last[slots.entry[slot]] = int32_t(c);
            }
            slots.score[slot] = score, slots.order[slot] = (int64_t(1) << 40) + t, slots.source[slot] = N + t;
            slots.entry[slot] = int32_t(N + c), last[N + c] = int32_t(C - 1), slots.worst = -1;
        }
    }
    for (int64_t i = 0; i < N; ++i) w.after[(b * w.G + g) * N + i] = slots.source[i];
}

template <class T>
void kept_select_typed(const KeptSelect& w) {
    const int64_t threads = useful_threads(w.threads, 30.0 * double(w.B * w.G * w.T));
    parallel(w.B * w.G, threads, [&](int64_t begin, int64_t end) {
        Scratch mem(room(w.N, sizeof(T)) + 2 * room(w.N, 8) + room(w.N, 4));
        Slots<T> slots;
        slots.N = w.N, slots.score = mem.take<T>(w.N), slots.order = mem.take<int64_t>(w.N);
        slots.source = mem.take<int64_t>(w.N), slots.entry = mem.take<int32_t>(w.N);
        for (int64_t u = begin; u < end; ++u) select_head(w, u / w.G, u % w.G, slots);
    });
}

// Scores p[entries][kGroup] of one vector of queries, the first of which is query `at` of the block, to exp(score - maximum).
template <class T>
LATTE_INLINE void softmax_lanes(const KeptForward& w, const Entry* entries, int64_t n, int64_t at, const T* bias, T* p, T* sum,
                                T* top) {
    constexpr int64_t W = kWidth<T>, Q = kGroup<T>;
    const Vec<T> none = splat(T(kNothing));
    Vec<T> most = none, total{};
    for (int64_t j = 0; j < n; ++j) {
        Vec<T> x = load(p + j * Q);
        if (w.softcap > 0) x = vtanh(x / T(w.softcap)) * T(w.softcap);
        if (bias) x += bias[j];
        if (entries[j].first > at || entries[j].last < at + W - 1) x = sees<T>(entries[j], at) ? x : none;
        store(p + j * Q, x);
        most = vmax<T>(most, x);
    }
    const Vec<T> shift = most > T(kNothing / 2) ? most : Vec<T>{};
    for (int64_t j = 0; j < n; ++j) {
        Vec<T> x[1] = {load(p + j * Q) - shift};
        vexp_down(x);
        // Where nothing is seen by a query: 0, and not the least number that the exponential gives.
        if (entries[j].first > at || entries[j].last < at + W - 1) x[0] = sees<T>(entries[j], at) ? x[0] : Vec<T>{};
        store(p + j * Q, x[0]);
        total += x[0];
    }
    store(sum, total), store(top, most);
}

// The output of one query from the entries that it sees and no others: a value that is not finite must not reach the others.
template <class T>
void own_output(const Entry* entries, int64_t n, int64_t query, const T* p, const T* values, int64_t width, T inverse, T* y) {
    constexpr int64_t W = kWidth<T>, Q = kGroup<T>;
    for (int64_t c = 0; c < width; c += W) {
        Vec<T> total{};
        for (int64_t j = 0; j < n; ++j)
            if (entries[j].first <= query && query <= entries[j].last)
                total = p[j * Q] * load_some(values + j * width + c, width - c, T(0)) + total;
        store_some(y + c, total * inverse, width - c);
    }
}

template <class T>
void kept_forward_typed(const KeptForward& w) {
    constexpr int64_t W = kWidth<T>, Q = kGroup<T>, N = kTileCols<T>;
    constexpr int R = kRowsOut<T>;
    const int64_t group = w.H / w.G, most = w.N + 2 * w.C, rows = most + kSpare;
    const int64_t Vp = round_up(w.V, N);
    const double work = double(w.B * w.T * w.H) * double((w.N + w.C) * (w.D + w.V));
    parallel(w.B * w.G * w.blocks, useful_threads(w.threads, work), [&](int64_t begin, int64_t end) {
        const int64_t size = sizeof(T);
        Scratch mem(room(most, sizeof(Entry)) + room(rows, size) + room(rows * w.D, size) + room(rows * w.V, size) +
                    room(rows * Vp, size) + 2 * room(Q * w.D, size) + room(rows * Q, size) + 3 * room(Q, size) + room(R * Vp, size));
        Entry* entries = mem.take<Entry>(most);
        T *bias_room = mem.take<T>(rows), *keys = mem.take<T>(rows * w.D), *values = mem.take<T>(rows * w.V);
        T* packed = mem.take<T>(rows * Vp);
        T *turned = mem.take<T>(Q * w.D), *turned_far = mem.take<T>(Q * w.D), *p = mem.zeros<T>(rows * Q);
        T *sum = mem.take<T>(Q), *top = mem.take<T>(Q), *inverse = mem.take<T>(Q), *out = mem.take<T>(R * Vp);
        for (int64_t u = begin; u < end; ++u) {
            const int64_t b = u / w.blocks / w.G, g = u / w.blocks % w.G, n = u % w.blocks;
            const Count count = list_entries(w, b, n, g, entries);
            const int64_t i0 = n * w.C, queries = min64(w.C, w.T - i0);
            gather_rows(keys, w.D, w.k, w.kb, w.D, b, g, entries, count);
            gather_rows(values, w.V, w.v, w.v, w.V, b, g, entries, count);
            pack_rows(packed, values, w.V, count.all, w.V, (const int32_t*)nullptr);
            if (w.bias)
                for (int64_t j = 0; j < count.all; ++j) bias_room[j] = ((const T*)w.bias)[(b * w.S + entries[j].source) * w.G + g];
            for (int64_t h = g * group; h < (g + 1) * group; ++h)
                for (int64_t i = 0; i < queries; i += Q) {
                    const int64_t some = min64(Q, queries - i);
                    turn_scaled<Q>(turned, row_of<T>(w.q, b, i0 + i, h), w.q.t, some, w.D, T(w.scale));
                    if (count.near < count.all)
                        turn_scaled<Q>(turned_far, row_of<T>(w.qf, b, i0 + i, h), w.qf.t, some, w.D, T(w.scale));
                    entry_products(keys, w.D, w.D, count, turned, turned_far, p);
                    for (int a = 0; a < kPair; ++a)
                        softmax_lanes(w, entries, count.all, i + a * W, w.bias ? bias_room : nullptr, p + a * W, sum + a * W, top + a * W);
                    for (int64_t r = 0; r < some; ++r) {
                        const bool empty = !(top[r] > T(kNothing / 2)) && sum[r] == sum[r];  // NaN is not nothing
                        ((T*)w.lse)[(b * w.T + i0 + i + r) * w.H + h] = empty ? T(kNothing) : top[r] + natural_log(sum[r]);
                        inverse[r] = empty ? T(0) : T(1) / sum[r];
                    }
                    for (int64_t r = some; r < Q; ++r) inverse[r] = 0;
                    for (int64_t r = 0; r < some; r += R) {
                        for (int64_t c = 0; c < Vp; c += N)
                            product<T, false, R>(p + r, 1, Q, packed + c * count.all, N, count.all, out + c, Vp, inverse + r);
                        for (int64_t j = 0; j < min64(R, some - r); ++j) {
                            T *y = row_of<T>(w.y, b, i0 + i + r + j, h), zero = 0;
                            for (int64_t c = 0; c < w.V; ++c) zero += out[j * Vp + c] * T(0);
                            if (zero == 0) {
                                copy_row(y, out + j * Vp, w.V);
                            } else {
                                own_output(entries, count.all, i + r + j, p + r + j, values, w.V, inverse[r + j], y);
                            }
                        }
                    }
                }
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void kept_select(const KeptSelect* w) { w->is_double ? kept_select_typed<double>(*w) : kept_select_typed<float>(*w); }
void kept_forward(const KeptForward* w) { w->is_double ? kept_forward_typed<double>(*w) : kept_forward_typed<float>(*w); }
}  // namespace LATTE_ISA
}  // namespace latte
