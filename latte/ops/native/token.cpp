// One token of a whole model in one call: a program of stages, from the ids to the logits. Or a few tokens of each row, which a
// draft has guessed: their products read the weights once, then each goes through the recurrences after the one before it. All that
// a token gives, its state too, is bit by bit the same however many are read in one call.
//
// At one token a layer is twenty small operations, and calling them takes as long as reading the weights. Here threads wake once
// and go through the stages together; what passes between stages stays in the cache.
#include "stages_attention.h"
#include "stages_channels.h"
#include "stages_kept.h"
#include "stages_latents.h"
#include "stages_matrix.h"
#include "stages_recurrent.h"
#include "stages_scans.h"
#include "stages_zeros.h"

LATTE_BEGIN

constexpr int kBeside = 4;          // stages that run beside each other, at most
constexpr int64_t kTaskBytes = 512;  // of any stage's task

template <class T>
Task<T>* make_task(void* at, const Frame<T>& f, int64_t kind, const void* fields) {
    switch (kind) {
#define LATTE_MAKE(name) \
    case k##name: \
        static_assert(sizeof(Stage<stage::name, T>) <= kTaskBytes, "a task fits in its place"); \
        return new (at) Stage<stage::name, T>(f, *(const stage::name*)fields);
        LATTE_STAGES(LATTE_MAKE)
    }
    abort();  // Python packs no other kind
}

// Every thread walks over the program and takes pieces of its stages.
template <class T>
void walk(const Frame<T>& f, Runner& run) {
    alignas(64) char places[kBeside][kTaskBytes];
    const int64_t *at = (const int64_t*)f.g.program, *end = at + f.g.length;
    while (at < end) {
        Task<T>* tasks[kBeside];
        int64_t first[kBeside + 1] = {0};
        int n = 0;
        for (bool more = true; more; ++n) {
            tasks[n] = make_task<T>(places[n], f, at[0], at + 3);
            first[n + 1] = first[n] + tasks[n]->pieces();
            more = at[1] && n + 1 < kBeside;
            at += 3 + at[2];
        }
        run.stage(first[n], [&](int64_t piece) {
            int i = 0;
            while (piece >= first[i + 1]) ++i;
            tasks[i]->run(piece - first[i]);
        });
        for (int i = 0; i < n; ++i) tasks[i]->~Task<T>();
    }
}

template <class T>
void token_typed(const Call& g) {
    const int64_t rows = g.B * g.T;
    int64_t longest = 0;
    for (int64_t b = 0; b < g.B; ++b) longest = max64(longest, ((const int64_t*)g.count)[b] + g.T);
    const int64_t parts = longest > kKeys ? kMostParts : 0;
    Scratch mem(room(rows * parts * g.partial, sizeof(T)));
    const Frame<T> f{g, rows, mem.take<T>(rows * parts * g.partial)};
    relay(g.threads, [&](Runner& run) { walk(f, run); });
}

LATTE_END

namespace latte {
namespace LATTE_ISA {
void token(const Call* g) { g->is_double ? token_typed<double>(*g) : token_typed<float>(*g); }
}  // namespace LATTE_ISA
}  // namespace latte
