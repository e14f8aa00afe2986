// A matrix of weights in blocks as floats: what reading long texts multiplies with.
#include "blocks.h"
#include "work.h"

namespace latte {
namespace LATTE_ISA {
void unpack_blocks(const UnpackBlocks* g) {
    const int64_t row = row_bytes(g->format, g->K, 4);
    parallel(g->rows, useful_threads(g->threads, double(g->rows) * double(g->K)), [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) read_row(g->format, (const char*)g->blocks + r * row, (float*)g->y + r * g->K, g->K);
    });
}
}  // namespace LATTE_ISA
}  // namespace latte
