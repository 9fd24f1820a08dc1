// x86 with AVX2; compiled with -mavx2.
#define LANES 4
#define TABLE kKernelsAvx2
#define NAME "avx2"
#include "kernels_impl.h"
