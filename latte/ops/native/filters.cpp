// The cells of filters.h: diagonal state-space models, Mamba's selective scan, and Kalman filters.
#include "filters.h"

LATTE_BEGIN

// h = a h + z over complex numbers, read by c: y = sum of c_re h_re + c_im h_im. Parameters a_re, a_im, c_re, c_im. In double
// precision whatever the inputs are: a constant factor repeats its rounding at every token.
struct StateSpace {
    typedef double R;
    typedef Vec<double> V;
    static constexpr int I = 1, H = 0, P = 4, S = 2, kFill = 0;
    static LATTE_INLINE void clear(V* s) { s[0] = s[1] = V{}; }
    static LATTE_INLINE V step(const V* in, const R*, int64_t, const V* par, const V* s, V* after) {
        const V re = par[0] * s[0] - par[1] * s[1] + in[0], im = par[0] * s[1] + par[1] * s[0];
        after[0] = re, after[1] = im;
        return par[2] * re + par[3] * im;
    }
    static LATTE_INLINE void back(const V*, const R*, int64_t, const V* par, const V* s, const V* after, V dy, V* g, V* din, V*, V* dpar) {
        const V re = g[0] + dy * par[2], im = g[1] + dy * par[3];
        dpar[2] = dpar[2] + dy * after[0], dpar[3] = dpar[3] + dy * after[1];
        dpar[0] = dpar[0] + re * s[0] + im * s[1], dpar[1] = dpar[1] + im * s[0] - re * s[1];
        din[0] = din[0] + re;
        g[0] = re * par[0] + im * par[1], g[1] = im * par[0] - re * par[1];
    }
};

// h = exp(delta A) h + delta x B, y = sum of C h. Inputs x and delta, shared B and C, parameter A.
template <class T>
struct Selective {
    typedef T R;
    typedef Vec<T> V;
    static constexpr int I = 2, H = 2, P = 1, S = 1, kFill = 0;
    static LATTE_INLINE void clear(V* s) { s[0] = V{}; }
    static LATTE_INLINE V step(const V* in, const T* shared, int64_t N, const V* par, const V* s, V* after) {
        const V h = vexp(in[1] * par[0]) * s[0] + in[1] * in[0] * splat(shared[0]);
        after[0] = h;
        return h * splat(shared[N]);
    }
    static LATTE_INLINE void back(const V* in, const T* shared, int64_t N, const V* par, const V* s, const V* after, V dy, V* g, V* din, V* dshared, V* dpar) {
        const V gate = vexp(in[1] * par[0]), slope = g[0] + dy * splat(shared[N]);
        dshared[1] = dshared[1] + dy * after[0];
        const V written = slope * splat(shared[0]), kept = slope * gate, faded = kept * s[0];
        dshared[0] = dshared[0] + slope * in[1] * in[0];
        din[0] = din[0] + written * in[1];
        din[1] = din[1] + written * in[0] + faded * par[0];
        dpar[0] = dpar[0] + faded * in[1];
        g[0] = kept;
    }
};

// A filter's precision l and mean m: l' = l / (a^2 + p l) + n k^2 and m' = (l / (a^2 + p l) a m + n k v) / l'. Inputs v and n,
// shared k and q, which reads m; parameters a and p.
template <class T>
struct Kalman {
    typedef T R;
    typedef Vec<T> V;
    static constexpr int I = 2, H = 2, P = 2, S = 2, kFill = 1;
    static LATTE_INLINE void clear(V* s) { s[0] = splat(T(1)), s[1] = V{}; }
    static LATTE_INLINE V step(const V* in, const T* shared, int64_t N, const V* par, const V* s, V* after) {
        const V predicted = s[0] / (par[0] * par[0] + par[1] * s[0]), gain = in[1] * splat(shared[0]);
        const V precision = predicted + gain * splat(shared[0]), mean = (predicted * par[0] * s[1] + gain * in[0]) / precision;
        after[0] = precision, after[1] = mean;
        return mean * splat(shared[N]);
    }
    static LATTE_INLINE void back(const V* in, const T* shared, int64_t N, const V* par, const V* s, const V* after, V dy, V* g, V* din, V* dshared, V* dpar) {
        const V k = splat(shared[0]), one = splat(T(1)), inverse = one / (par[0] * par[0] + par[1] * s[0]), predicted = s[0] * inverse, gain = in[1] * k;
        dshared[1] = dshared[1] + dy * after[1];
        const V sum = (g[1] + dy * splat(shared[N])) / after[0], precision = g[0] - sum * after[1];
        const V faded = sum * predicted, dpredicted = sum * par[0] * s[1] + precision, dgain = sum * in[0] + precision * k;
        din[0] = din[0] + sum * gain, din[1] = din[1] + dgain * k;
        dshared[0] = dshared[0] + precision * gain + dgain * in[1];
        const V below = dpredicted * inverse, denominator = -below * predicted;
        dpar[0] = dpar[0] + faded * s[1] + denominator * (par[0] + par[0]);
        dpar[1] = dpar[1] + denominator * s[0];
        g[0] = below + denominator * par[1], g[1] = faded * par[0];
    }
};

LATTE_END

namespace latte {
namespace LATTE_ISA {
void filter_forward(const FilterForward* g) {
    switch (g->kind) {
    case 0: return g->is_double ? filter_forward_typed<StateSpace, double>(*g) : filter_forward_typed<StateSpace, float>(*g);
    case 1: return g->is_double ? filter_forward_typed<Selective<double>, double>(*g) : filter_forward_typed<Selective<float>, float>(*g);
    default: return g->is_double ? filter_forward_typed<Kalman<double>, double>(*g) : filter_forward_typed<Kalman<float>, float>(*g);
    }
}
void filter_backward(const FilterBackward* g) {
    switch (g->kind) {
    case 0: return g->is_double ? filter_backward_typed<StateSpace, double>(*g) : filter_backward_typed<StateSpace, float>(*g);
    case 1: return g->is_double ? filter_backward_typed<Selective<double>, double>(*g) : filter_backward_typed<Selective<float>, float>(*g);
    default: return g->is_double ? filter_backward_typed<Kalman<double>, double>(*g) : filter_backward_typed<Kalman<float>, float>(*g);
    }
}
}  // namespace LATTE_ISA
}  // namespace latte
