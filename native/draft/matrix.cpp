#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "pack.h"

namespace ls::draft {

Bytes aligned_bytes(size_t n) {
    auto *const p = static_cast<uint8_t *>(std::aligned_alloc(64, round64(n + 64)));
    if (p == nullptr) throw std::bad_alloc();
    return Bytes(p);
}

void Stored::row(int64_t i, float *out) const {
    const uint8_t *const from = data + static_cast<size_t>(i) * row_bytes;
    if (type == kF32) std::memcpy(out, from, static_cast<size_t>(k) * 4);
    else to_float(from, out, k);
}

Columns::Columns(int64_t longest) : longest_(longest) {}

void Columns::set(const float *const *columns, int nc, int64_t k) {
    std::copy(columns, columns + nc, columns_);
    nc_ = nc;
    k_ = k;
    for (bool &done : done_) done = false;
}

const uint8_t *Columns::quantised(const Kernels &kernels, ActKind kind) {
    const int i = static_cast<int>(kind);
    if (!acts_[i]) acts_[i] = aligned_bytes(static_cast<size_t>((longest_ + 31) / 32) * act_block_bytes(kMost));
    if (!done_[i]) {
        kernels.quantize(kind, columns_, nc_, 0, k_ / 32, acts_[i].get());
        done_[i] = true;
    }
    return acts_[i].get();
}

Matrix::Matrix(const Stored &s) : k(s.k), rows(s.rows) {
    const Format *const f = find_format(s.type);
    if (f != nullptr && s.k % f->super == 0) {
        format_ = f;
        bytes_ = matrix_bytes(*f, k, rows);
        data_ = aligned_bytes(bytes_);
        std::memset(data_.get(), 0, bytes_);
        pack_rows(*f, s.data, k, 0, rows, data_.get());
        return;
    }
    type_ = is_plain(s.type) ? s.type : static_cast<int>(kF32);
    row_bytes_ = static_cast<size_t>(k) * plain_size(type_);
    bytes_ = row_bytes_ * static_cast<size_t>(rows);
    data_ = aligned_bytes(bytes_);
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *const from = s.data + static_cast<size_t>(r) * s.row_bytes;
        uint8_t *const to = data_.get() + static_cast<size_t>(r) * row_bytes_;
        if (type_ == s.type) std::memcpy(to, from, row_bytes_);
        else s.to_float(from, reinterpret_cast<float *>(to), k);
    }
}

void Matrix::multiply(const Kernels &kernels, Columns &columns, int64_t g0, int64_t g1, float *const *dst) const {
    if (g0 >= g1) return;
    const int nc = columns.count();
    const int64_t row0 = g0 * kGroupRows, n = std::min(g1 * kGroupRows, rows) - row0;
    float *out[Columns::kMost];
    for (int c = 0; c < nc; c++) out[c] = dst[c] + row0;
    if (format_) {
        const uint8_t *const acts = columns.quantised(kernels, act_kind(*format_));
        const uint8_t *const packed = data_.get() + static_cast<size_t>(g0) * group_bytes(*format_, k);
        kernels.multiply[format_index(format_)](packed, k, g1 - g0, n, acts, nc, out);
        return;
    }
    const PlainFn plain = type_ == kF32 ? kernels.plain_f32 : type_ == kF16 ? kernels.plain_f16 : kernels.plain_bf16;
    plain(data_.get() + static_cast<size_t>(row0) * row_bytes_, row_bytes_, k, n, columns.floats(), nc, out);
}

}  // namespace ls::draft
