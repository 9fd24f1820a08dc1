// Kernels for CPUs with AVX512 F, BW, DQ, VL and VNNI.
#include "kernels.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace ls {
namespace {

using vi = __m512i;
using vf = __m512;
constexpr int kLanes = 16;

inline vi load(const uint8_t *p) { return _mm512_loadu_si512(p); }
inline vi and_(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi or_(vi a, vi b) { return _mm512_or_si512(a, b); }
template <int n> inline vi shl(vi v) { return _mm512_slli_epi16(v, n); }
template <int n> inline vi shr(vi v) { return _mm512_srli_epi16(v, n); }
inline vi bytes(char x) { return _mm512_set1_epi8(x); }
inline vi zero() { return _mm512_setzero_si512(); }
inline vi lookup(vi v) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(kIq4Table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), v);
}
inline vi all_i32(const uint8_t *p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}
template <bool WIDE> inline vi dot(vi acc, vi w, const uint8_t *p) { return _mm512_dpbusd_epi32(acc, w, all_i32(p)); }
inline vf all_f32(const uint8_t *p) {
    float x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_ps(x);
}
inline vf to_float(vi v) { return _mm512_cvtepi32_ps(v); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
inline vf zero_f() { return _mm512_setzero_ps(); }
inline vf load_f32(const void *p) { return _mm512_loadu_ps(p); }
inline vf load_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline vf load_bf16(const uint8_t *p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline vf from_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
inline vf from_s8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
inline void store_f32(float *p, vf v) { _mm512_storeu_ps(p, v); }
inline void prefetch(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }
inline void prefetch_far(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1); }

#include "kernels_impl.h"

}  // namespace

const Kernels *kernels_avx512() {
    static constexpr Kernels table = make_table("avx512");
    return &table;
}

}  // namespace ls
