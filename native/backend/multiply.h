// A matrix product as the threads of one operation do it: how activations are arranged, quantised and multiplied.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ggml_abi.h"
#include "kernels.h"

namespace ls {

// Up to 8 columns of activations that are multiplied together with the weights of one plane (a 2D matrix of src[0]; for a
// mixture of experts, one expert).
struct Tile {
    int plane, first, nc;
};

// The columns of src[1], in the order in which they are multiplied, and where their quantised form lies.
struct Activations {
    static constexpr int kPlain = -1;

    const Tensor *x = nullptr;    // src[1]: k x ...
    const Tensor *ids = nullptr;  // src[2] of MUL_MAT_ID: experts per token
    int kind = kPlain;            // an ActKind, or kPlain for float columns
    int64_t k = 0;
    int64_t planes2 = 1, planes3 = 1;  // ne[2], ne[3] of the weights
    uint8_t *data = nullptr;
    int until = -1;  // the last node of the graph that reads this

    std::vector<Tile> tiles;      // ordered by plane
    std::vector<int> plane_first;  // index of each plane's first tile, and one past the last

    // What a multiplication needs of its activations; tiles and memory are not set yet.
    static Activations describe(const Tensor *op);
    void take(const Activations &wanted);  // becomes that, keeping its vectors' memory
    bool serves(const Activations &wanted) const;

    size_t column_bytes() const { return kind == kPlain ? size_t(k) * 4 : size_t(k / 32) * act_block_bytes(1); }
    bool direct() const { return kind == kPlain && x->type == kF32 && x->nb[0] == 4; }
    bool needs_pass() const { return !direct(); }
    size_t bytes() const { return direct() ? 0 : size_t(columns()) * column_bytes(); }
    int64_t columns() const;

    // Arranges the columns in tiles. For MUL_MAT_ID this reads ids, so it has to run when they are known.
    void route();

    // Column c (in tile order): index (i1, i2, i3) within x, and within the result.
    void locate(int64_t c, int64_t at_x[3], int64_t at_y[3]) const;
    const uint8_t *source(int64_t c) const;

   private:
    std::vector<int32_t> order_;  // MUL_MAT_ID: slot + used * token of each column
};

struct Quantize {
    const Kernels *kernels = nullptr;
    Activations *activations = nullptr;

    void run(int ith, int nth) const;
};

struct Multiply {
    void set(const Kernels *kernels, const Activations *acts, const Tensor *op, int n_threads);
    // By every thread. Each has a range of its own, so that what it prefetches is what it will use, and takes chunks from
    // the others' ranges when that is done.
    void run(int ith, int nth);

   private:
    void chunk(int64_t plane, int64_t group, int64_t groups) const;

    const Kernels *kernels_ = nullptr;
    const Activations *acts_ = nullptr;
    const Tensor *op_ = nullptr;
    const Format *format_ = nullptr;
    int64_t groups_ = 0;       // of 16 rows, per plane
    int64_t per_chunk_ = 1;    // groups that a thread takes at once
    int64_t chunks_ = 1;       // per plane
    size_t plane_bytes_ = 0;
    static constexpr int kRanges = 16;
    struct alignas(64) Counter {
        std::atomic<int64_t> taken{0};
    };
    Counter counters_[kRanges];
};

}  // namespace ls
