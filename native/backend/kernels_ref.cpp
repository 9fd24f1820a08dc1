// The plain C twin of the kernels: scalar loops over the packed layout, in the kernels' order of operations, so that the
// packed multiplications of every instruction set must equal it bit for bit.
#include "kernels.h"

#include <cmath>
#include <cstring>

namespace ls {
namespace {

// Quant `k` (0..31) of row `r` in the block at q.
int quant(const Format &f, const uint8_t *q, int k, int r) {
    const int j = k / 4, byte = 4 * r + k % 4;
    if (f.bits == 8) return q[64 * j + byte];
    int v = j < 4 ? q[64 * j + byte] & 15 : q[64 * (j - 4) + byte] >> 4;
    if (f.table) return kIq4Table[v];
    if (f.bits == 5) v |= ((q[256 + byte] >> j) & 1) << 4;
    if (f.bits == 6) v |= ((q[256 + 64 * (j >> 2) + byte] >> (2 * (j & 3))) & 3) << 4;
    return v;
}

float half_at(const uint8_t *p, int i) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    return half_to_float(h);
}

template <typename T>
T read(const uint8_t *p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <int FI>
void multiply(const uint8_t *packed, int64_t k, int64_t groups, int64_t rows, const uint8_t *act, int nc,
              float *const *dst) {
    const Format &f = kFormats[FI];
    const int block_bytes = vectors_of(f.bits) * 64, blocks = f.super / 32;
    for (int64_t row = 0; row < rows && row < groups * kGroupRows; row++) {
        const int r = row % kGroupRows;
        const uint8_t *const group = packed + row / kGroupRows * group_bytes(f, k);
        for (int c = 0; c < nc; c++) {
            float acc = 0.0f;
            for (int64_t i = 0; i < k / 32; i++) {
                const int b = i % blocks;
                const uint8_t *q = group + i * block_bytes;
                const uint8_t *s = group + quant_region(f, k) + i / blocks * f.scale_bytes;
                const uint8_t *a = act + i * act_block_bytes(nc);
                const uint8_t *d8 = a + 32 * nc + 4 * c;
                const float d = read<float>(d8);
                const bool has_min = f.scales == Scales::kMin || f.scales == Scales::kK;
                int sum[2] = {has_min ? 0 : read<int32_t>(d8 + 4 * nc), 0};
                if (f.scales == Scales::kSix) sum[1] = read<int32_t>(d8 + 8 * nc);
                for (int n = 0; n < 32; n++)
                    sum[f.scales == Scales::kSix ? n / 16 : 0] += quant(f, q, n, r) * int8_t(a[32 * c + n]);
                const float dw = half_at(s, r);
                switch (f.scales) {
                    case Scales::kSym: acc = std::fmaf(float(sum[0]), dw * d, acc); break;
                    case Scales::kSix:
                        for (int n = 0; n < 2; n++)
                            acc = std::fmaf(float(sum[n]), dw * float(int8_t(s[32 + 32 * b + 16 * n + r])) * d, acc);
                        break;
                    case Scales::kIq:
                        acc = std::fmaf(float(sum[0]), dw * float(int8_t(s[32 + 16 * b + r])) * d, acc);
                        break;
                    case Scales::kMin:
                        acc = std::fmaf(float(sum[0]), dw * d, acc);
                        acc = std::fmaf(half_at(s + 32, r), read<float>(d8 + 4 * nc), acc);
                        break;
                    case Scales::kK:
                        acc = std::fmaf(float(sum[0]), dw * float(s[64 + 16 * b + r]) * d, acc);
                        acc = std::fmaf(-(half_at(s + 32, r) * float(s[192 + 16 * b + r])), read<float>(d8 + 4 * nc), acc);
                        break;
                }
            }
            dst[c][row] = acc;
        }
    }
}

void quantize(ActKind kind, const float *const *src, int nc, int64_t b0, int64_t b1, uint8_t *act) {
    for (int64_t b = b0; b < b1; b++) {
        uint8_t *const rec = act + b * act_block_bytes(nc);
        for (int c = 0; c < nc; c++) {
            const float *v = src[c] + 32 * b;
            float peak = 0.0f, d = 0.0f;
            bool finite = true;
            for (int i = 0; i < 32; i++) {
                finite = finite && std::isfinite(v[i]);
                peak = std::fmax(peak, std::fabs(v[i]));
            }
            const bool usable = finite && peak >= 0x1p-100f;
            if (!finite) d = std::nanf("");
            else if (usable) d = peak / 127.0f;
            const float inv = usable ? 127.0f / peak : 0.0f;
            int sum[2] = {0, 0};
            for (int i = 0; i < 32; i++) {
                const int q = usable ? int(std::nearbyintf(v[i] * inv)) : 0;
                rec[32 * c + i] = uint8_t(int8_t(q));
                sum[i / 16] += q;
            }
            int32_t x = 0, y = 0;
            const float fsum = d * float(sum[0] + sum[1]);
            if (kind == ActKind::kMin) std::memcpy(&x, &fsum, 4);
            else if (kind == ActKind::kHalves) x = -32 * sum[0], y = -32 * sum[1];
            else x = (kind == ActKind::kSym8 ? -8 : kind == ActKind::kSym16 ? -16 : -128) * (sum[0] + sum[1]);
            std::memcpy(rec + 32 * nc + 4 * c, &d, 4);
            std::memcpy(rec + 36 * nc + 4 * c, &x, 4);
            std::memcpy(rec + 40 * nc + 4 * c, &y, 4);
        }
    }
}

// In double precision: the vector kernels add in other orders, so these agree only to rounding.
template <int TYPE>
void plain(const uint8_t *data, size_t row_bytes, int64_t k, int64_t rows, const float *const *src, int nc,
           float *const *dst) {
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *row = data + r * row_bytes;
        for (int c = 0; c < nc; c++) {
            double sum = 0.0;
            for (int64_t i = 0; i < k; i++) {
                float w;
                if (TYPE == kF32) {
                    w = read<float>(row + 4 * i);
                } else if (TYPE == kF16) {
                    w = half_to_float(read<uint16_t>(row + 2 * i));
                } else {
                    const uint32_t u = uint32_t(read<uint16_t>(row + 2 * i)) << 16;
                    std::memcpy(&w, &u, 4);
                }
                sum += double(w) * src[c][i];
            }
            dst[c][r] = float(sum);
        }
    }
}

}  // namespace

float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023;
    float v;
    if (exp == 0) {
        v = std::ldexp(float(man), -24);
        return sign ? -v : v;
    }
    const uint32_t bits = sign | (exp == 31 ? 0x7f800000 : (exp + 112) << 23) | man << 13;
    std::memcpy(&v, &bits, 4);
    return v;
}

const Kernels *kernels_reference() {
    static constexpr Kernels table{"reference",
                                   quantize,
                                   {multiply<0>, multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>,
                                    multiply<6>, multiply<7>, multiply<8>, multiply<9>},
                                   plain<kF32>,
                                   plain<kF16>,
                                   plain<kBF16>};
    return &table;
}

}  // namespace ls
