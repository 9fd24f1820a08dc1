// The vectorised inner loops. Every instruction set gives the same bits: same operations, same order, no contraction.
#pragma once

#include <cstdint>

namespace localspec {

constexpr int64_t kChunk = 128;  // logits per entry of chunk_max

struct Kernels {
    const char * name;

    // Largest logit of each chunk of kChunk, NaN passed over (-inf where there is nothing else). maxima: [ceil(n / kChunk)]
    void (*chunk_max)(const float * x, int64_t n, float * maxima);

    // exp((x - top) * inverse) for each of n logits into w (or nowhere, w null). Returns their sum in lane order: element i
    // goes to running sum i mod 8; the eight are added pairwise at the end.
    double (*weights)(const float * x, int64_t n, double top, double inverse, double * w);

    // The sum of exp(x - top) over n logits in single precision, in lane order: element i goes to running sum i mod 16; the
    // sixteen are added pairwise at the end, in double precision. Good to about 1e-5.
    double (*sum_exp)(const float * x, int64_t n, float top);

    double (*log)(double x);  // natural logarithm of a normal positive number

    // Index of the first largest w[i] / E(key, ids[i]), ids null: ids[i] = i. E: see random.h.
    int64_t (*race)(const double * w, const int32_t * ids, int64_t n, uint64_t key);
};

// The kernels in use: at first the best that this CPU has.
const Kernels & kernels();

// Name of the n-th kind that this CPU can run, best first; null past the end.
const char * kernels_name(int n);

// Use the kind of that name from now on; false where this CPU has no such kind.
bool kernels_use(const char * name);

}  // namespace localspec
