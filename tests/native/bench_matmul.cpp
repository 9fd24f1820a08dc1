// Micro-benchmark of the multiplication kernels, one thread: for each type and number of columns, the time of one product
// with a matrix too large for the caches, as GMAC/s and as GB/s of packed weights.
//   bench_matmul [isa] [type number | 0 for all] [k] [rows]
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "../../native/backend/kernels.h"

using namespace ls;

// Processor time of this thread: other work on the machine disturbs it less than the clock on the wall.
static double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

int main(int argc, char **argv) {
    const Kernels *kernels = argc > 1 ? kernels_named(argv[1]) : choose_kernels();
    if (!kernels) return std::fprintf(stderr, "this CPU does not have these kernels\n"), 1;
    const int only = argc > 2 ? std::atoi(argv[2]) : 0;
    const int64_t k = argc > 3 ? std::atoll(argv[3]) : 1536, rows = argc > 4 ? std::atoll(argv[4]) : 65536;
    std::printf("%s, k = %lld, %lld rows: GMAC/s (GB/s of weights) per number of columns\n", kernels->name, (long long)k,
                (long long)rows);
    for (int i = 0; i < kFormatCount; i++) {
        const Format &f = kFormats[i];
        if (only && f.type != only) continue;
        const size_t bytes = matrix_bytes(f, k, rows);
        const size_t huge = size_t(2) << 20, room = (bytes + 16384 + huge - 1) / huge * huge;
        auto *packed = static_cast<uint8_t *>(std::aligned_alloc(huge, room));
#ifdef MADV_HUGEPAGE
        madvise(packed, room, MADV_HUGEPAGE);
#endif
        // Small patterns make small half-precision scales: no infinities, so nothing runs unusually slowly.
        for (size_t n = 0; n < bytes; n++) packed[n] = uint8_t((n * 2654435761u >> 13) & 0x3f);
        std::vector<float> x(8 * k), y(8 * rows);
        for (size_t n = 0; n < x.size(); n++) x[n] = float(int(n * 7919 % 2001) - 1000) / 500.0f;
        std::vector<uint8_t> act(size_t(k / 32) * act_block_bytes(8));
        std::printf("type %2d", f.type);
        for (int nc : {1, 2, 4, 8}) {
            const float *src[8];
            float *dst[8];
            for (int c = 0; c < nc; c++) src[c] = &x[c * k], dst[c] = &y[c * rows];
            kernels->quantize(act_kind(f), src, nc, 0, k / 32, act.data());
            double best = 1e9;
            for (int rep = 0; rep < 8; rep++) {
                const double t = now();
                kernels->multiply[i](packed, k, group_count(rows), rows, act.data(), nc, dst);
                const double dt = now() - t;
                if (dt < best) best = dt;
            }
            std::printf("  n=%d %6.1f (%4.1f)", nc, double(k) * rows * nc / best / 1e9, bytes / best / 1e9);
        }
        std::printf("\n");
        std::free(packed);
    }
}
