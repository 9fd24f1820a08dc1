// Kernels for 64-bit ARM with the 8-bit matrix-multiply instructions (ARMv8.6, FEAT_I8MM).
//
// USMMLA multiplies 2 rows of 8 weights (unsigned) with 2 columns of 8 activations (signed): twice the work of a dot
// product. One column alone and the plain types go the way of kernels_impl.h, with USDOT; from two columns on they go in
// pairs, by kernels_pairs.h.
#include "kernels.h"

#include <arm_neon.h>

#include <cmath>
#include <cstring>

namespace ls {
namespace {

#include "kernels_arm.h"

template <bool WIDE>
inline vi dot(vi acc, vi w, const uint8_t *p) {
    return vreinterpretq_u8_s32(vusdotq_s32(vreinterpretq_s32_u8(acc), w, vreinterpretq_s8_u8(all_i32(p))));
}

#include "kernels_impl.h"
#include "kernels_pairs.h"

}  // namespace

const Kernels *kernels_neon_i8mm() {
    static constexpr Kernels table = make_pairs_table("neon-i8mm");
    return &table;
}

}  // namespace ls
