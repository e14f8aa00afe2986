// Weights in blocks as floats, and products of many rows with them: what reading long texts does.
#include "blocks.h"
#include "gemm.h"
#include "product.h"

LATTE_BEGIN

// Rows of x that meet a panel together: as many as leave the sums in registers.
#if defined(__AVX512F__)
constexpr int kRowsOfX = 12;
#else
constexpr int kRowsOfX = kTileRows;
#endif
constexpr int64_t kColumns = kTileCols<float>;

// `rows` rows of x with a panel (K, kColumns), of which the first n columns count.
template <int rows>
LATTE_INLINE void meet(const BlockProduct& g, const float* panel, int64_t row, int64_t column, int64_t n) {
    const float *x = (const float*)g.x + row * g.K, *bias = (const float*)g.bias;
    float out[rows * kColumns];
    product<float, false, rows>(x, g.K, 1, panel, kColumns, g.K, out, kColumns);
    for (int64_t r = 0; r < rows; ++r) {
        float *from = out + r * kColumns, *y = (float*)g.y + (row + r) * g.N + column;
        each_vector<float>(n, [=](int64_t c, int64_t k) __attribute__((always_inline)) {
            const Vec<float> sum = load(from + c);
            store_some(y + c, bias ? sum + load_some(bias + column + c, k, 0.0f) : sum, k);
        });
    }
}

// kColumns rows of the matrix become a panel of floats, which stays in the cache until all rows of x have met it. Every number of
// the output is one chain of additions over K, whatever the number of rows.
void panel_products(const BlockProduct& g) {
    const int64_t K = g.K, row = row_bytes(g.format, K, 4);
    const double work = double(g.M) * double(K) * double(g.N);
    share((g.N + kColumns - 1) / kColumns, useful_threads(g.threads, work), [&](int64_t piece) {
        const int64_t column = piece * kColumns, n = min64(kColumns, g.N - column);
        Scratch mem(2 * room(kColumns * K, sizeof(float)));
        float *floats = mem.take<float>(kColumns * K), *panel = mem.take<float>(kColumns * K);
        for (int64_t r = 0; r < n; ++r) read_row(g.format, (const char*)g.w + (column + r) * row, floats + r * K, K);
        pack_columns<float, int32_t>(panel, floats, K, n, K, nullptr);
        int64_t m = 0;
        for (; m + kRowsOfX <= g.M; m += kRowsOfX) meet<kRowsOfX>(g, panel, m, column, n);
        for (; m + 4 <= g.M; m += 4) meet<4>(g, panel, m, column, n);
        for (; m < g.M; ++m) meet<1>(g, panel, m, column, n);
    });
}

// For fewer rows a panel is not worth making.
constexpr int64_t kFewRows = 6;

LATTE_END

namespace latte {
namespace LATTE_ISA {
void unpack_blocks(const UnpackBlocks* g) {
    const int64_t row = row_bytes(g->format, g->K, 4);
    parallel(g->rows, useful_threads(g->threads, double(g->rows) * double(g->K)), [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) read_row(g->format, (const char*)g->blocks + r * row, (float*)g->y + r * g->K, g->K);
    });
}
void block_product(const BlockProduct* g) {
    if (g->M > kFewRows) return panel_products(*g);
    Products few{0, g->threads, g->M, g->K, 1, kIdentity, 0, 0, g->x, g->K, {{g->w, g->bias, g->N, g->format, g->y}}};
    const Rows<float> rows(few);
    share(rows.pieces(), useful_threads(g->threads, rows.work()), rows);
}
}  // namespace LATTE_ISA
}  // namespace latte
