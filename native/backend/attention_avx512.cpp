// Attention on AVX-512 (F, BW, DQ, VL). Compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -ffp-contract=off.
#include "attention_plan.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace {

typedef __m512 vf;
constexpr int  W  = 16;
constexpr int  GP = 4; // 6 rows by 4 vectors: 24 of 32 registers

inline vf   v_load(const float * p) { return _mm512_loadu_ps(p); }
inline void v_store(float * p, vf x) { _mm512_storeu_ps(p, x); }
inline vf   v_set1(float x) { return _mm512_set1_ps(x); }
inline vf   v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf   v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf   v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf   v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf   v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf   v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf   v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf   v_abs(vf x) { return _mm512_abs_ps(x); }
inline vf   v_copysign(vf size, vf sign) {
    const vf bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(bit, size), _mm512_and_ps(bit, sign));
}
inline vf v_round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf v_ldexp(vf p, vf n) { return _mm512_scalef_ps(p, n); }
inline vf v_zero_if_less(vf x, vf limit, vf y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y); }
inline vf v_select_if_less(vf x, vf limit, vf yes, vf no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), yes);
}
inline vf v_hide(vf mask, vf x) {
    const vf hidden = _mm512_set1_ps(-__builtin_inff());
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(mask, hidden, _CMP_EQ_OQ), hidden);
}
inline float v_first(vf x) { return _mm512_cvtss_f32(x); }
inline float v_hmax(vf x) { return _mm512_reduce_max_ps(x); }
inline bool  v_any_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline vf    v_load_f16(const uint16_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
inline vf    v_load_i8(const int8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

// 16 x 16: pairs, quadruples, then the 128-bit quarters.
inline void v_transpose(vf t[W]) {
    vf u[W];
    LS_UNROLL
    for (int i = 0; i < 16; i += 2) {
        u[i]     = _mm512_unpacklo_ps(t[i], t[i + 1]);
        u[i + 1] = _mm512_unpackhi_ps(t[i], t[i + 1]);
    }
    LS_UNROLL
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(u[i]), b = _mm512_castps_pd(u[i + 2]);
        const __m512d c = _mm512_castps_pd(u[i + 1]), d = _mm512_castps_pd(u[i + 3]);
        t[i]     = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
        t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    // t[4 g + i], quarter q: element 4 q + i of rows 4 g .. 4 g + 3.
    LS_UNROLL
    for (int i = 0; i < 4; i++) {
        const vf a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x88), b = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x88);
        const vf c = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xdd), d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xdd);
        u[i]      = _mm512_shuffle_f32x4(a, b, 0x88);
        u[4 + i]  = _mm512_shuffle_f32x4(c, d, 0x88);
        u[8 + i]  = _mm512_shuffle_f32x4(a, b, 0xdd);
        u[12 + i] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
    LS_UNROLL
    for (int i = 0; i < 16; i++) {
        t[i] = u[i];
    }
}

constexpr int F16_TILE = 32;

// Elements d .. d + 31 of 16 rows to out[32][stride]: pairs of f16 are transposed as one 32-bit element, and the quarters are put in place as
// they are loaded, so that half of the shuffles of the general way remain, or a quarter per element.
inline void v_pack_f16(const char * const row[W], int64_t d, float * out, int64_t stride) {
    const __m512i split = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8,
                                           6, 4, 2, 0);
    LS_UNROLL
    for (int q = 0; q < 4; q++) {
        const int64_t at = 2 * d + 16 * q; // bytes
        __m512i       x[4];                // 128-bit quarter k of x[i]: 8 elements of row 4 k + i
        LS_UNROLL
        for (int i = 0; i < 4; i++) {
            x[i] = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row[i] + at)));
            x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x00f0, _mm_loadu_si128(reinterpret_cast<const __m128i *>(row[4 + i] + at)));
            x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x0f00, _mm_loadu_si128(reinterpret_cast<const __m128i *>(row[8 + i] + at)));
            x[i] = _mm512_mask_broadcast_i32x4(x[i], 0xf000, _mm_loadu_si128(reinterpret_cast<const __m128i *>(row[12 + i] + at)));
        }
        const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), e = _mm512_unpackhi_epi32(x[2], x[3]);
        const __m512i pairs[4] = { _mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, e), _mm512_unpackhi_epi64(b, e) };
        LS_UNROLL
        for (int i = 0; i < 4; i++) {
            const __m512i halves = _mm512_permutexvar_epi16(split, pairs[i]);
            float *       to     = out + (8 * q + 2 * i) * stride;
            _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
            _mm512_storeu_ps(to + stride, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
        }
    }
}

#include "attention_kernel.h"

constexpr ls_attention_kernel KERNEL = { "avx512", run };

} // namespace

extern "C" const ls_attention_kernel * ls_att_avx512(void) { return &KERNEL; }
#else
extern "C" const ls_attention_kernel * ls_att_avx512(void) { return nullptr; }
#endif
