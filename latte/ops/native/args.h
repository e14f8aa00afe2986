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

}  // namespace latte
