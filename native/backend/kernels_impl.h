// The kernels, written once over a few vector primitives. Each kernels_<isa>.cpp defines the primitives and then includes
// this file inside its own anonymous namespace:
//
//   vi, vf          vectors of kLanes int32 / float lanes (a vi also holds 4*kLanes bytes)
//   kLanes          16, 8 or 4; a group of 16 rows is done in 16/kLanes parts
//   vi  load(p), and_(a, b), or_(a, b), shl<n>(v), shr<n>(v) (within 16 bits), bytes(x), zero(), lookup(v)
//   vi  dot<WIDE>(acc, w, p)   acc + per lane: the lane's 4 bytes of w (unsigned) times the 4 int8 at p;
//                          WIDE: the bytes of w may exceed 127
//   vi  all_i32(p); vf all_f32(p); vf to_float(vi)
//   vf  mul(a, b), fma(a, b, c) = a*b + c, fnma(a, b, c) = -a*b + c, zero_f()
//   vf  load_f32(p), load_f16(p), load_bf16(p), from_u8(p), from_s8(p); void store_f32(p, v)
//   prefetch(p), prefetch_far(p)   into the first and the second level of cache
//
// For one row and one column the float operations are always the same ones in the same order, whatever nc, the tile or the
// thread: that is what makes a row's result independent of how many columns are computed with it.

// One vector of quants, unpacked: value bits 0..3 from the nibbles, further bits from the planes behind them.
template <int BITS, bool TABLE, int J>
inline vi weights(const uint8_t *p) {
    if constexpr (BITS == 8) return load(p + 64 * J);
    const vi nib = load(p + 64 * (J & 3));
    vi w;
    if constexpr (J < 4) w = and_(nib, bytes(0x0f));
    else w = and_(shr<4>(nib), bytes(0x0f));
    if constexpr (TABLE) return lookup(w);
    if constexpr (BITS == 5) {
        const vi h = load(p + 256);
        if constexpr (J < 4) return or_(w, and_(shl<4 - J>(h), bytes(0x10)));
        else if constexpr (J == 4) return or_(w, and_(h, bytes(0x10)));
        else return or_(w, and_(shr<J - 4>(h), bytes(0x10)));
    }
    if constexpr (BITS == 6) {
        const vi h = load(p + 256 + 64 * (J >> 2));
        constexpr int s = 2 * (J & 3);
        if constexpr (s < 4) return or_(w, and_(shl<4 - s>(h), bytes(0x30)));
        else if constexpr (s == 4) return or_(w, and_(h, bytes(0x30)));
        else return or_(w, and_(shr<s - 4>(h), bytes(0x30)));
    }
    return w;
}

template <int FI, int NC, int J>
inline void dots(vi (&sum)[NC], vi w, const uint8_t *a) {
    for (int c = 0; c < NC; c++) sum[c] = dot<(kFormats[FI].offset == 128)>(sum[c], w, a + 32 * c + 4 * J);
}

// acc[c] += t * d[c] * sum[c]
template <int NC>
inline void accumulate(vf (&acc)[NC], const vi (&sum)[NC], vf t, const uint8_t *d) {
    for (int c = 0; c < NC; c++) acc[c] = fma(to_float(sum[c]), mul(t, all_f32(d + 4 * c)), acc[c]);
}

// One block of 32 values: rows o .. o + kLanes of the group, block b of the superblock with scales s.
template <int FI, int NC>
inline void block(const uint8_t *q, const uint8_t *s, int o, int b, const uint8_t *a, vf (&acc)[NC]) {
    constexpr Format f = kFormats[FI];
    const uint8_t *const d = a + 32 * NC, *const x = d + 4 * NC, *const y = x + 4 * NC;
    vi sum[NC];
    for (int c = 0; c < NC; c++)
        sum[c] = f.scales == Scales::kMin || f.scales == Scales::kK ? zero() : all_i32(x + 4 * c);
    dots<FI, NC, 0>(sum, weights<f.bits, f.table, 0>(q), a);
    dots<FI, NC, 1>(sum, weights<f.bits, f.table, 1>(q), a);
    dots<FI, NC, 2>(sum, weights<f.bits, f.table, 2>(q), a);
    dots<FI, NC, 3>(sum, weights<f.bits, f.table, 3>(q), a);
    if constexpr (f.scales == Scales::kSix) {
        const vf dw = load_f16(s + 2 * o);
        accumulate<NC>(acc, sum, mul(dw, from_s8(s + 32 + 32 * b + o)), d);
        for (int c = 0; c < NC; c++) sum[c] = all_i32(y + 4 * c);
    }
    dots<FI, NC, 4>(sum, weights<f.bits, f.table, 4>(q), a);
    dots<FI, NC, 5>(sum, weights<f.bits, f.table, 5>(q), a);
    dots<FI, NC, 6>(sum, weights<f.bits, f.table, 6>(q), a);
    dots<FI, NC, 7>(sum, weights<f.bits, f.table, 7>(q), a);
    if constexpr (f.scales == Scales::kSym) {
        accumulate<NC>(acc, sum, load_f16(s + 2 * o), d);
    } else if constexpr (f.scales == Scales::kSix) {
        accumulate<NC>(acc, sum, mul(load_f16(s + 2 * o), from_s8(s + 48 + 32 * b + o)), d);
    } else if constexpr (f.scales == Scales::kIq) {
        accumulate<NC>(acc, sum, mul(load_f16(s + 2 * o), from_s8(s + 32 + 16 * b + o)), d);
    } else if constexpr (f.scales == Scales::kMin) {
        accumulate<NC>(acc, sum, load_f16(s + 2 * o), d);
        const vf m = load_f16(s + 32 + 2 * o);
        for (int c = 0; c < NC; c++) acc[c] = fma(m, all_f32(x + 4 * c), acc[c]);
    } else {
        accumulate<NC>(acc, sum, mul(load_f16(s + 2 * o), from_u8(s + 64 + 16 * b + o)), d);
        const vf m = mul(load_f16(s + 32 + 2 * o), from_u8(s + 192 + 16 * b + o));
        for (int c = 0; c < NC; c++) acc[c] = fnma(m, all_f32(x + 4 * c), acc[c]);
    }
}

// Weights are fetched in two steps: 64 blocks ahead (16 to 32 KB) into the second-level cache, whose many outstanding
// requests fill the memory's bandwidth, and from there 2 KB ahead into the first. Measured on Zen 4, one thread, one column
// of Q4_K: 14 GB/s without, 16 with the first level alone 8 KB ahead, 29 with the second level alone, 31 with both.
constexpr int kFarBlocks = 64, kNearBytes = 2048;

template <int FI, int NC>
void multiply_tile(const uint8_t *packed, int64_t k, int64_t groups, int64_t rows, const uint8_t *act, float *const *dst) {
    constexpr Format f = kFormats[FI];
    constexpr int blocks = f.super / 32, block_bytes = vectors_of(f.bits) * 64;
    const size_t stride = group_bytes(f, k), region = quant_region(f, k);
    const int64_t supers = k / f.super;
    for (int64_t g = 0; g < groups; g++) {
        for (int h = 0; h < kGroupRows / kLanes; h++) {
            const uint8_t *q = packed + g * stride + 4 * kLanes * h;
            const uint8_t *s = packed + g * stride + region;
            const uint8_t *a = act;
            vf acc[NC];
            for (int c = 0; c < NC; c++) acc[c] = zero_f();
            for (int64_t i = 0; i < supers; i++) {
                for (int p = 0; p < f.scale_bytes; p += 64) prefetch_far(s + p + kFarBlocks / blocks * f.scale_bytes);
                for (int b = 0; b < blocks; b++) {
                    for (int p = 0; p < block_bytes; p += 64) {
                        prefetch_far(q + p + kFarBlocks * block_bytes);
                        prefetch(q + p + kNearBytes);
                    }
                    block<FI, NC>(q, s, kLanes * h, b, a, acc);
                    q += block_bytes;
                    a += act_block_bytes(NC);
                }
                s += f.scale_bytes;
            }
            const int64_t r0 = g * kGroupRows + h * kLanes;
            if (r0 + kLanes <= rows) {
                for (int c = 0; c < NC; c++) store_f32(dst[c] + r0, acc[c]);
            } else {
                for (int c = 0; c < NC; c++) {
                    float tmp[kLanes];
                    store_f32(tmp, acc[c]);
                    for (int64_t r = r0; r < rows; r++) dst[c][r] = tmp[r - r0];
                }
            }
        }
    }
}

template <int FI>
void multiply(const uint8_t *packed, int64_t k, int64_t groups, int64_t rows, const uint8_t *act, int nc,
              float *const *dst) {
    switch (nc) {
        case 1: return multiply_tile<FI, 1>(packed, k, groups, rows, act, dst);
        case 2: return multiply_tile<FI, 2>(packed, k, groups, rows, act, dst);
        case 3: return multiply_tile<FI, 3>(packed, k, groups, rows, act, dst);
        case 4: return multiply_tile<FI, 4>(packed, k, groups, rows, act, dst);
        case 5: return multiply_tile<FI, 5>(packed, k, groups, rows, act, dst);
        case 6: return multiply_tile<FI, 6>(packed, k, groups, rows, act, dst);
        case 7: return multiply_tile<FI, 7>(packed, k, groups, rows, act, dst);
        default: return multiply_tile<FI, 8>(packed, k, groups, rows, act, dst);
    }
}

// A block's scale is its largest magnitude / 127; a block with nothing representable in it (all below 2^-100) becomes
// zeros, and one with an infinity or NaN gets a NaN scale, so that the damage shows in the result.
void quantize(ActKind kind, const float *const *src, int nc, int64_t b0, int64_t b1, uint8_t *act) {
    for (int64_t b = b0; b < b1; b++) {
        uint8_t *const rec = act + b * act_block_bytes(nc);
        for (int c = 0; c < nc; c++) {
            const float *v = src[c] + 32 * b;
            int32_t bits[32], top = 0;
            std::memcpy(bits, v, sizeof bits);
            for (int i = 0; i < 32; i++) {
                const int32_t m = bits[i] & 0x7fffffff;
                top = m > top ? m : top;
            }
            float peak, d, inv;
            std::memcpy(&peak, &top, 4);
            if (top >= 0x7f800000) d = std::nanf(""), inv = 0.0f;
            else if (peak < 0x1p-100f) d = 0.0f, inv = 0.0f;
            else d = peak / 127.0f, inv = 127.0f / peak;
            int8_t *const q = reinterpret_cast<int8_t *>(rec + 32 * c);
            int32_t n[32], first = 0, second = 0;
            for (int i = 0; i < 32; i++) {
                // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
                const float r = (top >= 0x7f800000 ? 0.0f : v[i]) * inv + 12582912.0f;
                std::memcpy(&n[i], &r, 4);
                n[i] -= 0x4b400000;
            }
            for (int i = 0; i < 32; i++) q[i] = static_cast<int8_t>(n[i]);
            for (int i = 0; i < 16; i++) first += n[i], second += n[16 + i];
            int32_t x, y = 0;
            const float fsum = d * static_cast<float>(first + second);
            switch (kind) {
                case ActKind::kSym8: x = -8 * (first + second); break;
                case ActKind::kSym16: x = -16 * (first + second); break;
                case ActKind::kSym128: x = -128 * (first + second); break;
                case ActKind::kMin: std::memcpy(&x, &fsum, 4); break;
                default: x = -32 * first, y = -32 * second; break;
            }
            std::memcpy(rec + 32 * nc + 4 * c, &d, 4);
            std::memcpy(rec + 36 * nc + 4 * c, &x, 4);
            std::memcpy(rec + 40 * nc + 4 * c, &y, 4);
        }
    }
}

// Plain rows. Lane l of an accumulator holds the products of k = l, l + kLanes, ...; the lanes are added pairwise, then the
// values left over at the end one by one.
template <int TYPE>
inline vf load_plain(const uint8_t *p) {
    if constexpr (TYPE == kF32) return load_f32(p);
    else if constexpr (TYPE == kF16) return load_f16(p);
    else return load_bf16(p);
}

template <int TYPE>
inline float scalar_plain(const uint8_t *p) {
    if constexpr (TYPE == kF32) {
        float x;
        std::memcpy(&x, p, 4);
        return x;
    } else {
        uint16_t h;
        std::memcpy(&h, p, 2);
        if constexpr (TYPE == kF16) return half_to_float(h);
        const uint32_t u = uint32_t(h) << 16;
        float x;
        std::memcpy(&x, &u, 4);
        return x;
    }
}

inline float add_lanes(vf v) {
    float t[kLanes];
    store_f32(t, v);
    for (int n = kLanes / 2; n >= 1; n /= 2)
        for (int i = 0; i < n; i++) t[i] += t[i + n];
    return t[0];
}

template <int TYPE, int NR, int NC>
inline void plain_tile(const uint8_t *data, size_t row_bytes, int64_t k, const float *const *src, float *const *dst,
                       int64_t r0) {
    constexpr size_t size = TYPE == kF32 ? 4 : 2;
    vf acc[NR][NC];
    for (int r = 0; r < NR; r++)
        for (int c = 0; c < NC; c++) acc[r][c] = zero_f();
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
        vf x[NC];
        for (int c = 0; c < NC; c++) x[c] = load_f32(src[c] + i);
        for (int r = 0; r < NR; r++) {
            const vf w = load_plain<TYPE>(data + r * row_bytes + i * size);
            for (int c = 0; c < NC; c++) acc[r][c] = fma(w, x[c], acc[r][c]);
        }
    }
    for (int r = 0; r < NR; r++)
        for (int c = 0; c < NC; c++) {
            float sum = add_lanes(acc[r][c]);
            for (int64_t j = i; j < k; j++)
                sum = sum + scalar_plain<TYPE>(data + r * row_bytes + j * size) * src[c][j];
            dst[c][r0 + r] = sum;
        }
}

template <int TYPE, int NC>
void plain_cols(const uint8_t *data, size_t row_bytes, int64_t k, int64_t rows, const float *const *src,
                float *const *dst) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) plain_tile<TYPE, 4, NC>(data + r * row_bytes, row_bytes, k, src, dst, r);
    for (; r < rows; r++) plain_tile<TYPE, 1, NC>(data + r * row_bytes, row_bytes, k, src, dst, r);
}

template <int TYPE>
void plain(const uint8_t *data, size_t row_bytes, int64_t k, int64_t rows, const float *const *src, int nc,
           float *const *dst) {
    for (int c = 0; c < nc; c += 4) {
        switch (nc - c) {
            case 1: plain_cols<TYPE, 1>(data, row_bytes, k, rows, src + c, dst + c); break;
            case 2: plain_cols<TYPE, 2>(data, row_bytes, k, rows, src + c, dst + c); break;
            case 3: plain_cols<TYPE, 3>(data, row_bytes, k, rows, src + c, dst + c); break;
            default: plain_cols<TYPE, 4>(data, row_bytes, k, rows, src + c, dst + c); break;
        }
    }
}

static_assert(kFormatCount == 10, "the table below lists every format");
constexpr Kernels make_table(const char *name) {
    return Kernels{name,
                   quantize,
                   {multiply<0>, multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>, multiply<7>,
                    multiply<8>, multiply<9>},
                   plain<kF32>,
                   plain<kF16>,
                   plain<kBF16>};
}
