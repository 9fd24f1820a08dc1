// For any CPU: 16-byte vectors, which every 64-bit x86 (SSE2) and ARM (NEON) has.
#define LANES 2
#define TABLE kKernelsPortable
#ifdef __aarch64__
#define NAME "neon"
#else
#define NAME "scalar"
#endif
#include "kernels_impl.h"
