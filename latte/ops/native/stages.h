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
#define LATTE_FIELDS_Norm(I, R, W, X, S) X(x) X(y) W(weight) W(bias) I(width) I(groups) I(centred) I(added) R(eps) R(plus)
// x times up to three matrices (rows, width), transposed. `act` is applied to the first; `gated`: and multiplied by the second.
// `added`: to what stands in y. format: how weights are kept (args.h).
#define LATTE_FIELDS_Product(I, R, W, X, S) \
    X(x) I(width) I(act) I(gated) I(added) W(w0) W(bias0) I(rows0) I(format0) X(y0) \
    W(w1) W(bias1) I(rows1) I(format1) X(y1) W(w2) W(bias2) I(rows2) I(format2) X(y2)
// A causal convolution of each channel: weight (width, taps), the present token's tap last; tail: the last taps - 1 inputs.
#define LATTE_FIELDS_Conv(I, R, W, X, S) X(x) X(y) W(weight) I(width) I(taps) S(tail)
// The RG-LRU with its gates: weight (2, heads, width, width), bias (2, heads, width), decay (heads * width).
#define LATTE_FIELDS_Rglru(I, R, W, X, S) X(x) X(y) W(weight) W(bias) W(decay) I(heads) I(width) R(power) S(h)
// Cosines and sines of a token's place for `half` speeds (float64), one behind the other. nearest: places behind it count as it;
// rounded: places before it have their angles rounded to float32.
#define LATTE_FIELDS_Angles(I, R, W, X, S) X(y) W(speeds) I(half) I(nearest) I(rounded) R(stretch)
// Key and value of the token go to a layer's memory, the key turned by `angles` if there are some.
#define LATTE_FIELDS_Keep(I, R, W, X, S) X(k) X(v) X(angles) I(memory) I(groups) I(key_width) I(value_width)
// Softmax attention to the token itself, the `window` before it (negative: to all) and the sinks that lie behind, for which the query
// is turned by `sink_angles`. log_norm: where the logs of the normalisers go, or none.
#define LATTE_FIELDS_Attend(I, R, W, X, S) \
    X(q) X(angles) X(sink_angles) X(y) X(log_norm) I(memory) I(heads) I(groups) I(key_width) I(value_width) I(window) R(scale) R(softcap)
// Parts of long rows put together; runs behind the Attend that it has the fields of.
#define LATTE_FIELDS_Merge(I, R, W, X, S) X(y) X(log_norm) I(heads) I(value_width) I(window)
// Attention to `kept` tokens behind the window, put under one softmax with what the window gave (y, log_norm); then the token that
// leaves the window may take a slot. score and life: W x of the present token; a token further back than `reach` (0: none is) is
// looked at by a query turned by `far_angles`. State: scores (window, groups) of the ring, and of the slots scores and places
// (kept, groups), keys and values (kept, groups, width).
#define LATTE_FIELDS_Hold(I, R, W, X, S) \
    X(q) X(score) X(life) X(angles) X(far_angles) X(y) X(log_norm) W(recency) W(life_bias) W(level) W(weight) W(speeds) I(memory) \
    I(heads) I(groups) I(key_width) I(value_width) I(window) I(sinks) I(kept) I(reach) I(rounded) R(scale) R(softcap) R(unit) \
    R(longest) R(later) S(ring) S(scores) S(places) S(keys) S(values)
// p = softmax(slots)    a' = logaddexp(a, k)    S' = S + exp(k - a') (v - S)    y = p_0 seen + sum_l p_l S'_l
// where `seen` is the window's, or none; bias: of slot 0; window_norm: added to slot 0's logit.
#define LATTE_FIELDS_Latents(I, R, W, X, S) \
    X(slots) X(k) X(v) X(seen) X(window_norm) X(y) W(bias) I(heads) I(groups) I(latents) I(value_width) S(log_norm) S(mean)

// x turned by the token's place, head by head; x times another activation. Both in place.
#define LATTE_FIELDS_Turn(I, R, W, X, S) X(x) X(angles) I(heads) I(width)
#define LATTE_FIELDS_Gate(I, R, W, X, S) X(x) X(gate) I(width)
// S' = e^g S + k v^T    y = S'^T q    with k and q scaled; g: decay_scale times an activation of every key channel, or `decay` of every
// head (H). Heads have keys and values of their own.
#define LATTE_FIELDS_Decay(I, R, W, X, S) \
    X(q) X(k) X(v) X(y) X(g) W(decay) I(heads) I(key_width) I(value_width) R(query_scale) R(key_scale) R(decay_scale) S(sum)

#define LATTE_STAGES(STAGE) \
    STAGE(Turn) STAGE(Gate) STAGE(Decay) STAGE(Embed) STAGE(Given) STAGE(Norm) STAGE(Product) STAGE(Conv) STAGE(Rglru) STAGE(Angles) STAGE(Keep) STAGE(Attend) STAGE(Merge) STAGE(Hold) STAGE(Latents)

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
