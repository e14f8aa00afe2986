// One token of a whole model in one call: all layers and the last norm, and from the id to the logits if asked. Or a few tokens of
// each row, which a draft has guessed: their products read the weights once, then each goes through the recurrences after the one
// before it. All that a token gives, its state too, is bit by bit the same however many are read in one call.
//
// At one token a layer is twenty small operations, and calling them takes as long as reading the weights. Here threads wake once
// and go through the stages of all layers together; what passes between stages stays in the cache.
#include "decode.h"
#include "norm.h"
#include "product.h"

LATTE_BEGIN

// What passes from stage to stage, for all rows.
template <class T>
struct Passed {
    Scratch mem;
    T *x, *normed, *v, *q, *k, *fed, *slots, *k_latent, *mixed, *wide;

    static int64_t most_slots(const Token& g) {
        int64_t most = 0;
        for (int64_t i = 0; i < g.layers; ++i) most = max64(most, g.layer[i].M + 1);
        return most;
    }
    explicit Passed(const Token& g) : Passed(g, g.B * g.T, most_slots(g)) {}

  private:
    Passed(const Token& g, int64_t rows, int64_t most) : Passed(g, rows, rows * g.H * most, rows * g.H * g.V, rows * g.G * g.V) {}
    Passed(const Token& g, int64_t rows, int64_t slot_room, int64_t heads, int64_t groups)
        : mem(3 * room(rows * g.D, sizeof(T)) + 2 * room(slot_room, sizeof(T)) + 2 * room(heads, sizeof(T)) + 2 * room(groups, sizeof(T)) +
              room(rows * g.I, sizeof(T))) {
        x = mem.take<T>(rows * g.D), normed = mem.take<T>(rows * g.D), fed = mem.take<T>(rows * g.D);
        slots = mem.take<T>(slot_room), k_latent = mem.take<T>(slot_room);
        q = mem.take<T>(heads), mixed = mem.take<T>(heads);
        k = mem.take<T>(groups), v = mem.take<T>(groups);
        wide = mem.take<T>(rows * g.I);
    }
};

template <class T>
class Walk {
  public:
    Walk(const Token& g, const Passed<T>& at, Runner& run) : g_(g), at_(at), run_(run) {}

    void layer(const Layer& w) {
        norm(at_.normed, at_.x, w.mixer_norm);
        read(w);
        const T* fed = w.gate_weight || w.conv ? at_.fed : at_.normed;
        if (w.feed_norm) norm(at_.fed, fed, w.feed_norm), fed = at_.fed;
        const int64_t slots = w.M + w.windowed;
        product(of(fed, g_.D, {w.latent_q, g_.H * slots, at_.slots}, {w.latent_k, g_.H * w.M, at_.k_latent}));
        mix(w);
        product(added(of(at_.mixed, g_.H * g_.V, {w.o, g_.D, at_.x})));
        norm(at_.normed, at_.x, w.mlp_norm);
        product(gated(of(at_.normed, g_.D, {w.gate, g_.I, at_.wide}, {w.up, g_.I, at_.wide})));
        product(added(of(at_.wide, g_.I, {w.down, g_.D, at_.x})));
    }

    // The last norm, and where there is a head, logits.
    void end() {
        norm(g_.words ? at_.normed : (T*)g_.y, at_.x, g_.norm);
        if (g_.words) product(of(at_.normed, g_.D, {g_.head, g_.words, (T*)g_.y}));
    }

  private:
    // In place where `to` is `from`.
    void norm(T* to, const T* from, const void* weight) {
        const int64_t rows = g_.B * g_.T, at_once = 4;
        run_.stage((rows + at_once - 1) / at_once, [=](int64_t piece) {
            for (int64_t b = piece * at_once; b < min64(rows, (piece + 1) * at_once); ++b)
                norm_row(to + b * g_.D, from + b * g_.D, (const T*)weight, g_.D, g_.eps);
        });
    }

    // x times each of the matrices that are there.
    Products of(const T* x, int64_t K, Products::Part one, Products::Part two = {}, Products::Part three = {}) const {
        const int64_t count = three.w ? 3 : two.w ? 2 : 1;
        return {g_.is_double, g_.threads, g_.B * g_.T, K, count, 0, 0, x, K, {one, two, three, {}}};
    }
    static Products gated(Products p) { return p.gated = 1, p; }
    static Products added(Products p) { return p.added = 1, p; }

    void product(const Products& p) {
        const Rows<T> rows(p);
        run_.stage(rows.pieces(), rows);
    }

    // A part of a layer's state before token t, and after it.
    template <class U>
    const U* before(int64_t t, int64_t part) const {
        return part < 0 ? nullptr : (const U*)((t ? g_.after + (t - 1) * g_.block : g_.before) + part);
    }
    template <class U>
    U* after(int64_t t, int64_t part) const {
        return part < 0 ? nullptr : (U*)(g_.after + t * g_.block + part);
    }
    T* ring(int64_t part) const { return part < 0 ? nullptr : (T*)(g_.rings + part); }

    // What comes of x directly: values, the window's queries and keys, and the recurrence or the convolution.
    void read(const Layer& w) {
        const int64_t heads = g_.H * g_.V, groups = g_.G * g_.V, units = w.gate_weight ? g_.H : w.conv ? g_.B : 0;
        const Products p = of(at_.normed, g_.D, {w.v, groups, at_.v}, {w.q, heads, at_.q}, {w.k, groups, at_.k});
        const Rows<T> rows(p);
        run_.stage(units + rows.pieces(), [&](int64_t piece) {
            if (piece >= units) return rows(piece - units);
            w.gate_weight ? recur(w, piece) : convolve(w, piece);
        });
    }

    // One head of the recurrence. Another thread may write the counts of later tokens: those before the call are read, and t added.
    void recur(const Layer& w, int64_t h) const {
        RglruStep r{g_.is_double, 1, g_.B, g_.H, g_.D / g_.H, w.power, at_.normed, g_.D, w.gate_weight, w.gate_bias, w.decay,
                    nullptr, nullptr, nullptr, before<int64_t>(0, w.state.fed), nullptr, nullptr, nullptr};
        RglruHead<T> head(r, h);
        for (int64_t t = 0; t < g_.T; ++t) {
            r.x = at_.normed + t * g_.B * g_.D, r.y = at_.fed + t * g_.B * g_.D;
            r.h0 = before<T>(t, w.state.h), r.h1 = after<T>(t, w.state.h);
            r.count1 = after<int64_t>(t, w.state.fed);
            for (int64_t b = 0; b < g_.B; ++b) head(r, b, t);
        }
    }

    // The convolution of one row, and its last inputs moved on token by token.
    void convolve(const Layer& w, int64_t b) const {
        const int64_t D = g_.D, n = w.taps, kept = (n - 1) * D;
        for (int64_t t = 0; t < g_.T; ++t) {
            const T *x = at_.normed + (t * g_.B + b) * D, *tap = (const T*)w.conv, *past = before<T>(t, w.state.h) + b * kept;
            T *y = at_.fed + (t * g_.B + b) * D, *kept_now = after<T>(t, w.state.h) + b * kept;
            for (int64_t c = 0; c < D; ++c, tap += n) {
                T sum = tap[n - 1] * x[c];
                for (int64_t j = 0; j < n - 1; ++j) sum += tap[j] * past[j * D + c];
                y[c] = sum;
            }
            if (n == 1) continue;
            memcpy(kept_now, past + D, size_t(kept - D) * sizeof(T));
            memcpy(kept_now + kept - D, x, size_t(D) * sizeof(T));
        }
    }

    // Slots, latents and window of token t.
    Decode mixed(const Layer& w, int64_t t) const {
        const int64_t slots = w.M + w.windowed, K = g_.V, row = t * g_.B;
        const Parts& at = w.state;
        return {g_.is_double, 1, g_.B, g_.H, g_.G, w.M, K, g_.V, w.R, w.N, w.R ? w.R + g_.spare : 0, w.windowed, w.speeds != nullptr, w.coupled,
                w.exact_from, w.scale, w.softcap, w.stretch, at_.slots + row * g_.H * slots, g_.H * slots, at_.k_latent + row * g_.H * w.M,
                g_.H * w.M, at_.v + row * g_.G * g_.V, g_.G * g_.V, at_.q + row * g_.H * K, g_.H * K, at_.k + row * g_.G * K, g_.G * K,
                w.slot_bias, w.speeds, at_.mixed + row * g_.H * g_.V,
                before<double>(t, at.log_norm), before<T>(t, at.mean), ring(at.ring_k), ring(at.ring_v), before<T>(t, at.sink_k),
                before<T>(t, at.sink_v), before<int64_t>(t, at.count),
                after<double>(t, at.log_norm), after<T>(t, at.mean), ring(at.ring_k), ring(at.ring_v), after<T>(t, at.sink_k),
                after<T>(t, at.sink_v), after<int64_t>(t, at.count), nullptr, nullptr};
    }

    // A key-value head of a row goes through all tokens without waiting for others; counts as in recur.
    void mix(const Layer& w) {
        Decode d = mixed(w, 0);
        Mixing<T> mixing(d);  // each thread its own, which keeps the angles of a place from head to head
        run_.stage(g_.B * g_.G, [&](int64_t unit) {
            for (int64_t t = 0; t < g_.T; ++t) {
                if (g_.T > 1) d = mixed(w, t), d.count0 = before<int64_t>(0, w.state.count);
                mixing(unit, t);
            }
        });
    }

    const Token& g_;
    const Passed<T>& at_;
    Runner& run_;
};

template <class T>
void token_typed(const Token& g) {
    const Passed<T> at(g);
    const size_t row = size_t(g.D) * sizeof(T);
    for (int64_t b = 0; b < g.B * g.T; ++b) memcpy(at.x + b * g.D, g.x ? (const T*)g.x + b * g.D : (const T*)g.embedding + g.ids[b] * g.D, row);
    const double work = double(g.layers * g.B * g.T) * double(g.D) * double(3 * g.I + 2 * g.H * g.V);
    relay(useful_threads(g.threads, work), [&](Runner& run) {
        Walk<T> walk(g, at, run);
        for (int64_t i = 0; i < g.layers; ++i) walk.layer(g.layer[i]);
        walk.end();
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void token(const Token* g) { g->is_double ? token_typed<double>(*g) : token_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
