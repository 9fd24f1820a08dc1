// The primitives that the 64-bit ARM instruction sets share. Included inside their anonymous namespaces.
using vi = uint8x16_t;
using vf = float32x4_t;
constexpr int kLanes = 4;

inline vi load(const uint8_t *p) { return vld1q_u8(p); }
inline vi and_(vi a, vi b) { return vandq_u8(a, b); }
inline vi or_(vi a, vi b) { return vorrq_u8(a, b); }
template <int n> inline vi shl(vi v) { return vshlq_n_u8(v, n); }
template <int n> inline vi shr(vi v) { return vshrq_n_u8(v, n); }
inline vi bytes(char x) { return vdupq_n_u8(uint8_t(x)); }
inline vi zero() { return vdupq_n_u8(0); }
inline vi lookup(vi v) { return vqtbl1q_u8(vld1q_u8(kIq4Table), v); }
inline vi all_i32(const uint8_t *p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return vreinterpretq_u8_s32(vdupq_n_s32(x));
}
inline vf all_f32(const uint8_t *p) {
    float x;
    std::memcpy(&x, p, 4);
    return vdupq_n_f32(x);
}
inline vf to_float(vi v) { return vcvtq_f32_s32(vreinterpretq_s32_u8(v)); }
inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
inline vf fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
inline vf zero_f() { return vdupq_n_f32(0.0f); }
inline vf load_f32(const void *p) { return vld1q_f32(static_cast<const float *>(p)); }
inline vf load_f16(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline vf load_bf16(const uint8_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
inline vf from_u8(const uint8_t *p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
inline vf from_s8(const uint8_t *p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
inline void store_f32(float *p, vf v) { vst1q_f32(p, v); }
inline void prefetch(const uint8_t *p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_far(const uint8_t *p) { __builtin_prefetch(p, 0, 2); }
