// One token of a Macchiato layer between its projections, as a kernel of its own: decode.h says what it does.
#include "decode.h"

LATTE_BEGIN

template <class T>
void decode_typed(const Decode& g) {
    const double work = double(g.B * g.H) * (double(g.M * g.V) * 3 + (g.windowed ? double(g.R + g.N + 1) * double(g.K + g.V) : 0.0));
    parallel(g.B * g.G, useful_threads(g.threads, work), [&](int64_t begin, int64_t end) {
        Mixing<T> mixing(g);
        for (int64_t unit = begin; unit < end; ++unit) mixing(unit);
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void decode(const Decode* g) { g->is_double ? decode_typed<double>(*g) : decode_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
