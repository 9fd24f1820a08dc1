// The kernels, written once over the compiler's vector types and compiled for each instruction set: the including file
// defines LANES (doubles in a register: 2, 4 or 8) and NAME, and is compiled with that set's flags.
//
// Nothing here may be an inline function or template with external linkage: the linker would keep one copy for everybody,
// perhaps the one that not every CPU can run. Hence the unnamed namespace, and no standard library beyond types.
#include <cstdint>

#include "kernels.h"
#include "random.h"

namespace {

typedef double Doubles __attribute__((vector_size(LANES * 8)));
typedef int64_t Longs __attribute__((vector_size(LANES * 8)));
typedef uint64_t Bits __attribute__((vector_size(LANES * 8)));
typedef float HalfFloats __attribute__((vector_size(LANES * 4)));  // as many floats as Doubles has doubles
typedef int32_t HalfInts __attribute__((vector_size(LANES * 4)));
typedef float Floats __attribute__((vector_size(LANES * 8)));
typedef int32_t Ints __attribute__((vector_size(LANES * 8)));

constexpr int kLanes = LANES;
constexpr int kFloats = 2 * LANES;
constexpr float kNothing = -__builtin_inff();

template <class V, class T> inline V load(const T * from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <class T, class V> inline void store(T * to, V v) { __builtin_memcpy(to, &v, sizeof v); }

inline Doubles all(double x) { return x - Doubles{}; }

inline Doubles only(Longs mask, Doubles x) { return (Doubles) ((Longs) x & mask); }

inline Doubles choose(Longs mask, Doubles a, Doubles b) { return (Doubles) (((Longs) a & mask) | ((Longs) b & ~mask)); }

inline bool any(Longs mask) {
    int64_t m[kLanes], r = 0;
    store(m, mask);
    for (int i = 0; i < kLanes; i++) r |= m[i];
    return r != 0;
}

constexpr double kLn2High = 0x1.62e42feep-1;  // 33 bits, so that n * kLn2High is exact
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

// e^x for x <= 0; 0 below -708 and for NaN. Taylor to the 13th power over |r| <= ln 2 / 2.
inline Doubles exp_each(Doubles x) {
    const double shift = 0x1.8p52;  // adding it rounds to an integer, which then stands in the low bits
    const Longs inside = x >= -708.0;
    x = only(inside, x);
    const Doubles shifted = x * 0x1.71547652b82fep+0 + shift;
    const Doubles n = shifted - shift;
    const Doubles r = (x - n * kLn2High) - n * kLn2Low;
    static constexpr double terms[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                       1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                       1.0 / 6,          0.5,             1.0,            1.0};
    Doubles p = all(terms[0]);
    for (int i = 1; i < 14; i++) p = p * r + terms[i];
    const Doubles scale = (Doubles) (((Longs) shifted + 1023) << 52);
    return only(inside, p * scale);
}

// Natural logarithm of normal positive numbers: 2 atanh((m - 1) / (m + 1)) + e ln 2, m in [1/sqrt 2, sqrt 2).
inline Doubles log_each(Doubles x) {
    const Bits bits = (Bits) x;
    Longs e = (Longs) (bits >> 52) - 1023;
    Doubles m = (Doubles) ((bits & ((1ull << 52) - 1)) | (1023ull << 52));
    const Longs high = m >= 0x1.6a09e667f3bcdp+0;
    m = choose(high, m * 0.5, m);
    e -= high;  // a true lane is -1
    const Doubles exponent = __builtin_convertvector(e, Doubles);
    const Doubles s = (m - 1.0) / (m + 1.0);
    const Doubles z = s * s;
    static constexpr double terms[] = {2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11,
                                       2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3,  2.0};
    Doubles p = all(terms[0]);
    for (int i = 1; i < 11; i++) p = p * z + terms[i];
    return (s * p + exponent * kLn2Low) + exponent * kLn2High;
}

// 1 - u of each token, in (0, 1), exact: 1 - (m + 1/2) / 2^52 with m the bits' upper 52.
inline Doubles one_minus_uniform(Bits at) {
    at += localspec::kGolden;
    at = (at ^ (at >> 30)) * localspec::kMix1;
    at = (at ^ (at >> 27)) * localspec::kMix2;
    at ^= at >> 31;
    const Doubles one_to_two = (Doubles) ((at >> 12) | (1023ull << 52));
    return (2.0 - one_to_two) - 0x1p-53;
}

void chunk_max(const float * x, int64_t n, float * maxima) {
    constexpr int kParts = 4;  // independent chains
    for (; n > 0; n -= localspec::kChunk, x += localspec::kChunk) {
        float top = kNothing;
        if (n >= localspec::kChunk) {
            Floats part[kParts];
            for (auto & p : part) p = kNothing - Floats{};
            for (int i = 0; i < localspec::kChunk; i += kParts * kFloats) {
                for (int j = 0; j < kParts; j++) {
                    const Floats here = load<Floats>(x + i + j * kFloats);
                    part[j] = here > part[j] ? here : part[j];  // false for NaN
                }
            }
            part[0] = part[0] > part[1] ? part[0] : part[1];
            part[2] = part[2] > part[3] ? part[2] : part[3];
            part[0] = part[0] > part[2] ? part[0] : part[2];
            float last[kFloats];
            store(last, part[0]);
            for (float v : last) top = v > top ? v : top;
        } else {
            for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
        }
        *maxima++ = top;
    }
}

double weights(const float * x, int64_t n, double top, double inverse, double * w) {
    constexpr int kParts = 8 / kLanes;
    Doubles sum[kParts] = {};
    for (int64_t i = 0; i < n; i += 8) {
        float tail[8];
        const float * from = x + i;
        if (n - i < 8) {
            for (int j = 0; j < 8; j++) tail[j] = i + j < n ? from[j] : kNothing;
            from = tail;
        }
        Doubles value[kParts];
        for (int j = 0; j < kParts; j++) {
            const Doubles here = __builtin_convertvector(load<HalfFloats>(from + j * kLanes), Doubles);
            value[j] = exp_each((here - top) * inverse);
            sum[j] += value[j];
        }
        if (w != nullptr) __builtin_memcpy(w + i, value, sizeof(double) * (n - i < 8 ? n - i : 8));
    }
    double s[8];
    __builtin_memcpy(s, sum, sizeof s);
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

// e^x for x <= 0 in single precision; 0 below -87 and for NaN. Taylor to the 7th power over |r| <= ln 2 / 2.
inline Floats exp_each(Floats x) {
    const float shift = 0x1.8p23f;
    const Ints inside = x >= -87.0f;
    x = (Floats) ((Ints) x & inside);
    const Floats shifted = x * 0x1.715476p+0f + shift;
    const Floats n = shifted - shift;
    const Floats r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts, the first of 15 bits
    static constexpr float terms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    Floats p = terms[0] - Floats{};
    for (int i = 1; i < 8; i++) p = p * r + terms[i];
    const Floats scale = (Floats) (((Ints) shifted + 127) << 23);
    return (Floats) ((Ints) (p * scale) & inside);
}

double sum_exp(const float * x, int64_t n, float top) {
    constexpr int kParts = 16 / kFloats;
    Floats sum[kParts] = {};
    for (int64_t i = 0; i < n; i += 16) {
        float tail[16];
        const float * from = x + i;
        if (n - i < 16) {
            for (int j = 0; j < 16; j++) tail[j] = i + j < n ? from[j] : kNothing;
            from = tail;
        }
        for (int j = 0; j < kParts; j++) sum[j] += exp_each(load<Floats>(from + j * kFloats) - top);
    }
    float s[16];
    __builtin_memcpy(s, sum, sizeof s);
    double d[16];
    for (int i = 0; i < 16; i++) d[i] = s[i];
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) d[i] += d[i + half];
    }
    return d[0];
}

double log_one(double x) { return log_each(all(x))[0]; }

struct Best {
    double ratio = -1.0;
    int64_t index = 0;
};

// w / E for kLanes candidates, in order.
inline void settle(Doubles w, Doubles off, int64_t index, int64_t n, Best & best) {
    double ratio[kLanes];
    store(ratio, w / (Doubles{} - log_each(1.0 - off)));
    for (int i = 0; i < kLanes && i < n; i++) {
        if (ratio[i] > best.ratio) best = {ratio[i], index + i};
    }
}

int64_t race(const double * w, const int32_t * ids, int64_t n, uint64_t key) {
    // The logarithm is rarely needed: E = -log(u) >= 1 - u, so w below (1 - u) * best can't win. The margin is far above
    // any rounding, so skipping changes nothing.
    constexpr double kMargin = 1.0 - 1e-9;
    constexpr int kParts = 4;
    Best best;
    Bits iota = {};
    for (int i = 0; i < kLanes; i++) iota[i] = i;
    int64_t i = 0;
    const auto at = [&](int64_t from) -> Bits {
        if (ids == nullptr) return ((uint64_t) from + iota) * localspec::kGolden + key;
        return (Bits) __builtin_convertvector(load<HalfInts>(ids + from), Longs) * localspec::kGolden + key;
    };
    for (; i + kParts * kLanes <= n; i += kParts * kLanes) {
        Longs hope = {};
        for (int j = 0; j < kParts; j++) {
            const Doubles here = load<Doubles>(w + i + j * kLanes);
            hope |= here >= one_minus_uniform(at(i + j * kLanes)) * (best.ratio * kMargin);
        }
        if (!any(hope)) continue;
        for (int j = 0; j < kParts; j++) {
            const int64_t from = i + j * kLanes;
            const Doubles here = load<Doubles>(w + from), off = one_minus_uniform(at(from));
            if (any(here >= off * (best.ratio * kMargin))) settle(here, off, from, kLanes, best);
        }
    }
    for (; i < n; i += kLanes) {
        double tail[kLanes];
        int32_t tail_ids[kLanes];
        for (int j = 0; j < kLanes; j++) {
            tail[j] = i + j < n ? w[i + j] : 0.0;
            tail_ids[j] = i + j < n ? (ids != nullptr ? ids[i + j] : (int32_t) (i + j)) : 0;
        }
        const Bits where = (Bits) __builtin_convertvector(load<HalfInts>(tail_ids), Longs) * localspec::kGolden + key;
        settle(load<Doubles>(tail), one_minus_uniform(where), i, n - i, best);
    }
    return best.index;
}

}  // namespace

namespace localspec {
extern const Kernels TABLE;
const Kernels TABLE = {NAME, chunk_max, weights, sum_exp, log_one, race};
}  // namespace localspec
