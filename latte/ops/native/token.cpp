// One token of a whole model in one call: all layers and the last norm, and from the id to the logits if asked.
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
    explicit Passed(const Token& g) : Passed(g, g.B * g.H * most_slots(g), g.B * g.H * g.V, g.B * g.G * g.V) {}

  private:
    Passed(const Token& g, int64_t slot_room, int64_t heads, int64_t groups)
        : mem(3 * room(g.B * g.D, sizeof(T)) + 2 * room(slot_room, sizeof(T)) + 2 * room(heads, sizeof(T)) + 2 * room(groups, sizeof(T)) +
              room(g.B * g.I, sizeof(T))) {
        x = mem.take<T>(g.B * g.D), normed = mem.take<T>(g.B * g.D), fed = mem.take<T>(g.B * g.D);
        slots = mem.take<T>(slot_room), k_latent = mem.take<T>(slot_room);
        q = mem.take<T>(heads), mixed = mem.take<T>(heads);
        k = mem.take<T>(groups), v = mem.take<T>(groups);
        wide = mem.take<T>(g.B * g.I);
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
        run_.stage(1, [&](int64_t) {
            for (int64_t b = 0; b < g_.B; ++b) norm_row(to + b * g_.D, from + b * g_.D, (const T*)weight, g_.D, g_.eps);
        });
    }

    // x times each of the matrices that are there.
    Products of(const T* x, int64_t K, Products::Part one, Products::Part two = {}, Products::Part three = {}) const {
        const int64_t count = three.w ? 3 : two.w ? 2 : 1;
        return {g_.is_double, g_.threads, g_.B, K, count, 0, 0, x, K, {one, two, three, {}}};
    }
    static Products gated(Products p) { return p.gated = 1, p; }
    static Products added(Products p) { return p.added = 1, p; }

    void product(const Products& p) {
        const Rows<T> rows(p);
        run_.stage(rows.pieces(), rows);
    }

    // A part of a layer's state before the token, and after it.
    template <class U>
    const U* before(int64_t part) const {
        return part < 0 ? nullptr : (const U*)(g_.before + part);
    }
    template <class U>
    U* after(int64_t part) const {
        return part < 0 ? nullptr : (U*)(g_.after + part);
    }
    T* ring(int64_t part) const { return part < 0 ? nullptr : (T*)(g_.rings + part); }

    // What comes of x directly: values, the window's queries and keys, and the recurrence or the convolution.
    void read(const Layer& w) {
        const int64_t heads = g_.H * g_.V, groups = g_.G * g_.V, units = w.gate_weight ? g_.B * g_.H : w.conv ? g_.B : 0;
        const Products p = of(at_.normed, g_.D, {w.v, groups, at_.v}, {w.q, heads, at_.q}, {w.k, groups, at_.k});
        const Rows<T> rows(p);
        const RglruStep r{g_.is_double, 1, g_.B, g_.H, g_.D / g_.H, w.power, at_.normed, g_.D, w.gate_weight, w.gate_bias, w.decay,
                          before<T>(w.state.h), at_.fed, after<T>(w.state.h), before<int64_t>(w.state.fed), after<int64_t>(w.state.fed),
                          nullptr, nullptr};
        run_.stage(units + rows.pieces(), [&](int64_t piece) {
            if (piece >= units) return rows(piece - units);
            w.gate_weight ? rglru_unit<T>(r, piece) : convolve(w, piece);
        });
    }

    // The convolution of one row, and its last inputs moved on by one.
    void convolve(const Layer& w, int64_t b) const {
        const int64_t D = g_.D, n = w.taps, kept = (n - 1) * D;
        const T *x = at_.normed + b * D, *tap = (const T*)w.conv, *past = before<T>(w.state.h) + b * kept;
        T *y = at_.fed + b * D, *kept_now = after<T>(w.state.h) + b * kept;
        for (int64_t c = 0; c < D; ++c, tap += n) {
            T sum = tap[n - 1] * x[c];
            for (int64_t j = 0; j < n - 1; ++j) sum += tap[j] * past[j * D + c];
            y[c] = sum;
        }
        if (n == 1) return;
        memcpy(kept_now, past + D, size_t(kept - D) * sizeof(T));
        memcpy(kept_now + kept - D, x, size_t(D) * sizeof(T));
    }

    void mix(const Layer& w) {
        const int64_t slots = w.M + w.windowed, K = g_.V;
        const Parts& at = w.state;
        const Decode d{g_.is_double, 1, g_.B, g_.H, g_.G, w.M, K, g_.V, w.R, w.N, w.R ? w.R + g_.spare : 0, w.windowed, w.speeds != nullptr, w.coupled,
                       w.exact_from, w.scale, w.softcap, w.stretch, at_.slots, g_.H * slots, at_.k_latent, g_.H * w.M, at_.v, g_.G * g_.V,
                       at_.q, g_.H * K, at_.k, g_.G * K, w.slot_bias, w.speeds, at_.mixed,
                       before<double>(at.log_norm), before<T>(at.mean), ring(at.ring_k), ring(at.ring_v), before<T>(at.sink_k),
                       before<T>(at.sink_v), before<int64_t>(at.count),
                       after<double>(at.log_norm), after<T>(at.mean), ring(at.ring_k), ring(at.ring_v), after<T>(at.sink_k),
                       after<T>(at.sink_v), after<int64_t>(at.count), nullptr, nullptr};
        Mixing<T> mixing(d);  // each thread its own, which keeps the angles of a place from head to head
        run_.stage(g_.B * g_.G, [&](int64_t unit) { mixing(unit); });
    }

    const Token& g_;
    const Passed<T>& at_;
    Runner& run_;
};

template <class T>
void token_typed(const Token& g) {
    const Passed<T> at(g);
    const size_t row = size_t(g.D) * sizeof(T);
    for (int64_t b = 0; b < g.B; ++b) memcpy(at.x + b * g.D, g.x ? (const T*)g.x + b * g.D : (const T*)g.embedding + g.ids[b] * g.D, row);
    const double work = double(g.layers * g.B) * double(g.D) * double(3 * g.I + 2 * g.H * g.V);
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
