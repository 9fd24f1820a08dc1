// The table of kernels that one instruction set provides. One source file per instruction set fills it, compiled with that
// set's flags; cpu.cpp picks the table at run time. kernels_ref.cpp is the plain C twin of every entry.
#pragma once

#include "formats.h"

namespace ls {

// Quantises blocks [b0, b1) of a tile of nc columns. src[c] points to the first of k floats of column c; act is the tile.
using QuantizeFn = void (*)(ActKind kind, const float *const *src, int nc, int64_t b0, int64_t b1, uint8_t *act);

// Multiplies `groups` consecutive groups of 16 packed rows with a tile of nc (1..8) columns of k values.
// dst[c] points to the result of the first row for column c; `rows` of them are stored (the last group may be partial).
using MultiplyFn = void (*)(const uint8_t *packed, int64_t k, int64_t groups, int64_t rows, const uint8_t *act, int nc,
                            float *const *dst);

// Multiplies `rows` plain rows (row_bytes apart) with nc (1..8) float columns of k values.
using PlainFn = void (*)(const uint8_t *rows_data, size_t row_bytes, int64_t k, int64_t rows, const float *const *src,
                         int nc, float *const *dst);

struct Kernels {
    const char *name;
    QuantizeFn quantize;
    MultiplyFn multiply[kFormatCount];  // in the order of kFormats
    PlainFn plain_f32, plain_f16, plain_bf16;
};

const Kernels *kernels_reference();
const Kernels *kernels_avx512();   // AVX512 F, BW, DQ, VL, VNNI
const Kernels *kernels_avxvnni();  // AVX2, FMA, F16C, AVX-VNNI
const Kernels *kernels_avx2();     // AVX2, FMA, F16C
const Kernels *kernels_neon_i8mm();  // ARMv8.2 dot product and ARMv8.6 8-bit matrix multiplication
const Kernels *kernels_neon();     // ARMv8.2 dot product

// The fastest table this CPU can run, or nullptr when there is none. LOCALSPEC_ISA=<name> asks for a certain one.
const Kernels *choose_kernels();

// A table by name when this CPU can run it ("reference" always can), else nullptr.
const Kernels *kernels_named(const char *name);

}  // namespace ls
