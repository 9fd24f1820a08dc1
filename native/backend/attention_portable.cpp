// Attention in plain C++, for CPUs without vectors that we know, and to hold the vector kernels to: it gives the same bits. Slow where the
// C library has no hardware to do fmaf with. Compile with -ffp-contract=off.
#include "attention_plan.h"

namespace {

struct vf {
    float x[4];
};
constexpr int W  = 4;
constexpr int GP = 1;

float bits_to_float(uint32_t u);
float half_to_float(uint16_t h);

template <typename F> inline vf each(F f) {
    vf r;
    for (int i = 0; i < W; i++) {
        r.x[i] = f(i);
    }
    return r;
}

uint32_t float_to_bits(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof u);
    return u;
}

inline vf   v_load(const float * p) { return each([&](int i) { return p[i]; }); }
inline void v_store(float * p, vf a) { __builtin_memcpy(p, a.x, sizeof a.x); }
inline vf   v_set1(float x) { return each([&](int) { return x; }); }
inline vf   v_fma(vf a, vf b, vf c) { return each([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); }); }
inline vf   v_add(vf a, vf b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline vf   v_sub(vf a, vf b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
inline vf   v_mul(vf a, vf b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
inline vf   v_div(vf a, vf b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
inline vf   v_max(vf a, vf b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
inline vf   v_min(vf a, vf b) { return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
inline vf   v_abs(vf a) { return each([&](int i) { return __builtin_fabsf(a.x[i]); }); }
inline vf   v_copysign(vf size, vf sign) { return each([&](int i) { return __builtin_copysignf(size.x[i], sign.x[i]); }); }
// Adding 1.5 * 2^23 leaves no room for a fraction: rounds to nearest even, for |x| < 2^22.
inline vf v_round(vf a) { return each([&](int i) { return (a.x[i] + 0x1.8p23f) - 0x1.8p23f; }); }
inline vf v_ldexp(vf p, vf n) { // both normal, or the result isn't used
    return each([&](int i) { return bits_to_float(float_to_bits(p.x[i]) + (float_to_bits(n.x[i] + 0x1.8p23f) << 23)); });
}
inline vf v_zero_if_less(vf a, vf limit, vf y) { return each([&](int i) { return a.x[i] < limit.x[i] ? 0.0f : y.x[i]; }); }
inline vf v_select_if_less(vf a, vf limit, vf yes, vf no) { return each([&](int i) { return a.x[i] < limit.x[i] ? yes.x[i] : no.x[i]; }); }
inline vf v_hide(vf mask, vf a) { return each([&](int i) { return mask.x[i] == -__builtin_inff() ? mask.x[i] : a.x[i]; }); }
inline float v_first(vf a) { return a.x[0]; }
inline float v_hmax(vf a) {
    float top = a.x[0];
    for (int i = 1; i < W; i++) {
        top = a.x[i] > top ? a.x[i] : top;
    }
    return top;
}
inline bool v_any_nan(vf a) { return a.x[0] != a.x[0] || a.x[1] != a.x[1] || a.x[2] != a.x[2] || a.x[3] != a.x[3]; }
inline vf   v_load_f16(const uint16_t * p) { return each([&](int i) { return half_to_float(p[i]); }); }
inline vf   v_load_i8(const int8_t * p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
inline void v_transpose(vf t[W]) {
    for (int i = 0; i < W; i++) {
        for (int j = 0; j < i; j++) {
            const float x = t[i].x[j];
            t[i].x[j]     = t[j].x[i];
            t[j].x[i]     = x;
        }
    }
}

constexpr int F16_TILE = 0;
inline void   v_pack_f16(const char * const *, int64_t, float *, int64_t) {}

#include "attention_kernel.h"

constexpr ls_attention_kernel KERNEL = { "portable", run };

} // namespace

extern "C" const ls_attention_kernel * ls_att_portable(void) { return &KERNEL; }
