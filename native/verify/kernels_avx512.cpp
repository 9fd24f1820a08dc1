// x86 with AVX-512 F, DQ and VL (Skylake-X, Zen 4 and later); compiled with those flags.
#define LANES 8
#define TABLE kKernelsAvx512
#define NAME "avx512"
#include "kernels_impl.h"
