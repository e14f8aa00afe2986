// Products of a few rows with weight matrices, and the RG-LRU's step, as kernels of their own: product.h says what they do.
#include "product.h"

LATTE_BEGIN

template <class T>
void products_typed(const Products& g) {
    const Rows<T> rows(g);
    share(rows.pieces(), useful_threads(g.threads, rows.work()), rows);
}

template <class T>
void rglru_step_typed(const RglruStep& g) {
    const double work = 2.0 * double(g.B * g.H * g.W) * double(g.W);
    parallel(g.H, useful_threads(g.threads, work), [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; ++h) {
            RglruHead<T> head(g, h);
            for (int64_t b = 0; b < g.B; ++b) head(g, b);
        }
    });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void products(const Products* g) { g->is_double ? products_typed<double>(*g) : products_typed<float>(*g); }
void rglru_step(const RglruStep* g) { g->is_double ? rglru_step_typed<double>(*g) : rglru_step_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
