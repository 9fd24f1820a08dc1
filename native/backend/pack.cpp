#include "pack.h"

#include <cstring>

namespace ls {
namespace {

uint32_t load32(const uint8_t *p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
void store32(uint8_t *p, uint32_t v) { std::memcpy(p, &v, 4); }

// The packed places of one row's share of a block: q points at the block, r is the row within its group.
void put_nibbles(uint8_t *q, int r, int p, uint32_t four) { store32(q + 64 * p + 4 * r, four); }

// Bit 4*j + i of `bits` becomes bit j of byte i.
uint32_t spread_fifth(uint32_t bits) {
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t t = (bits >> i) & 0x11111111;
        t = (t | t >> 3) & 0x03030303;
        t = (t | t >> 6) & 0x000f000f;
        t = (t | t >> 12) & 0xff;
        out |= t << (8 * i);
    }
    return out;
}
uint32_t gather_fifth(uint32_t plane) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j++) bits |= ((plane >> (8 * i + j)) & 1) << (4 * j + i);
    return bits;
}

constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0xf0f0f0f0;

// Scale and minimum j of the 12 bytes in which Q4_K and Q5_K keep eight 6-bit pairs.
void get_pair(const uint8_t *s, int j, uint8_t *sc, uint8_t *mn) {
    if (j < 4) {
        *sc = s[j] & 63;
        *mn = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
        *mn = (s[j + 4] >> 4) | (s[j] >> 6 << 4);
    }
}
void put_pair(uint8_t *s, int j, uint8_t sc, uint8_t mn) {
    if (j < 4) {
        s[j] |= sc;
        s[j + 4] |= mn;
    } else {
        s[j + 4] |= (sc & 15) | (mn & 15) << 4;
        s[j - 4] |= sc >> 4 << 6;
        s[j] |= mn >> 4 << 6;
    }
}

// One superblock of one row. b: as in the file; q, s: the group's superblock of quants and of scales.
void pack_super(const Format &f, const uint8_t *b, int r, uint8_t *q, uint8_t *s) {
    uint8_t *const d = s + 2 * r;
    switch (f.type) {
        case kQ4_0:
        case kIQ4_NL:
            std::memcpy(d, b, 2);
            for (int p = 0; p < 4; p++) put_nibbles(q, r, p, load32(b + 2 + 4 * p));
            break;
        case kQ4_1:
            std::memcpy(d, b, 2);
            std::memcpy(d + 32, b + 2, 2);
            for (int p = 0; p < 4; p++) put_nibbles(q, r, p, load32(b + 4 + 4 * p));
            break;
        case kQ5_0:
            std::memcpy(d, b, 2);
            for (int p = 0; p < 4; p++) put_nibbles(q, r, p, load32(b + 6 + 4 * p));
            store32(q + 256 + 4 * r, spread_fifth(load32(b + 2)));
            break;
        case kQ5_1:
            std::memcpy(d, b, 2);
            std::memcpy(d + 32, b + 2, 2);
            for (int p = 0; p < 4; p++) put_nibbles(q, r, p, load32(b + 8 + 4 * p));
            store32(q + 256 + 4 * r, spread_fifth(load32(b + 4)));
            break;
        case kQ8_0:
            std::memcpy(d, b, 2);
            for (int p = 0; p < 8; p++) store32(q + 64 * p + 4 * r, load32(b + 2 + 4 * p) ^ 0x80808080);
            break;
        case kQ4_K:
        case kQ5_K: {
            const int block = vectors_of(f.bits) * 64;
            std::memcpy(d, b, 2);
            std::memcpy(d + 32, b + 2, 2);
            for (int j = 0; j < 8; j++) get_pair(b + 4, j, s + 64 + 16 * j + r, s + 192 + 16 * j + r);
            const uint8_t *const qh = b + 16;
            const uint8_t *const ql = f.type == kQ4_K ? b + 16 : b + 48;
            for (int n = 0; n < 8; n++) {
                const uint8_t *x = ql + n / 2 * 32;
                for (int p = 0; p < 4; p++) {
                    const uint32_t a = load32(x + 4 * p), c = load32(x + 16 + 4 * p);
                    put_nibbles(q + n * block, r, p,
                                n % 2 ? ((a >> 4) & kLow) | (c & kHigh) : (a & kLow) | (c & kLow) << 4);
                }
                if (f.type == kQ5_K) {
                    uint32_t plane = 0;
                    for (int j = 0; j < 8; j++) plane |= ((load32(qh + 4 * j) >> n) & 0x01010101) << j;
                    store32(q + n * block + 256 + 4 * r, plane);
                }
            }
            break;
        }
        case kQ6_K:
            std::memcpy(d, b + 208, 2);
            for (int j = 0; j < 16; j++) s[32 + 16 * j + r] = b[192 + j];
            for (int n = 0; n < 8; n++) {
                const uint8_t *const x = b + n / 4 * 64 + n % 2 * 32, *const h = b + 128 + n / 4 * 32;
                uint8_t *const block = q + n * 384;
                for (int p = 0; p < 4; p++) {
                    const uint32_t a = load32(x + 4 * p), c = load32(x + 16 + 4 * p);
                    put_nibbles(block, r, p,
                                n % 4 >= 2 ? ((a >> 4) & kLow) | (c & kHigh) : (a & kLow) | (c & kLow) << 4);
                }
                for (int p = 0; p < 2; p++) {
                    uint32_t plane = 0;
                    for (int j = 0; j < 4; j++)
                        plane |= ((load32(h + 16 * p + 4 * j) >> (2 * (n % 4))) & 0x03030303) << (2 * j);
                    store32(block + 256 + 64 * p + 4 * r, plane);
                }
            }
            break;
        case kIQ4_XS: {
            std::memcpy(d, b, 2);
            const unsigned high = b[2] | b[3] << 8;
            for (int n = 0; n < 8; n++) {
                const int sc = ((b[4 + n / 2] >> (4 * (n % 2))) & 15) | ((high >> (2 * n)) & 3) << 4;
                s[32 + 16 * n + r] = uint8_t(sc - 32);
                for (int p = 0; p < 4; p++) put_nibbles(q + n * 256, r, p, load32(b + 8 + 16 * n + 4 * p));
            }
            break;
        }
        default: break;
    }
}

void unpack_super(const Format &f, const uint8_t *q, const uint8_t *s, int r, uint8_t *b) {
    std::memset(b, 0, f.src_bytes);
    const uint8_t *const d = s + 2 * r;
    const auto nibbles = [&](int n, int p) { return load32(q + n * vectors_of(f.bits) * 64 + 64 * p + 4 * r); };
    switch (f.type) {
        case kQ4_0:
        case kIQ4_NL:
            std::memcpy(b, d, 2);
            for (int p = 0; p < 4; p++) store32(b + 2 + 4 * p, nibbles(0, p));
            break;
        case kQ4_1:
            std::memcpy(b, d, 2);
            std::memcpy(b + 2, d + 32, 2);
            for (int p = 0; p < 4; p++) store32(b + 4 + 4 * p, nibbles(0, p));
            break;
        case kQ5_0:
            std::memcpy(b, d, 2);
            for (int p = 0; p < 4; p++) store32(b + 6 + 4 * p, nibbles(0, p));
            store32(b + 2, gather_fifth(nibbles(0, 4)));
            break;
        case kQ5_1:
            std::memcpy(b, d, 2);
            std::memcpy(b + 2, d + 32, 2);
            for (int p = 0; p < 4; p++) store32(b + 8 + 4 * p, nibbles(0, p));
            store32(b + 4, gather_fifth(nibbles(0, 4)));
            break;
        case kQ8_0:
            std::memcpy(b, d, 2);
            for (int p = 0; p < 8; p++) store32(b + 2 + 4 * p, nibbles(0, p) ^ 0x80808080);
            break;
        case kQ4_K:
        case kQ5_K: {
            std::memcpy(b, d, 2);
            std::memcpy(b + 2, d + 32, 2);
            for (int j = 0; j < 8; j++) put_pair(b + 4, j, s[64 + 16 * j + r], s[192 + 16 * j + r]);
            uint8_t *const qh = b + 16, *const ql = f.type == kQ4_K ? b + 16 : b + 48;
            for (int n = 0; n < 8; n++) {
                for (int p = 0; p < 4; p++) {
                    const uint32_t v = nibbles(n, p);
                    uint8_t *const x = ql + n / 2 * 32 + 4 * p;
                    store32(x, load32(x) | (n % 2 ? (v & kLow) << 4 : v & kLow));
                    store32(x + 16, load32(x + 16) | (n % 2 ? v & kHigh : (v & kHigh) >> 4));
                }
                if (f.type == kQ5_K)
                    for (int j = 0; j < 8; j++)
                        store32(qh + 4 * j, load32(qh + 4 * j) | ((nibbles(n, 4) >> j) & 0x01010101) << n);
            }
            break;
        }
        case kQ6_K:
            std::memcpy(b + 208, d, 2);
            for (int j = 0; j < 16; j++) b[192 + j] = s[32 + 16 * j + r];
            for (int n = 0; n < 8; n++) {
                uint8_t *const x = b + n / 4 * 64 + n % 2 * 32, *const h = b + 128 + n / 4 * 32;
                const bool upper = n % 4 >= 2;
                for (int p = 0; p < 4; p++) {
                    const uint32_t v = nibbles(n, p);
                    store32(x + 4 * p, load32(x + 4 * p) | (upper ? (v & kLow) << 4 : v & kLow));
                    store32(x + 16 + 4 * p, load32(x + 16 + 4 * p) | (upper ? v & kHigh : (v & kHigh) >> 4));
                }
                for (int p = 0; p < 2; p++)
                    for (int j = 0; j < 4; j++) {
                        uint8_t *const t = h + 16 * p + 4 * j;
                        store32(t, load32(t) | ((nibbles(n, 4 + p) >> (2 * j)) & 0x03030303) << (2 * (n % 4)));
                    }
            }
            break;
        case kIQ4_XS: {
            std::memcpy(b, d, 2);
            unsigned high = 0;
            for (int n = 0; n < 8; n++) {
                const unsigned sc = unsigned(int8_t(s[32 + 16 * n + r]) + 32);
                b[4 + n / 2] |= (sc & 15) << (4 * (n % 2));
                high |= (sc >> 4) << (2 * n);
                for (int p = 0; p < 4; p++) store32(b + 8 + 16 * n + 4 * p, nibbles(n, p));
            }
            b[2] = high & 255;
            b[3] = high >> 8;
            break;
        }
        default: break;
    }
}

}  // namespace

void pack_rows(const Format &f, const uint8_t *src, int64_t k, int64_t row0, int64_t rows, uint8_t *dst) {
    const int64_t supers = k / f.super;
    for (int64_t row = row0; row < row0 + rows; row++) {
        uint8_t *const group = dst + row / kGroupRows * group_bytes(f, k);
        uint8_t *q = group, *s = group + quant_region(f, k);
        for (int64_t i = 0; i < supers; i++) {
            pack_super(f, src, row % kGroupRows, q, s);
            src += f.src_bytes;
            q += f.quant_bytes;
            s += f.scale_bytes;
        }
    }
}

void unpack_rows(const Format &f, const uint8_t *packed, int64_t k, int64_t row0, int64_t rows, uint8_t *dst) {
    const int64_t supers = k / f.super;
    for (int64_t row = row0; row < row0 + rows; row++) {
        const uint8_t *const group = packed + row / kGroupRows * group_bytes(f, k);
        const uint8_t *q = group, *s = group + quant_region(f, k);
        for (int64_t i = 0; i < supers; i++) {
            unpack_super(f, q, s, row % kGroupRows, dst);
            dst += f.src_bytes;
            q += f.quant_bytes;
            s += f.scale_bytes;
        }
    }
}

}  // namespace ls
