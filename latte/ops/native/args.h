// The C interface: every kernel takes one block of 64-bit fields. Python fills the same fields in the same order; a program for one
// token and its stages are in stages.h.
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

// Which tokens are kept, for blocks of C queries. Events come after queries; `there` says whether a token leaves the window.
struct KeptSelect {
    int64_t is_double, threads, B, T, G, N, C;
    const void *score, *event;  // (B, G, N) of the slots, (B, T, G)
    const int64_t* place;       // (B, G, N), negative where a slot is empty
    const uint8_t* there;       // (B, T)
    const int64_t* segment;     // (B, T), negative behind the end of a row
    int32_t *source, *last;     // (B, blocks, G, N + C)
    int64_t* after;             // (B, G, N)
};

// Attention to what is kept. Source i of S is seen by the queries [first, last] of a block, first = 0 for slots and i - N + 1 for
// the others. With a reach, keys further back than it are those of `kb`, and queries those of `qf`.
struct KeptForward {
    int64_t is_double, threads, B, T, S, H, G, D, V, N, C, blocks, reach;
    double scale, softcap;
    View q, qf, k, kb, v, y;
    void* lse;         // (B, T, H)
    const void* bias;  // (B, S, G) or null
    const int32_t *source, *last;
    const int64_t *place_q, *place_k;  // (B, T), (B, S, G); null without a reach
};

struct KeptBackward {
    int64_t is_double, threads, B, T, S, H, G, D, V, N, C, blocks, reach;
    double scale, softcap;
    View q, qf, k, kb, v, y, dy, dq, dqf, dk, dkb, dv;  // dk, dkb and dv come as zeros
    const void *lse, *dlse, *bias;
    void* dbias;  // (B, S, G), comes as zeros
    const int32_t *source, *last;
    const int64_t *place_q, *place_k;
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

// `weight` (K, D), the present token's tap last; tails (B, K - 1, D).
struct ConvForward {
    int64_t is_double, threads, B, T, D, K;
    View x, y;
    const void *weight, *bias, *tail0;
    void* tail1;
    const uint8_t *mask, *reset;
};

struct ConvBackward {
    int64_t is_double, threads, B, T, D, K;
    View x, dy, dx;
    const void *weight, *tail0, *dtail1;
    void *dweight, *dbias, *dtail0;  // of each row of the batch: (B, K, D), (B, D)
    const uint8_t *mask, *reset;
};

// Channels with N slots, see filters.h; `kind` is a cell of filters.cpp. in, y, dy and din are (B, T, D), `shared` (B, T, H, N) and
// `par` (P, N, D). States are (B, N, S, D), and `kept` has one for every block of tokens, (B, blocks, N, S, D): that before it.
// All are contiguous, and wider than the inputs where a cell says so.
struct FilterForward {
    int64_t is_double, threads, kind, B, T, D, N, cuts;
    const void *in[2], *shared, *par, *h0;
    void *y, *h1, *kept;
    const uint8_t *mask, *reset;
};

struct FilterBackward {
    int64_t is_double, threads, kind, B, T, D, N, cuts;
    const void *in[2], *shared, *par, *kept, *dy, *dh1;
    void *din[2], *dshared, *dpar, *dh0;  // dshared (cuts, B, T, N, H), dpar (B, N, P, D)
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
// kNegativeExp: -e^x for x up to 60, where what it decays is gone.
enum Activation { kIdentity, kSilu, kGeluTanh, kGelu, kSigmoid, kLogSigmoid, kTanh, kSoftplus, kSquaredRelu, kNegativeExp };
// How weights are kept: floats of the call's type, or blocks of few bits (blocks.h).
enum Format { kFloats, kQ8_0, kQ4_0, kQ4_1, kQ4_K, kQ6_K };

// A matrix (rows, K) in blocks as floats.
struct UnpackBlocks {
    int64_t threads, format, rows, K;
    const void* blocks;
    void* y;
};

// y (M, N) = x (M, K) times a matrix (N, K) in blocks, transposed, plus `bias` (N) unless it is null.
struct BlockProduct {
    int64_t threads, format, M, K, N;
    const void *x, *w, *bias;
    void* y;
};

// x (B, K) times up to kMatrices matrices (rows, K), transposed, and what `bias` holds added. `act` is applied to the first;
// `gated`: the first y is that times the second. `added`: the products are added to what stands in y.
struct Products {
    struct Part {
        const void *w, *bias;
        int64_t rows, format;
        void* y;
    };
    int64_t is_double, threads, B, K, count, act, gated, added;
    const void* x;
    int64_t xb;
    Part part[kMatrices];
};

}  // namespace latte
