// The stages that a program for one token is made of, each described once: the structs below, the table of functions in token.cpp
// and the text from which Python packs the same fields (latte_stages) all come from these lists.
//
// Every field has 64 bits: I an integer, R a double, W the address of a weight, X an activation, S a part of the state. An
// activation is (T, B, width) at `room` + its offset x rows; kNone is none, kOutput is what the caller gets. A part of the state is
// (B, ...) at its block + its offset x B. Offsets are per row, so one program serves every batch.
#pragma once
#include <stdint.h>

// One call: T tokens a row, one behind the other, most often one. `program` is a list of stages, `length` words long: number of the
// stage, whether the next one runs beside it, number of its fields, fields.
#define LATTE_FIELDS_Call(I, R, W, X, S) \
    I(is_double) I(threads) I(B) I(T) W(program) I(length) W(room) W(input) W(output) /* input: ids (T, B), or (T, B, D) */ \
    W(before) W(after) I(block)   /* blocks of states: before the call, and after each token, `block` bytes apart */ \
    W(count)                      /* (B) tokens that the rows have read before the call */ \
    W(memory)                     /* keys and values: a Memory for each layer of attention */ \
    I(partial)                    /* numbers that the widest attention stage needs for a part of a row's keys */

// x = table[id], or what the caller gives; positions: added by place, or null; scale: of the sum's first part.
#define LATTE_FIELDS_Embed(I, R, W, X, S) X(y) W(table) I(format) W(positions) I(width) R(scale)
#define LATTE_FIELDS_Given(I, R, W, X, S) X(y) I(width)
// y = x / rms(x) . (weight + plus) for each of `groups` parts of a row; `centred`: LayerNorm, with the mean taken out. `added`: to y.
// `own`: every group has a weight and bias of its own.
#define LATTE_FIELDS_Norm(I, R, W, X, S) X(x) X(y) W(weight) W(bias) I(width) I(groups) I(own) I(centred) I(added) R(eps) R(plus)
// x times up to three matrices (rows, width), transposed. `act` is applied to the first; `gated`: and multiplied by the second.
// `added`: to what stands in y. format: how weights are kept (args.h).
#define LATTE_FIELDS_Product(I, R, W, X, S) \
    X(x) I(width) I(act) I(gated) I(added) W(w0) W(bias0) I(rows0) I(format0) X(y0) \
    W(w1) W(bias1) I(rows1) I(format1) X(y1) W(w2) W(bias2) I(rows2) I(format2) X(y2)
// A causal convolution of each channel, then `act`: weight (width, taps), the present token's tap last; tail: the last taps - 1
// inputs, (taps - 1, channels), of which these are the channels from `first` on. near (width, near_taps): added to the last taps.
#define LATTE_FIELDS_Conv(I, R, W, X, S) X(x) X(y) W(weight) W(bias) I(width) I(taps) I(act) I(first) I(channels) S(tail) W(near) I(near_taps)
// The RG-LRU with its gates: weight (2, heads, width, width), bias (2, heads, width), decay (heads * width).
#define LATTE_FIELDS_Rglru(I, R, W, X, S) X(x) X(y) W(weight) W(bias) W(decay) I(heads) I(width) R(power) S(h)
// Cosines and sines of a token's place for `half` speeds (float64), one behind the other. nearest: places behind it count as it;
// rounded: places before it have their angles rounded to float32.
#define LATTE_FIELDS_Angles(I, R, W, X, S) X(y) W(speeds) I(half) I(nearest) I(rounded) R(stretch)
// Key and value of the token go to a layer's memory, the key turned by `angles` if there are some. behind (key_width / 2): a vector that
// stands behind every key in memory, and is turned in its place.
#define LATTE_FIELDS_Keep(I, R, W, X, S) X(k) X(v) X(angles) I(memory) I(groups) I(key_width) I(value_width) W(behind)
// Softmax attention to the token itself, the `window` before it (negative: to all) and the sinks that lie behind, for which the query
// is turned by `sink_angles`. log_norm: where the logs of the normalisers go, or none. chunked: the window ends where the token's run of
// window + 1 tokens begins. laplace: weights are Mega's function of scores (latte/ops/laplace.py), not normalised, and queries are
// divided by the number of keys. behind: as in Keep, of queries, and not divided.
#define LATTE_FIELDS_Attend(I, R, W, X, S) \
    X(q) X(angles) X(sink_angles) X(y) X(log_norm) I(memory) I(heads) I(groups) I(key_width) I(value_width) I(window) R(scale) R(softcap) \
    I(chunked) I(laplace) W(behind)
// Parts of long rows put together; runs behind the Attend that it has the fields of.
#define LATTE_FIELDS_Merge(I, R, W, X, S) X(y) X(log_norm) I(heads) I(value_width) I(window) I(chunked)
// Attention to `kept` tokens behind the window, put under one softmax with what the window gave (y, log_norm); then the token that
// leaves the window may take a slot. score and life: W x of the present token; a token further back than `reach` (0: none is) is
// looked at by a query turned by `far_angles`. State: scores (window, groups) of the ring, and of the slots scores and places
// (kept, groups), keys and values (kept, groups, width).
#define LATTE_FIELDS_Hold(I, R, W, X, S) \
    X(q) X(score) X(life) X(angles) X(far_angles) X(y) X(log_norm) W(recency) W(life_bias) W(level) W(weight) W(speeds) I(memory) \
    I(heads) I(groups) I(key_width) I(value_width) I(window) I(sinks) I(kept) I(reach) I(rounded) R(scale) R(softcap) R(unit) \
    R(longest) R(later) S(ring) S(scores) S(places) S(keys) S(values)
// p = softmax(slots)    a' = logaddexp(a, k)    S' = S + exp(k - a') (v - S)    y = p_0 seen + sum_l p_l S'_l
// where `seen` is the window's, or none; bias: of slot 0; window_norm: added to slot 0's logit; rates: taken from a first.
#define LATTE_FIELDS_Latents(I, R, W, X, S) \
    X(slots) X(k) X(v) X(seen) X(window_norm) X(rates) X(y) W(bias) I(heads) I(groups) I(latents) I(value_width) S(log_norm) S(mean)

// Of each channel by itself, and y may be x. What is not given is left out.
// y = act(x . weight + bias)
#define LATTE_FIELDS_Map(I, R, W, X, S) X(x) W(bias) X(y) I(width) I(act) W(weight)
// y = x . gate . weight; `added`: to y.
#define LATTE_FIELDS_Gate(I, R, W, X, S) X(x) X(gate) W(weight) X(y) I(width) I(added)
// y = x + (to - x) . (weight + share)
#define LATTE_FIELDS_Lerp(I, R, W, X, S) X(x) X(to) X(share) W(weight) X(y) I(width)

// Means and soft maxima of values, head by head, with beta = softplus(weight) + floor (heads, width): y = [x, e^{beta x}], the exponent
// within `range`; and back, where `choice` is given and x has two halves of each head: y = m + choice (log(e) / beta - m), x = [m, e].
#define LATTE_FIELDS_Energy(I, R, W, X, S) X(x) X(choice) X(y) W(weight) I(heads) I(width) R(floor) R(range)

// The first `turned` channels of each head turned by the token's place, in place.
#define LATTE_FIELDS_Turn(I, R, W, X, S) X(x) X(angles) I(heads) I(width) I(turned)
// Each block of x times a matrix of its own: weight (blocks, outputs, inputs), or, `across`, (blocks, inputs, outputs), whose rows are
// kept in a format (args.h). shared: all blocks times one.
#define LATTE_FIELDS_Blocks(I, R, W, X, S) X(x) X(y) W(weight) I(blocks) I(inputs) I(outputs) I(across) I(shared) I(format)
// Features of heads for linear attention, by `kind`, with z = x / width^{1/4}. x may have fewer heads, `groups`, each for several of y.
//   0 elu(x) + 1 + floor                        4 softmax(x / n) / n for the n tokens read, this one included
//   1 [softmax(x), softmax(-x)] + floor         5 [scale z . z, sqrt(1 + constant^2)] / sqrt(2)
//   2 [1, z, (z_i z_j)_{i<=j}]: e^r to second order   6 [z . z / |z . z|, sqrt(constant^2 + floor)]
//   3 relu(x) + floor                           scale, constant: numbers of each head
#define LATTE_FIELDS_Features(I, R, W, X, S) X(x) X(y) I(kind) I(heads) I(width) R(floor) I(groups) W(scale) W(constant)

// S' = e^g . S + k v^T - b (a^T S)    y = S'^T q + skip v    where heads remember a matrix (key_width, value_width)
//   k, q  scaled; k also by `write`, a number of each head. q, k and v may have fewer heads, each for several of the state.
//   g     decay_scale times an activation, of each key channel (decays = key_width) or head (1); if `log_rate` (H) is given, times
//         -e^{log_rate}. Or `decay` (H), or 0.
//   a, b  activations; or, `delta`, the key decayed and the key written: the value that the decayed state gives is replaced.
//   earlier: y reads S. mean: one value more, a constant 1, is remembered, and y is divided by what it gives.
//   shift: one value and one key more, constants of 1, are remembered: sums of values and keys, and n tokens. Weights are shifted by one
//   number so that they sum to n, and y is divided by n.
//   levels  weights (heads, blocks): S is the sum of one matrix for each bit of the number of tokens read, that at index i of the last
//         2^i tokens before the smaller ones. y reads the token's own k v^T times weight 0 and matrix i times weight 1 + i.
#define LATTE_FIELDS_Matrix(I, R, W, X, S) \
    X(q) X(k) X(v) X(y) X(g) X(write) X(a) X(b) X(levels) W(decay) W(log_rate) W(skip) I(heads) I(q_heads) I(k_heads) I(v_heads) I(key_width) \
    I(value_width) I(decays) I(blocks) I(delta) I(earlier) I(mean) R(query_scale) R(key_scale) R(decay_scale) S(state) I(shift)
// ZeroS, at the nth token, with q and k at length 1 (or divided by `least`), mean_n x = mean_{n-1} + (x - mean_{n-1}) / n and two gates:
//   s = -u . m / sqrt(width)   m = (e^tau mu + n mean_n u) / (e^tau + n)   F = q . sum_i softmax_i(s) k_i v_i^T   G, H = q . mean_n k [s v, v]^T
//   y = gates_1 (F - H) + (gates_0 - gates_1) (G - mean_n(s) H), 0 at the first token. Sums are in double precision.
#define LATTE_FIELDS_ZeroSum(I, R, W, X, S) \
    X(q) X(k) X(v) X(u) X(gates) X(y) W(mu) W(tau) I(heads) I(width) R(least) S(direction) S(logits) S(log_norm) S(soft) S(plain)
// y += (sum_i q_i weight_i k_i) v, head by head: weight (heads, key_width).
#define LATTE_FIELDS_Bonus(I, R, W, X, S) X(q) X(k) X(v) X(y) W(weight) I(heads) I(key_width) I(value_width)

// Mamba, A = -e^{log_rate} (width, size): h' = e^{delta A} h + delta b x    y = c . h' + skip x
#define LATTE_FIELDS_Selective(I, R, W, X, S) X(x) X(delta) X(b) X(c) X(y) W(log_rate) W(skip) I(width) I(size) R(most) S(h)
// A diagonal state-space model of each channel, `size` complex numbers with A = -slowest - e^{log_rate} + i frequency (width, size),
// step = e^{log_step} (width), a = e^{A step}: h' = a h + x    y = skip x + 2 Re(read (a - 1) / A . h'), read (width, size, 2).
// Without log_step: step = 1. Without read: y = Re h'.
#define LATTE_FIELDS_StateSpace(I, R, W, X, S) \
    X(x) X(y) W(log_rate) W(frequency) W(log_step) W(read) W(skip) I(width) I(size) R(slowest) R(most) R(longest) S(h)
// S5: `size` such models that all channels feed, u = in x with in (size, width, 2): h' = a h + (a - 1) / A u    y = 2 conj h', (size, 2)
#define LATTE_FIELDS_Modes(I, R, W, X, S) \
    X(x) X(y) W(log_rate) W(frequency) W(log_step) W(in) I(width) I(size) R(slowest) S(h)
// RWKV-4, with w = e^decay: y = S + sigmoid(first + k - a) (v - S)    a' = logaddexp(a - w, k)    S' = S + exp(k - a') (v - S)
#define LATTE_FIELDS_Wkv(I, R, W, X, S) X(k) X(v) X(y) W(decay) W(first) I(width) S(log_norm) S(mean)
// Filters with e^{log_step}, e^{log_rate} and e^{log_variance} (width, size), exponents in [-15, 5], fade = min(20, step rate), a = e^-fade
// and p = variance / (2 rate) (1 - a^2), that observe v with precision n = 1 / (variance + least):
//   l- = l / (a^2 + p l)    l' = l- + n k^2    m' = (l- / l') a m + (n k / l') v    y = q . m' + skip v
#define LATTE_FIELDS_Kalman(I, R, W, X, S) \
    X(v) X(variance) X(k) X(q) X(y) W(log_step) W(log_rate) W(log_variance) W(skip) I(width) I(size) R(least) S(precision) S(mean)
// Mega's damped averages, with p and d the sigmoids of `rate` and `damping` (width, size), p d below 1:
//   h' = (1 - p d) h + p entry x    y = skip x + sum_n read_n h'_n / sqrt(size)
#define LATTE_FIELDS_Average(I, R, W, X, S) X(x) X(y) W(rate) W(damping) W(entry) W(read) W(skip) I(width) I(size) S(h)

#define LATTE_STAGES(STAGE) \
    STAGE(Embed) STAGE(Given) STAGE(Norm) STAGE(Product) STAGE(Map) STAGE(Gate) STAGE(Lerp) STAGE(Blocks) STAGE(Features) STAGE(Conv) \
    STAGE(Rglru) STAGE(StateSpace) STAGE(Selective) STAGE(Kalman) STAGE(Wkv) STAGE(Angles) STAGE(Turn) STAGE(Keep) STAGE(Attend) STAGE(Merge) \
    STAGE(Hold) STAGE(Latents) STAGE(Matrix) STAGE(Bonus) STAGE(Average) STAGE(Modes) STAGE(Energy) STAGE(ZeroSum)

namespace latte {

constexpr int64_t kNone = -1, kOutput = -2;

#define LATTE_INTEGER(name) int64_t name;
#define LATTE_REAL(name) double name;
#define LATTE_ADDRESS(name) const void* name;
#define LATTE_STRUCT(name) \
    struct name { \
        LATTE_FIELDS_##name(LATTE_INTEGER, LATTE_REAL, LATTE_ADDRESS, LATTE_INTEGER, LATTE_INTEGER) \
    };
namespace stage {
LATTE_STAGES(LATTE_STRUCT)
}
LATTE_STRUCT(Call)

// Keys (B, G, slots, K) and values (B, G, slots, V): token t is in slot t mod slots. Sinks: (B, G, sinks, K or V).
struct Memory {
    void *keys, *values, *sink_keys, *sink_values;
    int64_t slots, sinks;
};

#define LATTE_NUMBER(name) k##name,
enum Stages { LATTE_STAGES(LATTE_NUMBER) kStages };

#define LATTE_I_TEXT(name) " I:" #name
#define LATTE_R_TEXT(name) " R:" #name
#define LATTE_W_TEXT(name) " W:" #name
#define LATTE_X_TEXT(name) " X:" #name
#define LATTE_S_TEXT(name) " S:" #name
#define LATTE_TEXT(name) #name LATTE_FIELDS_##name(LATTE_I_TEXT, LATTE_R_TEXT, LATTE_W_TEXT, LATTE_X_TEXT, LATTE_S_TEXT) "\n"
constexpr const char kStagesText[] = LATTE_STAGES(LATTE_TEXT) LATTE_TEXT(Call);

}  // namespace latte
