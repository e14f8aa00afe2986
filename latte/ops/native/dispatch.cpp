// Chooses, once, the widest instruction set that both the build and the machine have, and exports the C interface.
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "stages.h"

#define LATTE_KERNELS(X) \
    X(latte_forward, LatteForward) \
    X(latte_backward, LatteBackward) \
    X(window_forward, WindowForward) \
    X(window_backward, WindowBackward) \
    X(kept_select, KeptSelect) \
    X(kept_forward, KeptForward) \
    X(kept_backward, KeptBackward) \
    X(scan_forward, ScanForward) \
    X(scan_backward, ScanBackward) \
    X(conv_forward, ConvForward) \
    X(conv_backward, ConvBackward) \
    X(filter_forward, FilterForward) \
    X(filter_backward, FilterBackward) \
    X(decay_forward, DecayForward) \
    X(decay_backward, DecayBackward) \
    X(delta_forward, DeltaForward) \
    X(delta_backward, DeltaBackward) \
    X(rglru_forward, RglruForward) \
    X(rglru_backward, RglruBackward) \
    X(rotate, Rotate) \
    X(swiglu_forward, SwigluForward) \
    X(swiglu_backward, SwigluBackward) \
    X(norm_forward, NormForward) \
    X(norm_backward, NormBackward) \
    X(products, Products) \
    X(unpack_blocks, UnpackBlocks) \
    X(block_product, BlockProduct) \
    X(token, Call)

#define LATTE_DECLARE(name, type) void name(const type*);
#define LATTE_FIELD(name, type) void (*name)(const type*);
#define LATTE_ISA_TABLE(isa) \
    namespace isa { \
    LATTE_KERNELS(LATTE_DECLARE) \
    }

namespace latte {

LATTE_ISA_TABLE(portable)
#ifdef LATTE_WITH_AVX2
LATTE_ISA_TABLE(avx2)
#endif
#ifdef LATTE_WITH_AVX512
LATTE_ISA_TABLE(avx512)
#endif

namespace {

struct Table {
    const char* name;
    LATTE_KERNELS(LATTE_FIELD)
};

#define LATTE_PORTABLE(name, type) portable::name,
#define LATTE_AVX2(name, type) avx2::name,
#define LATTE_AVX512(name, type) avx512::name,

// LATTE_ISA=portable|avx2|avx512 asks for a narrower set than the machine has, for tests and comparisons.
bool allowed(const char* isa) {
    const char* asked = getenv("LATTE_ISA");
    return !asked || !*asked || !strcmp(asked, isa);
}

Table choose() {
#ifdef LATTE_WITH_AVX512
    if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma"))  // and with them f16c
        return {"avx512", LATTE_KERNELS(LATTE_AVX512)};
#endif
#ifdef LATTE_WITH_AVX2
    if (allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {"avx2", LATTE_KERNELS(LATTE_AVX2)};
#endif
#if defined(__aarch64__)
    return {"neon", LATTE_KERNELS(LATTE_PORTABLE)};
#else
    return {"portable", LATTE_KERNELS(LATTE_PORTABLE)};
#endif
}

const Table& table() {
    static const Table chosen = choose();
    return chosen;
}

}  // namespace
}  // namespace latte

#define LATTE_EXPORT(name, type) \
    extern "C" __attribute__((visibility("default"))) void name(const latte::type* args) { latte::table().name(args); }
LATTE_KERNELS(LATTE_EXPORT)

// Raised with every change of the argument blocks, so that a stale library is not called with the wrong fields.
extern "C" __attribute__((visibility("default"))) int latte_abi() { return 20; }
// The stages of a program and their fields, a line for each: Python packs them by name.
extern "C" __attribute__((visibility("default"))) const char* latte_stages() { return latte::kStagesText; }
extern "C" __attribute__((visibility("default"))) const char* latte_isa() { return latte::table().name; }
extern "C" __attribute__((visibility("default"))) int latte_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
