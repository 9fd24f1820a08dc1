// Kernels for 64-bit ARM with the dot-product instructions of ARMv8.2.
#include "kernels.h"

#include <arm_neon.h>

#include <cmath>
#include <cstring>

namespace ls {
namespace {

#include "kernels_arm.h"

// The instruction takes signed bytes on both sides. Wide quants have 128 taken off, which the activations' sum gives back:
// 128 * a = 64 * a + 64 * a, as 128 itself is no signed byte.
template <bool WIDE>
inline vi dot(vi acc, vi w, const uint8_t *p) {
    const int8x16_t a = vreinterpretq_s8_u8(all_i32(p));
    int32x4_t sum = vreinterpretq_s32_u8(acc);
    if constexpr (WIDE) {
        const int8x16_t half = vdupq_n_s8(64);
        sum = vdotq_s32(vdotq_s32(sum, half, a), half, a);
        w = veorq_u8(w, vdupq_n_u8(0x80));
    }
    return vreinterpretq_u8_s32(vdotq_s32(sum, vreinterpretq_s8_u8(w), a));
}

#include "kernels_impl.h"

}  // namespace

const Kernels *kernels_neon() {
    static constexpr Kernels table = make_table("neon");
    return &table;
}

}  // namespace ls
