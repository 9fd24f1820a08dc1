// How each weight type lies in memory after packing.
//
// Weights are packed in groups of 16 rows. Within a group, K is cut into superblocks (32 values for the legacy types, 256
// for the K types) and those into blocks of 32. The quants of one block are vectors of 64 bytes: byte 4*r + i of vector j is
// value k = 4*j + i of row r, so that one load feeds one dot-product instruction for 16 rows. Values are unsigned (the
// dot-product instructions want that) and the constant `offset` is taken off again through the sum of the activations.
//
//   bits 4: 4 vectors; low nibbles are j = 0..3, high nibbles j = 4..7
//   bits 5: the same 4 vectors, then one vector whose bit j is the fifth bit of value 4*j + i
//   bits 6: the same 4 vectors, then two vectors of 2-bit fields: field j & 3 of vector j >> 2
//   bits 8: 8 vectors, stored as value + 128
//
// A group is: all quants (superblock after superblock), then all scales. Every region starts at a multiple of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml_abi.h"

namespace ls {

constexpr int kGroupRows = 16;

enum class Scales {
    kSym,     // f16 d[16] per block; value = d * (q - offset)
    kMin,     // f16 d[16], f16 m[16] per block; value = d * q + m
    kK,       // f16 d[16], f16 dmin[16], u8 sc[8][16], u8 mn[8][16] per 256; value = d*sc*q - dmin*mn
    kSix,     // f16 d[16], s8 sc[16][16] per 256 (one scale per 16 values); value = d*sc*(q - offset)
    kIq,      // f16 d[16], s8 sc[8][16] per 256; value = d*sc*(table[q] - offset)
};

struct Format {
    Type type;
    int bits;          // of a stored quant
    int super;         // values per superblock: 32 or 256
    Scales scales;
    int offset;        // what the unsigned quants stand above their value
    bool table;        // quants index the non-linear 4-bit table
    int src_bytes;     // bytes of a superblock in a GGUF file
    int quant_bytes;   // bytes of a superblock's quants, 16 rows
    int scale_bytes;   // bytes of a superblock's scales, 16 rows
};

constexpr int vectors_of(int bits) { return bits == 8 ? 8 : bits == 6 ? 6 : bits == 5 ? 5 : 4; }

constexpr Format make_format(Type type, int bits, int super, Scales scales, int offset, bool table, int src_bytes) {
    return Format{type, bits, super, scales, offset, table, src_bytes, super / 32 * vectors_of(bits) * 64,
                  scales == Scales::kSym   ? 32
                  : scales == Scales::kMin ? 64
                  : scales == Scales::kK   ? 64 + 256
                  : scales == Scales::kSix ? 32 + 256
                                           : 32 + 128};
}

constexpr Format kFormats[] = {
    make_format(kQ4_0, 4, 32, Scales::kSym, 8, false, 18),
    make_format(kQ4_1, 4, 32, Scales::kMin, 0, false, 20),
    make_format(kQ5_0, 5, 32, Scales::kSym, 16, false, 22),
    make_format(kQ5_1, 5, 32, Scales::kMin, 0, false, 24),
    make_format(kQ8_0, 8, 32, Scales::kSym, 128, false, 34),
    make_format(kIQ4_NL, 4, 32, Scales::kSym, 128, true, 18),
    make_format(kQ4_K, 4, 256, Scales::kK, 0, false, 144),
    make_format(kQ5_K, 5, 256, Scales::kK, 0, false, 176),
    make_format(kQ6_K, 6, 256, Scales::kSix, 32, false, 210),
    make_format(kIQ4_XS, 4, 256, Scales::kIq, 128, true, 136),
};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

// The 16 values of the IQ4 types, plus 128.
constexpr uint8_t kIq4Table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// The format of a ggml type, or nullptr for types that are not packed.
inline const Format *find_format(int type) {
    for (const Format &f : kFormats)
        if (f.type == type) return &f;
    return nullptr;
}

inline int format_index(const Format *f) { return static_cast<int>(f - kFormats); }

// Types kept as they are and multiplied row by row.
inline bool is_plain(int type) { return type == kF32 || type == kF16 || type == kBF16; }
inline size_t plain_size(int type) { return type == kF32 ? 4 : 2; }

inline size_t round64(size_t n) { return (n + 63) & ~size_t(63); }

// Bytes of one group of 16 rows with k values each.
inline size_t quant_region(const Format &f, int64_t k) { return size_t(k / f.super) * f.quant_bytes; }
inline size_t group_bytes(const Format &f, int64_t k) {
    return quant_region(f, k) + round64(size_t(k / f.super) * f.scale_bytes);
}
inline int64_t group_count(int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }
inline size_t matrix_bytes(const Format &f, int64_t k, int64_t rows) { return group_bytes(f, k) * group_count(rows); }

// Activations. A column is cut into blocks of 32: int8 quants, a scale, and two numbers that depend on `ActKind`.
// Up to 8 columns form a tile; a tile's blocks follow one another, each holding for its nc columns
//   int8 q[nc][32], float d[nc], int32/float x[nc], int32/float y[nc].
enum class ActKind : int {
    kSym8,    // x = -8 * sum(q)
    kSym16,   // x = -16 * sum(q)
    kSym128,  // x = -128 * sum(q)
    kMin,     // x = d * sum(q) as float
    kHalves,  // x, y = -32 * sum of the first and second 16 quants
};
constexpr int kTileCols = 8;
constexpr size_t act_block_bytes(int nc) { return size_t(nc) * (32 + 12); }

inline ActKind act_kind(const Format &f) {
    switch (f.scales) {
        case Scales::kMin:
        case Scales::kK: return ActKind::kMin;
        case Scales::kSix: return ActKind::kHalves;
        default: return f.offset == 8 ? ActKind::kSym8 : f.offset == 16 ? ActKind::kSym16 : ActKind::kSym128;
    }
}

float half_to_float(uint16_t h);

}  // namespace ls
