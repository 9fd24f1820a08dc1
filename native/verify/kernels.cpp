// Choosing the kernels at run time.
#include "kernels.h"

#include <atomic>
#include <cstring>

namespace localspec {

extern const Kernels kKernelsPortable;
#ifdef LOCALSPEC_X86_KERNELS
extern const Kernels kKernelsAvx2, kKernelsAvx512;
#endif

namespace {

// The n-th kind that this CPU can run, best first.
const Kernels * available(int n) {
#ifdef LOCALSPEC_X86_KERNELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        n-- == 0) {
        return &kKernelsAvx512;
    }
    if (__builtin_cpu_supports("avx2") && n-- == 0) return &kKernelsAvx2;
#endif
    return n == 0 ? &kKernelsPortable : nullptr;
}

std::atomic<const Kernels *> in_use{nullptr};

}  // namespace

const Kernels & kernels() {
    const Kernels * now = in_use.load(std::memory_order_relaxed);
    if (now == nullptr) in_use.store(now = available(0), std::memory_order_relaxed);
    return *now;
}

const char * kernels_name(int n) {
    const Kernels * found = available(n);
    return found == nullptr ? nullptr : found->name;
}

bool kernels_use(const char * name) {
    for (int n = 0; available(n) != nullptr; n++) {
        if (std::strcmp(available(n)->name, name) == 0) {
            in_use.store(available(n), std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

}  // namespace localspec
