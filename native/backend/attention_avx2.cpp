// Attention on AVX2. Compile with -mavx2 -mfma -mf16c -ffp-contract=off.
#include "attention_plan.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace {

typedef __m256 vf;
constexpr int  W  = 8;
constexpr int  GP = 1; // 6 rows by 2 vectors: 12 of 16 registers

inline vf   v_load(const float * p) { return _mm256_loadu_ps(p); }
inline void v_store(float * p, vf x) { _mm256_storeu_ps(p, x); }
inline vf   v_set1(float x) { return _mm256_set1_ps(x); }
inline vf   v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf   v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf   v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf   v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf   v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf   v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf   v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf   v_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline vf   v_copysign(vf size, vf sign) {
    const vf bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, size), _mm256_and_ps(bit, sign));
}
inline vf v_round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf v_ldexp(vf p, vf n) { // both normal, or the result isn't used
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline vf v_zero_if_less(vf x, vf limit, vf y) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y); }
inline vf v_select_if_less(vf x, vf limit, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, limit, _CMP_LT_OQ)); }
inline vf v_hide(vf mask, vf x) {
    const vf hidden = _mm256_set1_ps(-__builtin_inff());
    return _mm256_blendv_ps(x, hidden, _mm256_cmp_ps(mask, hidden, _CMP_EQ_OQ));
}
inline float v_first(vf x) { return _mm256_cvtss_f32(x); }
inline float v_hmax(vf x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y        = _mm_max_ps(y, _mm_movehl_ps(y, y));
    y        = _mm_max_ss(y, _mm_movehdup_ps(y));
    return _mm_cvtss_f32(y);
}
inline bool v_any_nan(vf x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
inline vf   v_load_f16(const uint16_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
inline vf   v_load_i8(const int8_t * p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

// 8 x 8: pairs, quadruples, halves.
inline void v_transpose(vf t[W]) {
    vf u[W];
    for (int i = 0; i < 8; i += 2) {
        u[i]     = _mm256_unpacklo_ps(t[i], t[i + 1]);
        u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        t[i]     = _mm256_shuffle_ps(u[i], u[i + 2], 0x44);
        t[i + 1] = _mm256_shuffle_ps(u[i], u[i + 2], 0xee);
        t[i + 2] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0x44);
        t[i + 3] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        u[i]     = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
        u[4 + i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
    }
    for (int i = 0; i < 8; i++) {
        t[i] = u[i];
    }
}

constexpr int F16_TILE = 0;
inline void   v_pack_f16(const char * const *, int64_t, float *, int64_t) {}

#include "attention_kernel.h"

constexpr ls_attention_kernel KERNEL = { "avx2", run };

} // namespace

extern "C" const ls_attention_kernel * ls_att_avx2(void) { return &KERNEL; }
#else
extern "C" const ls_attention_kernel * ls_att_avx2(void) { return nullptr; }
#endif
