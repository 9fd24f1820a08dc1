// The small float loops of a draft's network, for one token at a time. Plain loops that the compiler turns into vector code,
// once per instruction set; which copy runs is found out at load time.
#pragma once

#include <cstdint>

namespace ls::draft {

// y = x / rms(x) * weight, rms over n values with eps inside the root.
void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *y);

// y[i] = silu(gate[i]) * up[i]
void silu_mul(const float *gate, const float *up, int64_t n, float *y);

// y[i] = a[i] + b[i]
void add(const float *a, const float *b, int64_t n, float *y);

// The largest of n values and its first index; values must not be NaN.
int64_t argmax(const float *x, int64_t n, float *largest);

// sum of exp(x[i] - top)
float sum_exp(const float *x, int64_t n, float top);

// Rotates neighbours (NORM): pair j of `size` values by angles whose cosines and sines are given, size/2 each.
void rotate(float *x, const float *cosines, const float *sines, int64_t size);

// The same for halves (NEOX): value j of the first half and value j of the second.
void rotate_halves(float *x, const float *cosines, const float *sines, int64_t size);

// sum of a[i] * b[i]
float dot(const float *a, const float *b, int64_t n);

// One KV head. Keys lie in blocks of kKeyBlock positions, [block][size][kKeyBlock]; values as [position][size].
constexpr int64_t kKeyBlock = 16;

// scores[h][i] of `heads` queries q[h][size] with keys first .. last, for i = position - first; `stride` floats from one row
// of scores to the next, which holds room for last - first + 2 * kKeyBlock.
void scores(const float *q, int64_t heads, int64_t size, const float *keys, int64_t first, int64_t last, float scale,
            float *out, int64_t stride);

// Turns n scores into weights that sum to 1.
void softmax(float *x, int64_t n);

// out[h][size] = sum of weights[h][i] * values[i][size], i < n.
void weigh(const float *weights, int64_t stride, int64_t heads, const float *values, int64_t n, int64_t size, float *out);

}  // namespace ls::draft
