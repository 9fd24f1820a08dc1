// The primitives that the two 256-bit instruction sets share. Included inside their anonymous namespaces.
using vi = __m256i;
using vf = __m256;
constexpr int kLanes = 8;

inline vi load(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline vi and_(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi or_(vi a, vi b) { return _mm256_or_si256(a, b); }
template <int n> inline vi shl(vi v) { return _mm256_slli_epi16(v, n); }
template <int n> inline vi shr(vi v) { return _mm256_srli_epi16(v, n); }
inline vi bytes(char x) { return _mm256_set1_epi8(x); }
inline vi zero() { return _mm256_setzero_si256(); }
inline vi lookup(vi v) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(kIq4Table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), v);
}
inline vi all_i32(const uint8_t *p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}
inline vf all_f32(const uint8_t *p) {
    float x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_ps(x);
}
inline vf to_float(vi v) { return _mm256_cvtepi32_ps(v); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
inline vf zero_f() { return _mm256_setzero_ps(); }
inline vf load_f32(const void *p) { return _mm256_loadu_ps(static_cast<const float *>(p)); }
inline vf load_f16(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
inline vf load_bf16(const uint8_t *p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline vf from_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
inline vf from_s8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
inline void store_f32(float *p, vf v) { _mm256_storeu_ps(p, v); }
inline void prefetch(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }
inline void prefetch_far(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1); }
