// Products of a few rows with weight matrices, as a kernel of its own: product.h says what it does.
#include "product.h"

LATTE_BEGIN

template <class T>
void products_typed(const Products& g) {
    const Rows<T> rows(g);
    share(rows.pieces(), useful_threads(g.threads, rows.work()), rows);
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void products(const Products* g) { g->is_double ? products_typed<double>(*g) : products_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
