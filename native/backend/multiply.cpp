#include "multiply.h"

#include <algorithm>
#include <cstring>

namespace ls {
namespace {

// A chunk's weights stay in the second-level cache while they meet all tiles.
constexpr size_t kChunkBytes = 256 << 10;
constexpr int kChunksPerThread = 8;

float read_value(int type, const uint8_t *p) {
    if (type == kF32) {
        float f;
        std::memcpy(&f, p, 4);
        return f;
    }
    uint16_t h;
    std::memcpy(&h, p, 2);
    if (type == kF16) return half_to_float(h);
    const uint32_t u = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

}  // namespace

Activations Activations::describe(const Tensor *op) {
    Activations a;
    const Tensor *const w = op->src[0];
    const Format *const f = find_format(w->type);
    a.x = op->src[1];
    a.ids = op->op == kOpMulMatId ? op->src[2] : nullptr;
    a.kind = f ? static_cast<int>(act_kind(*f)) : kPlain;
    a.k = w->ne[0];
    a.planes2 = w->ne[2];
    a.planes3 = w->ne[3];
    return a;
}

void Activations::take(const Activations &wanted) {
    x = wanted.x;
    ids = wanted.ids;
    kind = wanted.kind;
    k = wanted.k;
    planes2 = wanted.planes2;
    planes3 = wanted.planes3;
    data = nullptr;
}

bool Activations::serves(const Activations &o) const {
    return x == o.x && ids == o.ids && kind == o.kind && k == o.k && planes2 == o.planes2 && planes3 == o.planes3;
}

int64_t Activations::columns() const {
    return ids ? ids->ne[0] * ids->ne[1] : x->ne[1] * x->ne[2] * x->ne[3];
}

void Activations::route() {
    const int64_t planes = planes2 * planes3, total = columns();
    tiles.clear();
    plane_first.clear();
    const auto add_plane = [&](int64_t plane, int64_t first, int64_t n) {
        plane_first.push_back(static_cast<int>(tiles.size()));
        for (int64_t c = 0; c < n; c += kTileCols)
            tiles.push_back({static_cast<int>(plane), static_cast<int>(first + c),
                             static_cast<int>(std::min<int64_t>(kTileCols, n - c))});
    };
    if (!ids) {
        for (int64_t p = 0; p < planes; p++) add_plane(p, p * (total / planes), total / planes);
    } else {
        // Columns sorted by expert, tokens in order within each. An id outside the experts is left out.
        const int64_t used = ids->ne[0];
        order_.resize(size_t(total));
        std::vector<int32_t> count(size_t(planes) + 1, 0);
        const auto expert = [&](int64_t i) {
            const auto *const p = static_cast<const uint8_t *>(ids->data) + i % used * ids->nb[0] + i / used * ids->nb[1];
            int32_t e;
            std::memcpy(&e, p, 4);
            return e >= 0 && e < planes ? e : -1;
        };
        for (int64_t i = 0; i < total; i++)
            if (const int32_t e = expert(i); e >= 0) count[size_t(e) + 1]++;
        for (int64_t p = 0; p < planes; p++) {
            add_plane(p, count[size_t(p)], count[size_t(p) + 1]);
            count[size_t(p) + 1] += count[size_t(p)];
        }
        for (int64_t i = 0; i < total; i++)
            if (const int32_t e = expert(i); e >= 0) order_[size_t(count[size_t(e)]++)] = static_cast<int32_t>(i);
    }
    plane_first.push_back(static_cast<int>(tiles.size()));
}

void Activations::locate(int64_t c, int64_t at_x[3], int64_t at_y[3]) const {
    if (ids) {
        const int64_t i = order_[size_t(c)], slot = i % ids->ne[0], token = i / ids->ne[0];
        at_x[0] = slot % x->ne[1], at_x[1] = token, at_x[2] = 0;
        at_y[0] = slot, at_y[1] = token, at_y[2] = 0;
        return;
    }
    // Weights with fewer planes than activations serve several of them: plane (p2, p3) those around (p2*r2, p3*r3).
    const int64_t r2 = x->ne[2] / planes2, r3 = x->ne[3] / planes3, per_plane = x->ne[1] * r2 * r3;
    const int64_t plane = c / per_plane, j = c % per_plane, rest = j / x->ne[1];
    at_x[0] = j % x->ne[1];
    at_x[1] = plane % planes2 * r2 + rest % r2;
    at_x[2] = plane / planes2 * r3 + rest / r2;
    std::memcpy(at_y, at_x, 3 * sizeof(int64_t));
}

const uint8_t *Activations::source(int64_t c) const {
    int64_t at[3], unused[3];
    locate(c, at, unused);
    return static_cast<const uint8_t *>(x->data) + at[0] * x->nb[1] + at[1] * x->nb[2] + at[2] * x->nb[3];
}

void Quantize::run(int ith, int nth) const {
    const Activations &a = *activations;
    const bool floats = a.x->type == kF32 && a.x->nb[0] == 4;
    // Parts of at least 256 values: below that the threads would share cache lines. Whole columns where there are enough.
    const int64_t unit = a.k % 256 == 0 ? 256 : 32, units = a.k / unit;
    const bool by_tile = a.kind == Activations::kPlain || int64_t(a.tiles.size()) >= 2 * nth;
    const int64_t u0 = by_tile ? 0 : units * ith / nth, u1 = by_tile ? units : units * (ith + 1) / nth;
    std::vector<float> copy;
    for (size_t t = 0; t < a.tiles.size(); t++) {
        if (by_tile && int(t % size_t(nth)) != ith) continue;
        const Tile &tile = a.tiles[t];
        uint8_t *const out = a.data + size_t(tile.first) * a.column_bytes();
        const int64_t k0 = a.kind == Activations::kPlain ? 0 : u0 * unit, k1 = a.kind == Activations::kPlain ? a.k : u1 * unit;
        const float *src[kTileCols];
        if (!floats) copy.resize(size_t(a.k) * kTileCols);
        for (int c = 0; c < tile.nc; c++) {
            const uint8_t *const p = a.source(tile.first + c);
            if (floats) {
                src[c] = reinterpret_cast<const float *>(p);
                continue;
            }
            float *const to = a.kind == Activations::kPlain ? reinterpret_cast<float *>(out) + c * a.k : copy.data() + c * a.k;
            for (int64_t i = k0; i < k1; i++) to[i] = read_value(a.x->type, p + size_t(i) * a.x->nb[0]);
            src[c] = to;
        }
        if (a.kind != Activations::kPlain)
            kernels->quantize(static_cast<ActKind>(a.kind), src, tile.nc, k0 / 32, k1 / 32, out);
    }
}

void Multiply::set(const Kernels *kernels, const Activations *acts, const Tensor *op, int n_threads) {
    const Tensor *const w = op->src[0];
    kernels_ = kernels;
    acts_ = acts;
    op_ = op;
    format_ = find_format(w->type);
    groups_ = group_count(w->ne[1]);
    plane_bytes_ = format_ ? matrix_bytes(*format_, w->ne[0], w->ne[1]) : 0;
    const size_t group = format_ ? group_bytes(*format_, w->ne[0]) : kGroupRows * w->nb[1];
    per_chunk_ = std::max<int64_t>(1, int64_t(kChunkBytes / group));
    per_chunk_ = std::max<int64_t>(1, std::min(per_chunk_, groups_ / (int64_t(n_threads) * kChunksPerThread)));
    chunks_ = (groups_ + per_chunk_ - 1) / per_chunk_;
    for (Counter &c : counters_) c.taken.store(0, std::memory_order_relaxed);
}

void Multiply::run(int ith, int nth) {
    const int64_t total = acts_->planes2 * acts_->planes3 * chunks_;
    const int ranges = std::min(nth, kRanges);
    for (int n = 0; n < ranges; n++) {
        const int r = (ith + n) % ranges;
        const int64_t first = total * r / ranges, count = total * (r + 1) / ranges - first;
        for (;;) {
            const int64_t i = counters_[r].taken.fetch_add(1, std::memory_order_relaxed);
            if (i >= count) break;
            const int64_t plane = (first + i) / chunks_, g = (first + i) % chunks_ * per_chunk_;
            if (acts_->plane_first[size_t(plane)] == acts_->plane_first[size_t(plane) + 1]) continue;
            chunk(plane, g, std::min(per_chunk_, groups_ - g));
        }
    }
}

void Multiply::chunk(int64_t plane, int64_t group, int64_t groups) const {
    const Tensor *const w = op_->src[0];
    const int64_t row0 = group * kGroupRows, rows = std::min(groups * kGroupRows, w->ne[1] - row0);
    const size_t p2 = size_t(plane % w->ne[2]), p3 = size_t(plane / w->ne[2]);
    const auto *const base = static_cast<const uint8_t *>(w->data);
    for (int t = acts_->plane_first[size_t(plane)]; t < acts_->plane_first[size_t(plane) + 1]; t++) {
        const Tile &tile = acts_->tiles[size_t(t)];
        const uint8_t *const columns = acts_->data + size_t(tile.first) * acts_->column_bytes();
        float *dst[kTileCols];
        const float *src[kTileCols];
        for (int c = 0; c < tile.nc; c++) {
            int64_t at_x[3], at_y[3];
            acts_->locate(tile.first + c, at_x, at_y);
            dst[c] = reinterpret_cast<float *>(static_cast<uint8_t *>(op_->data) + at_y[0] * op_->nb[1] + at_y[1] * op_->nb[2] +
                                               at_y[2] * op_->nb[3]) + row0;
            if (acts_->direct()) src[c] = reinterpret_cast<const float *>(acts_->source(tile.first + c));
            else src[c] = reinterpret_cast<const float *>(columns) + c * acts_->k;
        }
        if (format_) {
            const uint8_t *const packed = base + size_t(plane) * plane_bytes_ + size_t(group) * group_bytes(*format_, w->ne[0]);
            kernels_->multiply[format_index(format_)](packed, w->ne[0], groups, rows, columns, tile.nc, dst);
        } else {
            const PlainFn f = w->type == kF32 ? kernels_->plain_f32 : w->type == kF16 ? kernels_->plain_f16 : kernels_->plain_bf16;
            f(base + p2 * w->nb[2] + p3 * w->nb[3] + size_t(row0) * w->nb[1], w->nb[1], w->ne[0], rows, src, tile.nc, dst);
        }
    }
}

}  // namespace ls
