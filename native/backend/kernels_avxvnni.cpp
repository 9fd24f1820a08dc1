// Kernels for CPUs with AVX2, FMA, F16C and the 256-bit VNNI instructions.
#include "kernels.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace ls {
namespace {

#include "kernels_ymm.h"

template <bool WIDE>
inline vi dot(vi acc, vi w, const uint8_t *p) {
    return _mm256_dpbusd_avx_epi32(acc, w, all_i32(p));
}

#include "kernels_impl.h"

}  // namespace

const Kernels *kernels_avxvnni() {
    static constexpr Kernels table = make_table("avxvnni");
    return &table;
}

}  // namespace ls
