// Attention on 64-bit Arm. NEON with fused multiply-add and f16 conversion is part of every such CPU; compile with -ffp-contract=off.
#include "attention_plan.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace {

typedef float32x4_t vf;
constexpr int       W  = 4;
constexpr int       GP = 1; // 6 rows by 4 vectors: 24 of 32 registers

inline vf   v_load(const float * p) { return vld1q_f32(p); }
inline void v_store(float * p, vf x) { vst1q_f32(p, x); }
inline vf   v_set1(float x) { return vdupq_n_f32(x); }
inline vf   v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
inline vf   v_add(vf a, vf b) { return vaddq_f32(a, b); }
inline vf   v_sub(vf a, vf b) { return vsubq_f32(a, b); }
inline vf   v_mul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf   v_div(vf a, vf b) { return vdivq_f32(a, b); }
inline vf   v_max(vf a, vf b) { return vmaxq_f32(a, b); }
inline vf   v_min(vf a, vf b) { return vminq_f32(a, b); }
inline vf   v_abs(vf x) { return vabsq_f32(x); }
inline vf   v_copysign(vf size, vf sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, size); }
inline vf   v_round(vf x) { return vrndnq_f32(x); }
inline vf   v_ldexp(vf p, vf n) { // both normal, or the result isn't used
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
}
inline vf v_zero_if_less(vf x, vf limit, vf y) { return vbslq_f32(vcltq_f32(x, limit), vdupq_n_f32(0.0f), y); }
inline vf v_select_if_less(vf x, vf limit, vf yes, vf no) { return vbslq_f32(vcltq_f32(x, limit), yes, no); }
inline vf v_hide(vf mask, vf x) {
    const vf hidden = vdupq_n_f32(-__builtin_inff());
    return vbslq_f32(vceqq_f32(mask, hidden), hidden, x);
}
inline float v_first(vf x) { return vgetq_lane_f32(x, 0); }
inline float v_hmax(vf x) { return vmaxvq_f32(x); }
inline bool  v_any_nan(vf x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }
inline vf    v_load_f16(const uint16_t * p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline vf    v_load_i8(const int8_t * p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
}

inline void v_transpose(vf t[W]) {
    const float32x4x2_t a = vtrnq_f32(t[0], t[1]), b = vtrnq_f32(t[2], t[3]);
    t[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    t[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    t[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    t[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

constexpr int F16_TILE = 0;
inline void   v_pack_f16(const char * const *, int64_t, float *, int64_t) {}

#include "attention_kernel.h"

constexpr ls_attention_kernel KERNEL = { "neon", run };

} // namespace

extern "C" const ls_attention_kernel * ls_att_neon(void) { return &KERNEL; }
#else
extern "C" const ls_attention_kernel * ls_att_neon(void) { return nullptr; }
#endif
