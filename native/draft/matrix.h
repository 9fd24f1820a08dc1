// A weight matrix of a draft, packed for the plug-in's kernels, and its product with up to 8 columns.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"

namespace ls::draft {

// ggml's own conversion of a row of any type to floats.
using ToFloat = void (*)(const void *row, float *out, int64_t n);

// A tensor as a GGUF file stores it: rows of k values, row_bytes apart.
struct Stored {
    int type = 0;
    int64_t k = 0, rows = 0;
    size_t row_bytes = 0;
    const uint8_t *data = nullptr;
    ToFloat to_float = nullptr;  // absent only for F32

    // Row i as k floats.
    void row(int64_t i, float *out) const;
};

inline std::vector<float> copied(const float *p, int64_t n) {
    return p == nullptr ? std::vector<float>() : std::vector<float>(p, p + n);
}

struct FreeBytes {
    void operator()(uint8_t *p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], FreeBytes>;
Bytes aligned_bytes(size_t n);  // throws std::bad_alloc

// The columns that a thread multiplies with, and their quantised forms, made when first asked for.
class Columns {
   public:
    static constexpr int kMost = kTileCols;

    explicit Columns(int64_t longest);
    void set(const float *const *columns, int nc, int64_t k);
    const float *const *floats() const { return columns_; }
    const uint8_t *quantised(const Kernels &kernels, ActKind kind);
    int count() const { return nc_; }

   private:
    static constexpr int kKinds = 5;
    const float *columns_[kMost] = {};
    int nc_ = 0;
    int64_t k_ = 0, longest_;
    Bytes acts_[kKinds];
    bool done_[kKinds] = {};
};

class Matrix {
   public:
    Matrix() = default;
    explicit Matrix(const Stored &stored);

    int64_t k = 0, rows = 0;
    int64_t groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
    size_t bytes() const { return bytes_; }
    explicit operator bool() const { return rows > 0; }

    // Groups [g0, g1) of 16 rows times the columns; dst[c] points to where row 0 of column c belongs.
    void multiply(const Kernels &kernels, Columns &columns, int64_t g0, int64_t g1, float *const *dst) const;

   private:
    const Format *format_ = nullptr;
    int type_ = 0;
    size_t row_bytes_ = 0, bytes_ = 0;
    Bytes data_;
};

}  // namespace ls::draft
