// Two columns at a time, for instructions that multiply 2 rows with 2 columns (ARM's USMMLA). Included after kernels_impl.h.
//
// Of four rows a vector then holds two, and of the columns two: lanes are (row 0, column 0), (row 0, column 1), (row 1,
// column 0), (row 1, column 1). Sums stay like that until the end; scales of rows are doubled, those of columns repeated. A
// lane meets the operations of `block` in kernels_impl.h in their order, so it gets the same bits.

inline vi pair_dot(vi acc, vi rows, vi columns) {
    return vreinterpretq_u8_s32(vusmmlaq_s32(vreinterpretq_s32_u8(acc), rows, vreinterpretq_s8_u8(columns)));
}
// 8 values of one column from p and of the next from p + 32.
inline vi two_columns(const uint8_t *p) { return vcombine_u8(vld1_u8(p), vld1_u8(p + 32)); }
// Rows 0 and 1, rows 2 and 3, each with the 8 values that two vectors of four rows hold.
inline vi first_rows(vi a, vi b) { return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))); }
inline vi last_rows(vi a, vi b) { return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))); }
// The numbers of two neighbouring columns, for both rows.
inline vi both_i32(const uint8_t *p) {
    uint64_t x;
    std::memcpy(&x, p, 8);
    return vreinterpretq_u8_u64(vdupq_n_u64(x));
}
inline vf both_f32(const uint8_t *p) { return vreinterpretq_f32_u8(both_i32(p)); }

// What belongs to NC columns: two vectors for each pair, and one for the last where NC is odd.
template <typename V, int NC>
struct Columns {
    V first[NC / 2], last[NC / 2], odd;
};

template <int NC>
inline void start(Columns<vi, NC> &sum, const uint8_t *x) {
    for (int p = 0; p < NC / 2; p++) sum.first[p] = sum.last[p] = x ? both_i32(x + 8 * p) : zero();
    sum.odd = NC % 2 && x ? all_i32(x + 4 * (NC - 1)) : zero();
}

// Vectors J and J + 1 of a block's quants.
template <int FI, int NC, int J>
inline void dots_pair(Columns<vi, NC> &sum, const uint8_t *q, const uint8_t *a) {
    constexpr Format f = kFormats[FI];
    const vi w0 = weights<f.bits, f.table, J>(q), w1 = weights<f.bits, f.table, J + 1>(q);
    const vi first = first_rows(w0, w1), last = last_rows(w0, w1);
    for (int p = 0; p < NC / 2; p++) {
        const vi x = two_columns(a + 64 * p + 4 * J);
        sum.first[p] = pair_dot(sum.first[p], first, x);
        sum.last[p] = pair_dot(sum.last[p], last, x);
    }
    if constexpr (NC % 2) {
        const uint8_t *const x = a + 32 * (NC - 1) + 4 * J;
        sum.odd = dot<true>(dot<true>(sum.odd, w0, x), w1, x + 4);
    }
}

// acc += t * d * sum, t per row and d per column.
template <int NC>
inline void accumulate_pairs(Columns<vf, NC> &acc, const Columns<vi, NC> &sum, vf t, const uint8_t *d) {
    const vf first = vzip1q_f32(t, t), last = vzip2q_f32(t, t);
    for (int p = 0; p < NC / 2; p++) {
        const vf two = both_f32(d + 8 * p);
        acc.first[p] = fma(to_float(sum.first[p]), mul(first, two), acc.first[p]);
        acc.last[p] = fma(to_float(sum.last[p]), mul(last, two), acc.last[p]);
    }
    if constexpr (NC % 2) acc.odd = fma(to_float(sum.odd), mul(t, all_f32(d + 4 * (NC - 1))), acc.odd);
}

// acc += m * x, or -m * x.
template <bool MINUS, int NC>
inline void add_minima(Columns<vf, NC> &acc, vf m, const uint8_t *x) {
    const auto add = [](vf a, vf b, vf c) { return MINUS ? fnma(a, b, c) : fma(a, b, c); };
    const vf first = vzip1q_f32(m, m), last = vzip2q_f32(m, m);
    for (int p = 0; p < NC / 2; p++) {
        const vf two = both_f32(x + 8 * p);
        acc.first[p] = add(first, two, acc.first[p]);
        acc.last[p] = add(last, two, acc.last[p]);
    }
    if constexpr (NC % 2) acc.odd = add(m, all_f32(x + 4 * (NC - 1)), acc.odd);
}

template <int FI, int NC>
inline void block_pairs(const uint8_t *q, const uint8_t *s, int o, int b, const uint8_t *a, Columns<vf, NC> &acc) {
    constexpr Format f = kFormats[FI];
    const uint8_t *const d = a + 32 * NC, *const x = d + 4 * NC, *const y = x + 4 * NC;
    Columns<vi, NC> sum;
    start<NC>(sum, f.scales == Scales::kMin || f.scales == Scales::kK ? nullptr : x);
    dots_pair<FI, NC, 0>(sum, q, a);
    dots_pair<FI, NC, 2>(sum, q, a);
    if constexpr (f.scales == Scales::kSix) {
        accumulate_pairs<NC>(acc, sum, mul(load_f16(s + 2 * o), from_s8(s + 32 + 32 * b + o)), d);
        start<NC>(sum, y);
    }
    dots_pair<FI, NC, 4>(sum, q, a);
    dots_pair<FI, NC, 6>(sum, q, a);
    if constexpr (f.scales == Scales::kSym) {
        accumulate_pairs<NC>(acc, sum, load_f16(s + 2 * o), d);
    } else if constexpr (f.scales == Scales::kSix) {
        accumulate_pairs<NC>(acc, sum, mul(load_f16(s + 2 * o), from_s8(s + 48 + 32 * b + o)), d);
    } else if constexpr (f.scales == Scales::kIq) {
        accumulate_pairs<NC>(acc, sum, mul(load_f16(s + 2 * o), from_s8(s + 32 + 16 * b + o)), d);
    } else if constexpr (f.scales == Scales::kMin) {
        accumulate_pairs<NC>(acc, sum, load_f16(s + 2 * o), d);
        add_minima<false, NC>(acc, load_f16(s + 32 + 2 * o), x);
    } else {
        accumulate_pairs<NC>(acc, sum, mul(load_f16(s + 2 * o), from_u8(s + 64 + 16 * b + o)), d);
        add_minima<true, NC>(acc, mul(load_f16(s + 32 + 2 * o), from_u8(s + 192 + 16 * b + o)), x);
    }
}

// Four rows of one column back in one vector, and as many of them to memory as there are.
template <int NC>
inline void store_pairs(const Columns<vf, NC> &acc, float *const *dst, int64_t r0, int64_t rows) {
    const auto put = [&](int c, vf v) {
        if (r0 + kLanes <= rows) return store_f32(dst[c] + r0, v);
        float tmp[kLanes];
        store_f32(tmp, v);
        for (int64_t r = r0; r < rows; r++) dst[c][r] = tmp[r - r0];
    };
    for (int p = 0; p < NC / 2; p++) {
        put(2 * p, vuzp1q_f32(acc.first[p], acc.last[p]));
        put(2 * p + 1, vuzp2q_f32(acc.first[p], acc.last[p]));
    }
    if constexpr (NC % 2) put(NC - 1, acc.odd);
}

template <int FI, int NC>
void multiply_tile_pairs(const uint8_t *packed, int64_t k, int64_t groups, int64_t rows, const uint8_t *act, float *const *dst) {
    constexpr Format f = kFormats[FI];
    constexpr int blocks = f.super / 32, block_bytes = vectors_of(f.bits) * 64;
    const size_t stride = group_bytes(f, k), region = quant_region(f, k);
    const int64_t supers = k / f.super;
    for (int64_t g = 0; g < groups; g++) {
        for (int h = 0; h < kGroupRows / kLanes; h++) {
            const uint8_t *q = packed + g * stride + 4 * kLanes * h;
            const uint8_t *s = packed + g * stride + region;
            const uint8_t *a = act;
            Columns<vf, NC> acc;
            for (int p = 0; p < NC / 2; p++) acc.first[p] = acc.last[p] = zero_f();
            acc.odd = zero_f();
            for (int64_t i = 0; i < supers; i++) {
                for (int b = 0; b < blocks; b++) {
                    for (int p = 0; p < block_bytes; p += 64) prefetch(q + p + kNearBytes);
                    block_pairs<FI, NC>(q, s, kLanes * h, b, a, acc);
                    q += block_bytes;
                    a += act_block_bytes(NC);
                }
                s += f.scale_bytes;
            }
            store_pairs<NC>(acc, dst, g * kGroupRows + h * kLanes, rows);
        }
    }
}

template <int FI>
void multiply_pairs(const uint8_t *packed, int64_t k, int64_t groups, int64_t rows, const uint8_t *act, int nc,
                    float *const *dst) {
    switch (nc) {
        case 1: return multiply_tile<FI, 1>(packed, k, groups, rows, act, dst);
        case 2: return multiply_tile_pairs<FI, 2>(packed, k, groups, rows, act, dst);
        case 3: return multiply_tile_pairs<FI, 3>(packed, k, groups, rows, act, dst);
        case 4: return multiply_tile_pairs<FI, 4>(packed, k, groups, rows, act, dst);
        case 5: return multiply_tile_pairs<FI, 5>(packed, k, groups, rows, act, dst);
        case 6: return multiply_tile_pairs<FI, 6>(packed, k, groups, rows, act, dst);
        case 7: return multiply_tile_pairs<FI, 7>(packed, k, groups, rows, act, dst);
        default: return multiply_tile_pairs<FI, 8>(packed, k, groups, rows, act, dst);
    }
}

constexpr Kernels make_pairs_table(const char *name) {
    Kernels table = make_table(name);
    const MultiplyFn pairs[] = {multiply_pairs<0>, multiply_pairs<1>, multiply_pairs<2>, multiply_pairs<3>, multiply_pairs<4>,
                                multiply_pairs<5>, multiply_pairs<6>, multiply_pairs<7>, multiply_pairs<8>, multiply_pairs<9>};
    for (int i = 0; i < kFormatCount; i++) table.multiply[i] = pairs[i];
    return table;
}
