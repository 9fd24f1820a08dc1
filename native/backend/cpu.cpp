// Picks the kernels that this CPU can run.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace ls {
namespace {

#if defined(__x86_64__)

// Bits of CPUID leaf 7 and the state the operating system saves (XCR0), asked directly: compilers differ in which names
// __builtin_cpu_supports knows.
struct X86 {
    bool avx2 = false, avx512 = false, vnni512 = false, vnni256 = false;
    X86() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        const bool osxsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
        if (!osxsave || !fma || !f16c) return;
        unsigned low, high;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        if ((low & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = b >> 5 & 1;
        const bool zmm = (low & 0xe6) == 0xe6;
        avx512 = zmm && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);
        vnni512 = avx512 && (c >> 11 & 1);
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) vnni256 = avx2 && (a >> 4 & 1);
    }
};

const Kernels *supported(int i) {
    static const X86 cpu;
    switch (i) {
        case 0: return cpu.vnni512 ? kernels_avx512() : nullptr;
        case 1: return cpu.vnni256 ? kernels_avxvnni() : nullptr;
        case 2: return cpu.avx2 ? kernels_avx2() : nullptr;
        default: return nullptr;
    }
}

#elif defined(__aarch64__)

#if defined(__APPLE__)
bool feature(const char *name) {
    int on = 0;
    size_t size = sizeof on;
    return sysctlbyname(name, &on, &size, nullptr, 0) == 0 && on;
}
#endif

struct Arm {
    bool dot_product = false, i8mm = false;
    Arm() {
#if defined(__linux__)
        dot_product = getauxval(AT_HWCAP) >> 20 & 1;
        i8mm = dot_product && (getauxval(AT_HWCAP2) >> 13 & 1);
#elif defined(__APPLE__)
        dot_product = feature("hw.optional.arm.FEAT_DotProd");
        i8mm = dot_product && feature("hw.optional.arm.FEAT_I8MM");
#endif
    }
};

const Kernels *supported(int i) {
    static const Arm cpu;
    switch (i) {
        case 0: return cpu.i8mm ? kernels_neon_i8mm() : nullptr;
        case 1: return cpu.dot_product ? kernels_neon() : nullptr;
        default: return nullptr;
    }
}

#else
const Kernels *supported(int) { return nullptr; }
#endif

}  // namespace

const Kernels *kernels_named(const char *name) {
    if (std::strcmp(name, "reference") == 0) return kernels_reference();
    for (int i = 0; i < 3; i++) {
        const Kernels *const k = supported(i);
        if (k && std::strcmp(k->name, name) == 0) return k;
    }
    return nullptr;
}

const Kernels *choose_kernels() {
    if (const char *wanted = std::getenv("LOCALSPEC_ISA"); wanted && *wanted) return kernels_named(wanted);
    for (int i = 0; i < 3; i++)
        if (const Kernels *const k = supported(i)) return k;
    return nullptr;
}

}  // namespace ls
