// The C interface: every kernel takes one block of 64-bit fields. `__init__.py` fills the same fields in the same order.
#pragma once
#include <stdint.h>

namespace latte {

// (batch, tokens, heads, width); the innermost stride is 1, the others count elements.
struct View {
    void* data;
    int64_t b, t, h;
};

struct LatteForward {
    int64_t is_double, threads, B, T, H, M, V;
    View p, k, v, y;
    const double* log_norm0;  // (B, H, M), float64 whatever the inputs are
    const void* mean0;        // (B, H, M, V)
    double* log_norm1;
    void* mean1;
    const uint8_t *mask, *reset;  // (B, T) or null
};

struct LatteBackward {
    int64_t is_double, threads, B, T, H, M, V;
    View p, k, v, dy, dp, dk, dv;
    const double* log_norm0;
    const void* mean0;
    const double* dlog_norm1;  // gradients of the final state
    const void* dmean1;
    double* dlog_norm0;
    void* dmean0;
    const uint8_t *mask, *reset;
};

// Query i stands at key S - T + i and sees `left` keys before it and `right` behind it.
struct WindowForward {
    int64_t is_double, threads, B, T, S, H, G, D, V, left, right;  // G key-value heads
    double scale, softcap;
    View q, k, v, y;
    void* lse;                      // (B, T, H)
    const int32_t *seg_q, *seg_k;  // (B, T), (B, S) or both null
};

struct WindowBackward {
    int64_t is_double, threads, B, T, S, H, G, D, V, left, right;
    double scale, softcap;
    View q, k, v, y, dy, dq, dk, dv;  // dk and dv come as zeros
    const void *lse, *dlse;
    const int32_t *seg_q, *seg_k;
};

// Views of (B, T, D): the stride of heads is not used.
struct ScanForward {
    int64_t is_double, threads, B, T, D, reverse;
    View log_a, b, h;
    const void* h0;  // (B, D)
    void* h1;
    const uint8_t *mask, *reset;
};

struct ScanBackward {
    int64_t is_double, threads, B, T, D, reverse;
    View log_a, b, dh, dlog_a, db;
    const void *h0, *dh1;
    void* dh0;
    const uint8_t *mask, *reset;
};

// `decays` is the width of g: 0 (none), 1 (one a head) or K.
struct DecayForward {
    int64_t is_double, threads, B, T, H, K, V, decays;
    View q, k, v, g, y;
    const void* S0;  // (B, H, K, V)
    void* S1;
    const uint8_t *mask, *reset;
};

struct DecayBackward {
    int64_t is_double, threads, B, T, H, K, V, decays;
    View q, k, v, g, dy, dq, dk, dv, dg;
    const void *S0, *dS1;
    void* dS0;
    const uint8_t *mask, *reset;
};

// As decay attention; `b.data` is null where b = -k. `u` is what a token writes in the place of v: v - S^T a where b = -k, and
// otherwise S^T a; null where nobody wants it.
struct DeltaForward {
    int64_t is_double, threads, B, T, H, K, V, decays;
    View q, k, v, a, b, g, y, u;
    const void* S0;  // (B, H, K, V)
    void* S1;
    const uint8_t *mask, *reset;
};

struct DeltaBackward {
    int64_t is_double, threads, B, T, H, K, V, decays;
    View q, k, v, a, b, g, u, dy, dq, dk, dv, da, db, dg;
    const void *S0, *dS1;
    void* dS0;
    const uint8_t *mask, *reset;
};

// H blocks of W channels. Biases and rates are contiguous; `bias` is (2, H, W): recurrence gate, input gate.
struct RglruForward {
    int64_t is_double, threads, B, T, H, W;
    View ga, gx, x, y;
    const void *bias, *rate, *h0;  // (2, H, W), (H, W), (B, H, W)
    void* h1;
    const int64_t* count0;  // (B) tokens of the document that the state has read: its first is not scaled down
    int64_t* count1;
    const uint8_t *mask, *reset;
};

struct RglruBackward {
    int64_t is_double, threads, B, T, H, W;
    View ga, gx, x, dy, dga, dgx, dx;
    const void *bias, *rate, *h0, *dh1;
    void *dbias, *drate, *dh0;  // (B, 2, H, W), (B, H, W), (B, H, W)
    const int64_t* count0;
    const uint8_t *mask, *reset;
};

// `cosine` and `sine` are (B or 1, T, K / 2): table_b is the stride of rows, 0 where they share one.
struct Rotate {
    int64_t is_double, threads, B, T, H, K, inverse, table_b;
    View x, y;
    const void *cosine, *sine;
};

struct SwigluForward {
    int64_t is_double, threads, n;
    const void *gate, *up;
    void* y;
};

struct SwigluBackward {
    int64_t is_double, threads, n;
    const void *gate, *up, *dy;
    void *dgate, *dup;
};

struct NormForward {
    int64_t is_double, threads, N, D;
    double eps;
    const void *x, *weight;
    void* y;
};

struct NormBackward {
    int64_t is_double, threads, N, D;
    double eps;
    const void *x, *weight, *dy;
    void *dx, *dweight;
};

constexpr int64_t kMatrices = 4;

// x (B, K) times up to kMatrices matrices (rows, K), transposed. `gated`: the first y is silu of the first times the second;
// `added`: the products are added to what stands in y.
struct Products {
    struct Part {
        const void* w;
        int64_t rows;
        void* y;
    };
    int64_t is_double, threads, B, K, count, gated, added;
    const void* x;
    int64_t xb;
    Part part[kMatrices];
};

struct RglruStep {
    int64_t is_double, threads, B, H, W;
    double power;
    const void* x;  // (B, H * W)
    int64_t xb;
    const void *weight, *bias, *decay, *h0;  // (2, H, W, W), (2, H, W), (H * W), (B, H * W)
    void *y, *h1;
    const int64_t* count0;
    int64_t* count1;
    const uint8_t *mask, *reset;  // (B) or null
};

// One token a row. Rows of inputs may be strided (their strides follow them), all else is contiguous.
struct Decode {
    int64_t is_double, threads, B, H, G, M, K, V, R, N;  // R tokens before this one are in the window; N sinks
    int64_t S;  // slots of the ring: token t is in slot t mod S. R, or more where it is written in place: then it is the same after
    int64_t windowed, rope, coupled;  // coupled: slot 0's logit also holds the log-normaliser of the window's scores
    int64_t exact_from;               // places before this have their angles rounded to float32
    double scale, softcap, stretch;   // stretch: of turned queries and keys
    const void* slots;  // (B, H, M + 1) logits, without the + 1 if there is no window
    int64_t slotsb;
    const void* k_latent;  // (B, H, M) logits
    int64_t klb;
    const void* v;  // (B, G, V)
    int64_t vb;
    const void* q;  // (B, H, K), not yet rotated
    int64_t qb;
    const void* k;  // (B, G, K)
    int64_t kb;
    const void* bias;    // (H) added to slot 0, or null
    const void* speeds;  // (K / 2) float64: radians a token
    void* y;             // (B, H, V)
    const double* log_norm0;
    const void *mean0, *ring_k0, *ring_v0, *sink_k0, *sink_v0;  // ring: (B, S, G, K or V)
    const int64_t* count0;
    double* log_norm1;
    void *mean1, *ring_k1, *ring_v1, *sink_k1, *sink_v1;
    int64_t* count1;
    const uint8_t *mask, *reset;  // (B) or null
};

// Where the parts of a layer's state lie, in bytes from the start of the block that holds all layers'; negative where it has none.
// The rings are in a block of their own.
struct Parts {
    int64_t h;  // (B, D) of the recurrence, or the convolution's last inputs (B, taps - 1, D)
    int64_t fed, log_norm, mean, ring_k, ring_v, sink_k, sink_v, count;
};

// A layer of the model; what a layer does not have is null.
struct Layer {
    int64_t M, R, N, windowed, coupled, exact_from, taps;  // as in Decode; taps of the convolution
    double softcap, power, scale, stretch;
    const void *mixer_norm, *v, *q, *k;
    // What feeds the latents: an RG-LRU, a convolution (D, taps) with the present token's tap last, or where both are null x itself.
    const void *gate_weight, *gate_bias, *decay, *conv;
    const void *feed_norm, *latent_q, *latent_k, *slot_bias, *speeds, *o, *mlp_norm, *gate, *up, *down;
    Parts state;
};

// T tokens a row, one behind the other, through all layers and the last norm; most often one. Heads are V wide, keys too; the MLP is I wide inside.
struct Token {
    int64_t is_double, threads, B, T, D, H, G, V, I, layers;
    double eps;
    const void* x;  // (T, B, D), or null: then it is the rows `ids` (T, B) of the embedding
    const int64_t* ids;
    const void *embedding, *norm;  // (_, D), (D)
    int64_t words;                 // rows of the head; 0 where there is none
    const void* head;              // (words, D)
    void* y;                       // (T, B, words) logits, or (T, B, D) without a head
    const Layer* layer;
    const char* before;  // the layers' states, but for the rings
    char* after;         // T blocks of states: those after every token
    int64_t block;       // bytes of each
    char* rings;    // keys and values of all windows. The tokens' are written to slots that the state before does not look at
    int64_t spare;  // such slots of a ring: S - R, at least T where there is a window
};

}  // namespace latte
