#include "vector_math.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__)  // copies are chosen by the loader (ifunc)
#define LS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LS_CLONES
#endif

namespace ls::draft {
namespace {

// e^x for x <= 0 and moderate x > 0, about 1e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2].
inline __attribute__((always_inline)) float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

// Sums run in lanes, so that the compiler may use vectors without reordering anything.
constexpr int64_t kLanes = 32;

}  // namespace

LS_CLONES void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *y) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; l++) lanes[l] += x[i + l] * x[i + l];
    float sum = 0;
    for (; i < n; i++) sum += x[i] * x[i];
    for (float lane : lanes) sum += lane;
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

LS_CLONES void silu_mul(const float *gate, const float *up, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
}

LS_CLONES void add(const float *a, const float *b, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

LS_CLONES int64_t argmax(const float *x, int64_t n, float *largest) {
    float lanes[kLanes];
    for (float &lane : lanes) lane = -INFINITY;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    float top = -INFINITY;
    for (float lane : lanes) top = lane > top ? lane : top;
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    *largest = top;
    // The block that holds it first, then the place in it.
    for (i = 0; i + kLanes <= n; i += kLanes) {
        int32_t found = 0;
        for (int64_t l = 0; l < kLanes; l++) found |= x[i + l] == top;
        if (found) break;
    }
    for (; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

LS_CLONES float sum_exp(const float *x, int64_t n, float top) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; l++) lanes[l] += fast_exp(x[i + l] - top);
    float sum = 0;
    for (; i < n; i++) sum += fast_exp(x[i] - top);
    for (float lane : lanes) sum += lane;
    return sum;
}

LS_CLONES void rotate(float *x, const float *cosines, const float *sines, int64_t size) {
    for (int64_t j = 0; j < size / 2; j++) {
        const float a = x[2 * j], b = x[2 * j + 1];
        x[2 * j] = a * cosines[j] - b * sines[j];
        x[2 * j + 1] = a * sines[j] + b * cosines[j];
    }
}

LS_CLONES void rotate_halves(float *x, const float *cosines, const float *sines, int64_t size) {
    float *const y = x + size / 2;
    for (int64_t j = 0; j < size / 2; j++) {
        const float a = x[j], b = y[j];
        x[j] = a * cosines[j] - b * sines[j];
        y[j] = a * sines[j] + b * cosines[j];
    }
}

LS_CLONES float dot(const float *a, const float *b, int64_t n) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; l++) lanes[l] += a[i + l] * b[i + l];
    float sum = 0;
    for (; i < n; i++) sum += a[i] * b[i];
    for (float lane : lanes) sum += lane;
    return sum;
}

LS_CLONES void scores(const float *q, int64_t heads, int64_t size, const float *keys, int64_t first, int64_t last, float scale,
                      float *out, int64_t stride) {
    const int64_t b0 = first / kKeyBlock, b1 = (last + kKeyBlock - 1) / kKeyBlock, skip = first % kKeyBlock;
    for (int64_t b = b0; b < b1; b++) {
        const float *const block = keys + b * size * kKeyBlock;
        int64_t h = 0;
        for (; h + 3 <= heads; h += 3) {
            float s0[kKeyBlock] = {}, s1[kKeyBlock] = {}, s2[kKeyBlock] = {};
            const float *const q0 = q + h * size, *const q1 = q0 + size, *const q2 = q1 + size;
            for (int64_t d = 0; d < size; d++) {
                const float *const k = block + d * kKeyBlock;
                for (int64_t i = 0; i < kKeyBlock; i++) {
                    s0[i] += q0[d] * k[i];
                    s1[i] += q1[d] * k[i];
                    s2[i] += q2[d] * k[i];
                }
            }
            float *const o = out + h * stride + (b - b0) * kKeyBlock;
            for (int64_t i = 0; i < kKeyBlock; i++) {
                o[i] = s0[i] * scale;
                o[stride + i] = s1[i] * scale;
                o[2 * stride + i] = s2[i] * scale;
            }
        }
        for (; h < heads; h++) {
            float s[kKeyBlock] = {};
            for (int64_t d = 0; d < size; d++) {
                const float *const k = block + d * kKeyBlock;
                for (int64_t i = 0; i < kKeyBlock; i++) s[i] += q[h * size + d] * k[i];
            }
            float *const o = out + h * stride + (b - b0) * kKeyBlock;
            for (int64_t i = 0; i < kKeyBlock; i++) o[i] = s[i] * scale;
        }
    }
    if (skip)
        for (int64_t h = 0; h < heads; h++)
            std::memmove(out + h * stride, out + h * stride + skip, static_cast<size_t>(last - first) * 4);
}

LS_CLONES void softmax(float *x, int64_t n) {
    float top;
    argmax(x, n, &top);
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; l++) {
            const float e = fast_exp(x[i + l] - top);
            x[i + l] = e;
            lanes[l] += e;
        }
    float sum = 0;
    for (; i < n; i++) sum += x[i] = fast_exp(x[i] - top);
    for (float lane : lanes) sum += lane;
    const float scale = 1.0f / sum;
    for (i = 0; i < n; i++) x[i] *= scale;
}

LS_CLONES void weigh(const float *weights, int64_t stride, int64_t heads, const float *values, int64_t n, int64_t size,
                     float *out) {
    constexpr int64_t kPart = 64;
    for (int64_t h = 0; h < heads; h++) {
        const float *const w = weights + h * stride;
        int64_t d = 0;
        for (; d + kPart <= size; d += kPart) {
            float sum[kPart] = {};
            for (int64_t i = 0; i < n; i++) {
                const float *const v = values + i * size + d;
                for (int64_t j = 0; j < kPart; j++) sum[j] += w[i] * v[j];
            }
            for (int64_t j = 0; j < kPart; j++) out[h * size + d + j] = sum[j];
        }
        for (; d < size; d++) {
            float sum = 0;
            for (int64_t i = 0; i < n; i++) sum += w[i] * values[i * size + d];
            out[h * size + d] = sum;
        }
    }
}

}  // namespace ls::draft
