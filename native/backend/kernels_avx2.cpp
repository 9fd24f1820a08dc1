// Kernels for CPUs with AVX2, FMA and F16C.
#include "kernels.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace ls {
namespace {

#include "kernels_ymm.h"

// Without VNNI: the byte products are added in pairs in 16 bits. They would overflow for quants above 128, so the sign moves
// from the weights to the activations: w - 128 lies in -128..127, |w - 128| * |a| * 2 fits, and 128 * a is added back by a
// second multiplication. Quants below 64 (all types but Q8_0 and the IQ4 table) take the short way.
inline vi dot_wide(vi acc, vi w, vi a) {
    const vi v = _mm256_xor_si256(w, bytes(char(0x80)));
    const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(a, v));
    const vi ones = _mm256_set1_epi16(1);
    const vi base = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes(1), a), _mm256_set1_epi16(128));
    return _mm256_add_epi32(_mm256_add_epi32(acc, base), _mm256_madd_epi16(pairs, ones));
}
template <bool WIDE>
inline vi dot(vi acc, vi w, const uint8_t *p) {
    const vi a = all_i32(p);
    if constexpr (WIDE) return dot_wide(acc, w, a);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
}

#include "kernels_impl.h"

}  // namespace

const Kernels *kernels_avx2() {
    static constexpr Kernels table = make_table("avx2");
    return &table;
}

}  // namespace ls
