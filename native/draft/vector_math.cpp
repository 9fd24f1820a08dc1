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

// 16 floats; the compiler cuts them into what the instruction set has.
typedef float Lanes __attribute__((vector_size(64)));

inline __attribute__((always_inline)) Lanes lanes_at(const float *p) {
    Lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// The scores of H queries with one block of keys: as many sums at once as hide the time that each takes.
template <int H>
inline __attribute__((always_inline)) void score_block(const float *q, int64_t size, const float *block, float scale, float *out,
                                                       int64_t stride) {
    Lanes sums[H] = {};
    for (int64_t d = 0; d < size; d++) {
        const Lanes key = lanes_at(block + d * kKeyBlock);
#pragma GCC unroll 8
        for (int h = 0; h < H; h++) sums[h] += q[h * size + d] * key;
    }
    for (int h = 0; h < H; h++) {
        const Lanes scaled = sums[h] * scale;
        std::memcpy(out + h * stride, &scaled, sizeof scaled);
    }
}

// kPart dimensions of the weighted sum of n values, for H rows of weights.
constexpr int64_t kPart = 32;

template <int H>
inline __attribute__((always_inline)) void weigh_part(const float *weights, int64_t stride, const float *values, int64_t n,
                                                      int64_t size, float *out) {
    Lanes low[H] = {}, high[H] = {};
    for (int64_t i = 0; i < n; i++) {
        const Lanes a = lanes_at(values + i * size), b = lanes_at(values + i * size + 16);
#pragma GCC unroll 8
        for (int h = 0; h < H; h++) {
            low[h] += weights[h * stride + i] * a;
            high[h] += weights[h * stride + i] * b;
        }
    }
    for (int h = 0; h < H; h++) {
        std::memcpy(out + h * size, &low[h], sizeof low[h]);
        std::memcpy(out + h * size + 16, &high[h], sizeof high[h]);
    }
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
        float *const to = out + (b - b0) * kKeyBlock;
        int64_t h = 0;
        for (; h + 6 <= heads; h += 6) score_block<6>(q + h * size, size, block, scale, to + h * stride, stride);
        for (; h + 3 <= heads; h += 3) score_block<3>(q + h * size, size, block, scale, to + h * stride, stride);
        for (; h < heads; h++) score_block<1>(q + h * size, size, block, scale, to + h * stride, stride);
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
    int64_t d = 0;
    for (; d + kPart <= size; d += kPart) {
        int64_t h = 0;
        for (; h + 3 <= heads; h += 3)
            weigh_part<3>(weights + h * stride, stride, values + d, n, size, out + h * size + d);
        for (; h < heads; h++) weigh_part<1>(weights + h * stride, stride, values + d, n, size, out + h * size + d);
    }
    for (; d < size; d++) {
        for (int64_t h = 0; h < heads; h++) {
            float sum = 0;
            for (int64_t i = 0; i < n; i++) sum += weights[h * stride + i] * values[i * size + d];
            out[h * size + d] = sum;
        }
    }
}

}  // namespace ls::draft
