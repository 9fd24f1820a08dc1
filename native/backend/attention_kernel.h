// The attention kernel, written once. Each attention_<isa>.cpp defines its vector type and operations in an unnamed namespace and then
// includes this file inside it. Nothing here may be an inline function with external linkage (so no std:: templates): the linker keeps
// one copy of those for the whole library, and it might be the one compiled for a CPU that we are not on.
//
// The order of operations of one row, the same for every instruction set:
//   logit  = fused multiply-adds over d = 0, 1, ..., DK-1, starting from 0
//   weight = 2^(logit * log2(e) - m), m the running maximum, block of LS_ATT_BLOCK keys after block
//   value  = fused multiply-adds over the keys in ascending order; rescaled at each block by 2^(m_old - m_new)
//   sum    = LS_ATT_LANES partial sums, key j in lane j % LS_ATT_LANES, rescaled likewise
// from zero in each super-chunk of LS_ATT_SUPER keys; the super-chunks' results are merged in ascending order. A hidden key has weight 0,
// and fma(0, v, x) is x: skipping it or not gives the same bits (but for the sign of a zero, which merging removes). Keys and super-chunks
// are counted from the start of the cache, so a row never notices how the call was cut.

// What the including file provides: W (lanes of vf), GP (groups of 16 lanes that one pass of the micro-kernels holds in registers), the v_*,
// and F16_TILE: how many elements of 16 f16 keys v_pack_f16 transposes at a time, 0 where the general way will do.
constexpr int MR = 6;                 // rows of one pass of the micro-kernels
constexpr int NV = LS_ATT_LANES / W;  // vectors in a group
constexpr int B  = LS_ATT_BLOCK;

constexpr float LOG2E = 1.44269504f;

float bits_to_float(uint32_t u) {
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
}

float half_to_float(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) {
        return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    }
    if (rest >= 0x400u) {
        return bits_to_float(sign | ((rest << 13) + ((127u - 15u) << 23)));
    }
    const float x = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -x : x;
}

uint16_t u16_at(const void * p) {
    uint16_t h;
    __builtin_memcpy(&h, p, sizeof h);
    return h;
}

// 2^x for x <= 128, exactly 1 at 0, exactly 0 below -126. Minimax polynomial of degree 6 for 2^f on [-1/2, 1/2] with constant term 1: 8e-8
// relative with its roundings.
inline vf v_exp2(vf x) {
    const vf n = v_round(x);
    const vf f = v_sub(x, n);
    vf       p = v_set1(0.00015353362f);
    p          = v_fma(p, f, v_set1(0.0013398875f));
    p          = v_fma(p, f, v_set1(0.00961843692f));
    p          = v_fma(p, f, v_set1(0.0555033237f));
    p          = v_fma(p, f, v_set1(0.240226477f));
    p          = v_fma(p, f, v_set1(0.693147182f));
    p          = v_fma(p, f, v_set1(1.0f));
    return v_zero_if_less(x, v_set1(-126.0f), v_ldexp(p, n));
}

float exp2_of(float x) {
    return v_first(v_exp2(v_set1(x)));
}

// tanh: an odd minimax polynomial below 5/8, 1 - 2 / (e^2|x| + 1) above.
inline vf v_tanh(vf x) {
    const vf size = v_abs(x), z = v_mul(x, x);
    vf       p = v_set1(-0.00570498453f);
    p          = v_fma(p, z, v_set1(0.0206390843f));
    p          = v_fma(p, z, v_set1(-0.0537397154f));
    p          = v_fma(p, z, v_set1(0.133314416f));
    p          = v_fma(p, z, v_set1(-0.333332807f));
    const vf small = v_fma(v_mul(x, z), p, x);
    const vf e     = v_exp2(v_mul(v_min(v_set1(10.0f), size), v_set1(2 * LOG2E)));
    const vf large = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
    return v_select_if_less(size, v_set1(0.625f), small, v_copysign(large, x));
}

// How W elements from d on (a multiple of W), and single elements, are read from a row of each type.
struct row_f32 {
    static constexpr int TYPE = LS_ATT_F32;
    static vf    load(const char * row, int64_t d) { return v_load(reinterpret_cast<const float *>(row) + d); }
    static float one(const char * row, int64_t d) { return reinterpret_cast<const float *>(row)[d]; }
    static int64_t bytes(int64_t n) { return 4 * n; }
};
struct row_f16 {
    static constexpr int TYPE = LS_ATT_F16;
    static vf    load(const char * row, int64_t d) { return v_load_f16(reinterpret_cast<const uint16_t *>(row) + d); }
    static float one(const char * row, int64_t d) { return half_to_float(u16_at(row + 2 * d)); }
    static int64_t bytes(int64_t n) { return 2 * n; }
};
struct row_q8_0 {
    static constexpr int TYPE = LS_ATT_Q8_0;
    static vf load(const char * row, int64_t d) {
        const char * block = row + 34 * (d / 32);
        return v_mul(v_load_i8(reinterpret_cast<const int8_t *>(block + 2 + d % 32)), v_set1(half_to_float(u16_at(block))));
    }
    static float one(const char * row, int64_t d) {
        const char * block = row + 34 * (d / 32);
        return static_cast<float>(static_cast<int8_t>(block[2 + d % 32])) * half_to_float(u16_at(block));
    }
    static int64_t bytes(int64_t n) { return 34 * (n / 32); }
};

// The cache lines of the next block of keys or values, handed out a few at a time while this block is worked on: the memory is then busy
// all the time and nobody waits for it. Into the second-level cache: the first holds what the micro-kernels read over and over. Offsets are
// int32 from the block's start.
struct ahead {
    const int32_t * offset = nullptr;
    uintptr_t       base   = 0;
    int64_t         left   = 0;
    void take(int64_t n) {
        n = n < left ? n : left;
        for (int64_t i = 0; i < n; i++) {
            __builtin_prefetch(reinterpret_cast<const void *>(base + static_cast<uintptr_t>(offset[i])), 0, 2);
        }
        skip(n);
    }
    void skip(int64_t n) {
        offset += n;
        left -= n;
    }
};

// The lines that `rows` rows of `bytes` bytes touch, `stride` apart; returns how many. Both may start anywhere in a line.
int64_t list_lines(int64_t rows, int64_t bytes, int64_t stride, bool aligned, int32_t * offset) {
    const int64_t each = (bytes + 63) / 64 + (aligned ? 0 : 1);
    if (stride * rows >= int64_t(1) << 31) {
        return 0;
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < each; i++) {
            *offset++ = static_cast<int32_t>(r * stride + (i * 64 < bytes ? i * 64 : bytes - 1));
        }
    }
    return rows * each;
}

// Keys n of a block, `stride` bytes apart, to kt[DK][B]. Columns from n on repeat the last key: the mask hides them.
template <typename T> void pack_keys(const char * k, int64_t stride, int64_t n, int64_t DK, float * kt, ahead & next) {
    const int64_t lines = next.left * W * W / (2 * B * DK); // half of them here
    for (int64_t j = 0; j < B; j += W) {
        const char * row[W];
        for (int64_t i = 0; i < W; i++) {
            row[i] = k + (j + i < n ? j + i : n - 1) * stride;
        }
        int64_t d = 0;
        if constexpr (T::TYPE == LS_ATT_F16 && F16_TILE > 0) {
            for (; d + F16_TILE <= DK; d += F16_TILE) {
                next.take(lines * F16_TILE / W);
                v_pack_f16(row, d, kt + d * B + j, B);
            }
        }
        for (; d + W <= DK; d += W) {
            next.take(lines);
            vf t[W];
            LS_UNROLL
            for (int i = 0; i < W; i++) {
                t[i] = T::load(row[i], d);
            }
            v_transpose(t);
            LS_UNROLL
            for (int i = 0; i < W; i++) {
                v_store(kt + (d + i) * B + j, t[i]);
            }
        }
        for (; d < DK; d++) {
            for (int64_t i = 0; i < W; i++) {
                kt[d * B + j + i] = T::one(row[i], d);
            }
        }
    }
}

bool finite(float x) { return x * 0.0f == 0.0f; }

// Values of the keys j0 to j1 of a block to v32[B][DVp]. One that isn't finite must not reach rows that can't see it, not even times zero: it
// becomes zero here and the key's bit is set in the result.
template <typename T> uint64_t load_values(const char * v, int64_t stride, int64_t j0, int64_t j1, int64_t DV, int64_t DVp, float * v32,
                                           ahead & next) {
    const int64_t lines = next.left / (2 * B); // half of them here
    vf            check[4];                         // x * 0 is 0 only for finite x; four, so that none waits for the last
    float         check_one = 0.0f;
    for (vf & c : check) {
        c = v_set1(0.0f);
    }
    for (int64_t j = j0; j < j1; j++) {
        const char * row = v + j * stride;
        float *      out = v32 + j * DVp;
        next.take(lines);
        int64_t d = 0;
        for (; d + 4 * W <= DV; d += 4 * W) {
            LS_UNROLL
            for (int i = 0; i < 4; i++) {
                const vf x = T::load(row, d + i * W);
                v_store(out + d + i * W, x);
                check[i] = v_fma(x, v_set1(0.0f), check[i]);
            }
        }
        for (; d + W <= DV; d += W) {
            const vf x = T::load(row, d);
            v_store(out + d, x);
            check[0] = v_fma(x, v_set1(0.0f), check[0]);
        }
        for (; d < DV; d++) {
            out[d] = T::one(row, d);
            check_one += out[d] * 0.0f;
        }
        for (; d < DVp; d++) {
            out[d] = 0.0f;
        }
    }
    if (!v_any_nan(v_add(v_add(check[0], check[1]), v_add(check[2], check[3]))) && finite(check_one)) {
        return 0;
    }
    uint64_t bad = 0;
    for (int64_t j = j0; j < j1; j++) {
        for (int64_t d = 0; d < DV; d++) {
            if (!finite(v32[j * DVp + d])) {
                v32[j * DVp + d] = 0.0f;
                bad |= uint64_t(1) << j;
            }
        }
    }
    return bad;
}

// s[R][B] = q . kt for R rows and N groups of 16 keys; q is [DK][R]. Hands out one line of `next` per d if there are as many.
template <int R, int N> void qk_pass(const float * q, const float * kt, int64_t DK, float * s, ahead & next) {
    const int32_t * line = next.left >= DK ? next.offset : nullptr;
    vf acc[R][N * NV];
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            acc[r][c] = v_set1(0.0f);
        }
    }
    for (int64_t d = 0; d < DK; d++, q += R, kt += B) {
        if (line) {
            __builtin_prefetch(reinterpret_cast<const void *>(next.base + static_cast<uintptr_t>(line[d])), 0, 2);
        }
        vf k[N * NV];
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            k[c] = v_load(kt + c * W);
        }
        LS_UNROLL
        for (int r = 0; r < R; r++) {
            const vf x = v_set1(q[r]);
            LS_UNROLL
            for (int c = 0; c < N * NV; c++) {
                acc[r][c] = v_fma(x, k[c], acc[r][c]);
            }
        }
    }
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            v_store(s + r * B + c * W, acc[r][c]);
        }
    }
    next.skip(line ? DK : 0);
}

// acc[R][N groups of 16] = acc * scale[r] + sum over n keys of w[r][key] * v[key]; acc's rows are acc_stride apart. Hands out
// one line of `next` per key if there are as many.
template <int R, int N> void pv_pass(const float * w, const float * v, int64_t v_stride, int64_t n, const float * scale, float * out,
                                     int64_t acc_stride, ahead & next) {
    const int32_t * line = next.left >= n ? next.offset : nullptr;
    vf              acc[R][N * NV];
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        const vf c0 = v_set1(scale[r]);
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            acc[r][c] = v_mul(v_load(out + r * acc_stride + c * W), c0);
        }
    }
    for (int64_t j = 0; j < n; j++, v += v_stride) {
        if (line) {
            __builtin_prefetch(reinterpret_cast<const void *>(next.base + static_cast<uintptr_t>(line[j])), 0, 2);
        }
        vf x[N * NV];
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            x[c] = v_load(v + c * W);
        }
        LS_UNROLL
        for (int r = 0; r < R; r++) {
            const vf p = v_set1(w[r * B + j]);
            LS_UNROLL
            for (int c = 0; c < N * NV; c++) {
                acc[r][c] = v_fma(p, x[c], acc[r][c]);
            }
        }
    }
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            v_store(out + r * acc_stride + c * W, acc[r][c]);
        }
    }
    next.skip(line ? n : 0);
}

// As pv_pass, for values that are still in the cache, when there are few rows to read them for. If a sum is not finite, which
// may be a hidden key's doing, out is left alone and the result is false.
template <typename T, int R, int N> bool pv_direct(const float * w, const char * v, int64_t stride, int64_t first, int64_t n, const float * scale,
                                                   float * out, int64_t acc_stride, ahead & next) {
    const int64_t   each = next.left >= 2 * n ? 2 : next.left >= n ? 1 : 0;
    const int32_t * line = next.offset;
    vf              acc[R][N * NV];
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        const vf c0 = v_set1(scale[r]);
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            acc[r][c] = v_mul(v_load(out + r * acc_stride + c * W), c0);
        }
    }
    for (int64_t j = 0; j < n; j++, v += stride) {
        for (int64_t i = 0; i < each; i++) {
            __builtin_prefetch(reinterpret_cast<const void *>(next.base + static_cast<uintptr_t>(*line++)), 0, 2);
        }
        vf x[N * NV];
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            x[c] = T::load(v, first + c * W);
        }
        LS_UNROLL
        for (int r = 0; r < R; r++) {
            const vf p = v_set1(w[r * B + j]);
            LS_UNROLL
            for (int c = 0; c < N * NV; c++) {
                acc[r][c] = v_fma(p, x[c], acc[r][c]);
            }
        }
    }
    next.skip(each * n);
    vf check = v_set1(0.0f);
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        vf zero = v_mul(acc[r][0], v_set1(0.0f));
        LS_UNROLL
        for (int c = 1; c < N * NV; c++) {
            zero = v_fma(acc[r][c], v_set1(0.0f), zero);
        }
        check = v_add(check, zero);
    }
    if (v_any_nan(check)) {
        return false;
    }
    LS_UNROLL
    for (int r = 0; r < R; r++) {
        LS_UNROLL
        for (int c = 0; c < N * NV; c++) {
            v_store(out + r * acc_stride + c * W, acc[r][c]);
        }
    }
    return true;
}

typedef void (*qk_fn)(const float *, const float *, int64_t, float *, ahead &);
typedef void (*pv_fn)(const float *, const float *, int64_t, int64_t, const float *, float *, int64_t, ahead &);

typedef bool (*direct_fn)(const float *, const char *, int64_t, int64_t, int64_t, const float *, float *, int64_t, ahead &);
template <typename T, int R, int N> constexpr direct_fn direct = pv_direct<T, R, N>;

#define LS_ROWS(f, N) { f<1, N>, f<2, N>, f<3, N>, f<4, N>, f<5, N>, f<6, N> }
#define LS_TABLE(f) { LS_ROWS(f, 1), LS_ROWS(f, (GP < 2 ? 1 : 2)), LS_ROWS(f, (GP < 3 ? 1 : 3)), LS_ROWS(f, (GP < 4 ? 1 : 4)) }
constexpr qk_fn QK[4][MR] = LS_TABLE(qk_pass);
constexpr pv_fn PV[4][MR] = LS_TABLE(pv_pass);
#define LS_DIRECT_ROWS(N) { direct<T, 1, N>, direct<T, 2, N>, direct<T, 3, N>, direct<T, 4, N>, direct<T, 5, N>, direct<T, 6, N> }
template <typename T> constexpr direct_fn DIRECT[4][MR] = { LS_DIRECT_ROWS(1), LS_DIRECT_ROWS((GP < 2 ? 1 : 2)),
                                                            LS_DIRECT_ROWS((GP < 3 ? 1 : 3)), LS_DIRECT_ROWS((GP < 4 ? 1 : 4)) };

// The rows of a tile in panels of at most MR, as equal as can be.
struct panels {
    int64_t rows, count;
    explicit panels(int64_t n) : rows(n), count((n + MR - 1) / MR) {}
    int64_t start(int64_t i) const { return rows / count * i + (i < rows % count ? i : rows % count); }
};

// One thread's buffers, and the tile that it works on.
struct tile {
    const ls_attention_args * a;
    const ls_att_plan *       p;
    int64_t                   group, seq, row0, rows; // rows row0 .. row0 + rows of this group and sequence
    float *kt, *v32, *q, *s, *mask;                   // mask[B]: one query's mask times log2(e)
    float *lanes, *m, *rescale, *slope;               // per row: 16 partial sums, the maximum, the block's factor, the ALiBi slope
    float *acc;                                       // [rows][acc_stride]
    int64_t acc_stride;
    int64_t hole;             // from here on some row's keys are numbered anew: see attention.h
    float * q_one;            // queries of one position
    char *  k_rows, * v_rows; // a block of keys and values one after another
    uint16_t * mask_row;      // and their mask
    const int32_t * lines; // offsets of the lines of a block of keys, then of a block of values
    int64_t n_lines_k, n_lines_v;

    int64_t head(int64_t r) const { return group * p->G + (row0 + r) % p->G; }
    int64_t query(int64_t r) const { return (row0 + r) / p->G; }
    const char * mask_row_of(int64_t r) const {
        if (!a->mask.data) {
            return nullptr;
        }
        return static_cast<const char *>(a->mask.data) + query(r) * a->mask.nb[1] + head(r) % a->mask.ne[2] * a->mask.nb[2] +
               seq % a->mask.ne[3] * a->mask.nb[3];
    }
};

constexpr uint16_t HIDDEN  = 0xfc00; // -infinity
constexpr int64_t  NO_HOLE = INT64_MAX;

bool hidden(const char * mask_row, int64_t key) { return u16_at(mask_row + 2 * key) == HIDDEN; }

// The last key that a row sees, -1 for none.
int64_t last_seen(const char * mask_row, int64_t n_kv) {
    int64_t last = n_kv - 1;
    while (last >= 0 && hidden(mask_row, last)) {
        last--;
    }
    return last;
}

// The first hidden key between two that a row sees, in its tail.
int64_t hole_of(const char * mask_row, int64_t n_kv) {
    if (!mask_row) {
        return NO_HOLE;
    }
    const int64_t last = last_seen(mask_row, n_kv);
    int64_t       j    = last < LS_ATT_TAIL ? 0 : last + 1 - LS_ATT_TAIL;
    while (j <= last && hidden(mask_row, j)) {
        j++;
    }
    while (j <= last && !hidden(mask_row, j)) {
        j++;
    }
    return j > last ? NO_HOLE : j;
}

// The cells of a row's keys key0 ... key0 + B, numbered without the hidden ones from `hole` on; returns how many there are.
int64_t numbered_cells(const char * mask_row, int64_t n_kv, int64_t hole, int64_t key0, int64_t * cell) {
    int64_t n = 0;
    for (int64_t key = key0; key < key0 + B && key < hole && key < n_kv; key++) {
        cell[n++] = key;
    }
    const int64_t last = last_seen(mask_row, n_kv);
    int64_t       key  = hole;
    for (int64_t j = hole; j <= last && key < key0 + B; j++) {
        if (!hidden(mask_row, j) && key++ >= key0) {
            cell[n++] = j;
        }
    }
    return n;
}

// Copies the tile's queries to panels, [DK][rows of the panel] each, and finds the slopes.
void pack_queries(const tile & t) {
    const panels ps(t.rows);
    for (int64_t i = 0; i < ps.count; i++) {
        const int64_t r0 = ps.start(i), n = ps.start(i + 1) - r0;
        for (int64_t r = 0; r < n; r++) {
            const float * q = reinterpret_cast<const float *>(static_cast<const char *>(t.a->q.data) + t.query(r0 + r) * t.a->q.nb[1] +
                                                              t.head(r0 + r) * t.a->q.nb[2] + t.seq * t.a->q.nb[3]);
            float * out = t.q + r0 * t.p->DK + r;
            for (int64_t d = 0; d < t.p->DK; d++) {
                out[d * n] = q[d];
            }
        }
    }
    for (int64_t r = 0; r < t.rows; r++) {
        t.slope[r] = ls_att_slope(t.a, t.head(r));
    }
}

// The groups of 16 keys, from key0 on, that hold a key that some row of the tile sees: first, and one past the last.
void visible_groups(const tile & t, int64_t key0, int64_t n, int64_t * first, int64_t * last) {
    *first = 0;
    *last  = (n + LS_ATT_LANES - 1) / LS_ATT_LANES;
    if (!t.a->mask.data) {
        return;
    }
    int64_t      lo = *last, hi = 0;
    const char * before = nullptr;
    for (int64_t r = 0; r < t.rows && !(lo == 0 && hi == *last); r++) {
        const char * row = t.mask_row_of(r);
        if (row == before) {
            continue;
        }
        before = row;
        for (int64_t g = 0; g < *last; g++) {
            if (g >= lo && g < hi) {
                continue;
            }
            const int64_t end  = (g + 1) * LS_ATT_LANES < n ? (g + 1) * LS_ATT_LANES : n;
            unsigned      seen = 0;
            for (int64_t j = g * LS_ATT_LANES; j < end; j++) {
                seen |= static_cast<unsigned>(u16_at(row + 2 * (key0 + j)) ^ HIDDEN);
            }
            if (seen) {
                lo = g < lo ? g : lo;
                hi = g + 1 > hi ? g + 1 : hi;
            }
        }
    }
    *first = lo;
    *last  = hi;
}

// t.mask for the keys key0 .. key0 + n; keys past n are hidden. False, and no mask written, if it would be all zero.
bool load_mask(const tile & t, const char * row, int64_t key0, int64_t n) {
    unsigned any = n < B;
    for (int64_t j = 0; row && j < n; j++) {
        any |= u16_at(row + 2 * (key0 + j));
    }
    if (!any) {
        return false;
    }
    int64_t j = 0;
    if (row) {
        const uint16_t * h = reinterpret_cast<const uint16_t *>(row) + key0;
        for (; j + W <= n; j += W) {
            v_store(t.mask + j, v_mul(v_load_f16(h + j), v_set1(LOG2E)));
        }
        for (; j < n; j++) {
            t.mask[j] = half_to_float(h[j]) * LOG2E;
        }
    } else {
        for (; j < n; j++) {
            t.mask[j] = 0.0f;
        }
    }
    for (; j < B; j++) {
        t.mask[j] = -__builtin_inff();
    }
    return true;
}

// Logits to weights, in place, for the vectors from .. to of a block's keys; moves each row's maximum and sums on. TO: 0, or `to` when
// `from` is 0, for loops that unroll.
template <int TO> void soft_max_rows(const tile & t, int64_t key0, int64_t n, int from, int to) {
    constexpr int MOST   = B / W;
    const int     c0     = TO ? 0 : from, c1 = TO ? TO : to;
    const float   cap    = t.a->logit_softcap;
    const vf      scale  = v_set1(cap != 0.0f ? t.a->scale / cap : t.a->scale * LOG2E);
    const char *  before = nullptr;
    bool          masked = false;
    for (int64_t r = 0; r < t.rows; r++) {
        const char * row = t.mask_row_of(r);
        if (r == 0 || row != before) {
            masked = load_mask(t, row, key0, n);
            before = row;
        }
        float * s = t.s + r * B;
        vf      x[MOST];
        LS_UNROLL
        for (int c = c0; c < c1; c++) {
            x[c] = v_mul(v_load(s + c * W), scale);
        }
        if (cap != 0.0f) {
            for (int c = c0; c < c1; c++) {
                x[c] = v_mul(v_tanh(x[c]), v_set1(cap * LOG2E));
            }
        }
        if (masked) {
            const vf slope = v_set1(t.slope[r]);
            LS_UNROLL
            for (int c = c0; c < c1; c++) {
                const vf mask = v_load(t.mask + c * W);
                x[c]          = v_hide(mask, v_fma(mask, slope, x[c]));
            }
        }
        vf top = v_set1(-__builtin_inff());
        LS_UNROLL
        for (int c = c0; c < c1; c++) {
            top = v_max(top, x[c]);
        }
        const float old = t.m[r], high = v_hmax(top);
        const float now  = high > old ? high : old;
        const float base = now == -__builtin_inff() ? 0.0f : now; // no key seen yet: all weights are 2^-inf = 0
        t.m[r]           = now;
        t.rescale[r]     = now == old ? 1.0f : exp2_of(old - base);

        LS_UNROLL
        for (int c = c0; c < c1; c++) {
            x[c] = v_exp2(v_sub(x[c], v_set1(base)));
            v_store(s + c * W, x[c]);
        }
        float * lanes = t.lanes + r * LS_ATT_LANES;
        LS_UNROLL
        for (int i = 0; i < NV; i++) {
            vf sum = v_mul(v_load(lanes + i * W), v_set1(t.rescale[r]));
            LS_UNROLL
            for (int c = c0 + i; c < c1; c += NV) {
                sum = v_add(sum, x[c]);
            }
            v_store(lanes + i * W, sum);
        }
    }
}

// The keys with values that are not finite: adds those values to the sums of the rows r0 .. r1, elements c .. end, that give them weight.
template <typename T> void add_not_finite(const tile & t, int64_t j0, int64_t j1, uint64_t bad, const char * v, int64_t stride, int64_t r0, int64_t r1,
                                          int64_t c, int64_t end) {
    for (int64_t j = j0; j < j1; j++) {
        for (int64_t d = c; (bad >> j & 1) && d < end && d < t.p->DV; d++) {
            const float x = T::one(v + j * stride, d);
            for (int64_t r = r0; !finite(x) && r < r1; r++) {
                float * sum = t.acc + r * t.acc_stride + d;
                *sum        = t.s[r * B + j] != 0.0f ? __builtin_fmaf(t.s[r * B + j], x, *sum) : *sum;
            }
        }
    }
}

// Adds the values of a block's keys j0 .. j1, weighted; `v` is the block's first.
template <typename T> void add_values(const tile & t, int64_t j0, int64_t j1, const char * v, int64_t stride, ahead & next) {
    constexpr int64_t FEW = 2; // panels for which values are better converted again and again than stored
    const int64_t DVp = t.p->DVp;
    const panels  ps(t.rows);
    bool          loaded = false;
    uint64_t      bad    = 0;
    for (int64_t c = 0; c < DVp; c += GP * LS_ATT_LANES) {
        const int64_t groups = (DVp - c) / LS_ATT_LANES < GP ? (DVp - c) / LS_ATT_LANES : GP;
        const int64_t end    = c + groups * LS_ATT_LANES;
        for (int64_t i = 0; i < ps.count; i++) {
            const int64_t r0 = ps.start(i), r1 = ps.start(i + 1);
            float * const acc = t.acc + r0 * t.acc_stride + c;
            if (ps.count <= FEW && end <= t.p->DV &&
                DIRECT<T>[groups - 1][r1 - r0 - 1](t.s + r0 * B + j0, v + j0 * stride, stride, c, j1 - j0, t.rescale + r0, acc, t.acc_stride, next)) {
                continue;
            }
            if (!loaded) {
                loaded = true;
                bad    = load_values<T>(v, stride, j0, j1, t.p->DV, DVp, t.v32, next);
            }
            PV[groups - 1][r1 - r0 - 1](t.s + r0 * B + j0, t.v32 + j0 * DVp + c, DVp, j1 - j0, t.rescale + r0, acc, t.acc_stride, next);
            if (bad) {
                add_not_finite<T>(t, j0, j1, bad, v, stride, r0, r1, c, end);
            }
        }
    }
}

// A row's state before it has seen a key.
void begin_rows(const tile & t) {
    for (int64_t r = 0; r < t.rows; r++) {
        t.m[r] = -__builtin_inff();
        __builtin_memset(t.acc + r * t.acc_stride, 0, t.p->DVp * sizeof(float));
    }
    __builtin_memset(t.lanes, 0, t.rows * LS_ATT_LANES * sizeof(float));
}

// A block of n keys, of which the groups g0 to g1 are seen. The mask counts from key0; keys and values are the block's first.
template <typename K, typename V> void block(const tile & t, int64_t key0, int64_t n, int64_t g0, int64_t g1, const char * keys, int64_t ks,
                                             const char * vals, int64_t vs, ahead & next_k, ahead & next_v) {
    const ls_att_plan & p = *t.p;
    const panels        ps(t.rows);
    pack_keys<K>(keys, ks, n, p.DK, t.kt, next_k);
    for (int64_t g = g0; g < g1; g += GP) {
        const int64_t groups = g1 - g < GP ? g1 - g : GP;
        for (int64_t i = 0; i < ps.count; i++) {
            const int64_t r0 = ps.start(i), rows = ps.start(i + 1) - r0;
            QK[groups - 1][rows - 1](t.q + r0 * p.DK, t.kt + g * LS_ATT_LANES, p.DK, t.s + r0 * B + g * LS_ATT_LANES, next_k);
        }
    }
    next_k.take(next_k.left);
    if (g0 == 0 && g1 * LS_ATT_LANES == B) {
        soft_max_rows<B / W>(t, key0, n, 0, B / W);
    } else {
        soft_max_rows<0>(t, key0, n, static_cast<int>(g0) * NV, static_cast<int>(g1) * NV);
    }
    add_values<V>(t, g0 * LS_ATT_LANES, g1 * LS_ATT_LANES < n ? g1 * LS_ATT_LANES : n, vals, vs, next_v);
    next_v.take(next_v.left);
}

// The block at key0 for rows that number their keys each in its own way: one query after another. Sets `any` where a row sees a key.
template <typename K, typename V> void numbered_block(const tile & t, int64_t key0, const char * keys, int64_t ks, const char * vals, int64_t vs,
                                                      bool & any) {
    const ls_att_plan & p  = *t.p;
    const int64_t       kb = K::bytes(p.DK), vb = V::bytes(p.DV);
    ls_attention_args   a  = *t.a;
    a.mask.data            = t.mask_row;
    a.mask.nb[1] = a.mask.nb[2] = a.mask.nb[3] = 0;
    for (int64_t r = 0, end; r < t.rows; r = end) {
        const char * const row = t.mask_row_of(r);
        for (end = r + 1; end < t.rows && t.query(end) == t.query(r) && t.mask_row_of(end) == row; end++) {
        }
        int64_t       cell[B];
        const int64_t n = numbered_cells(row, p.n_kv, hole_of(row, p.n_kv), key0, cell);
        if (n == 0) {
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            __builtin_memcpy(t.k_rows + i * kb, keys + cell[i] * ks, kb);
            __builtin_memcpy(t.v_rows + i * vb, vals + cell[i] * vs, vb);
            t.mask_row[i] = u16_at(row + 2 * cell[i]);
        }
        tile one = t;
        one.a    = &a;
        one.row0 += r;
        one.rows = end - r;
        one.q    = t.q_one;
        one.lanes += r * LS_ATT_LANES;
        one.m += r;
        one.rescale += r;
        one.slope += r;
        one.acc += r * t.acc_stride;
        int64_t g0, g1;
        visible_groups(one, 0, n, &g0, &g1);
        if (g0 >= g1) {
            continue;
        }
        if (!any) {
            any = true;
            begin_rows(t);
        }
        pack_queries(one);
        ahead nothing_k, nothing_v;
        block<K, V>(one, 0, n, g0, g1, t.k_rows, kb, t.v_rows, vb, nothing_k, nothing_v);
    }
}

// One super-chunk for all rows of the tile: acc, m and lanes from nothing. False when no row sees any of its keys (then acc is not set).
template <typename K, typename V> bool super_chunk(const tile & t, int64_t super) {
    const ls_att_plan & p    = *t.p;
    const int64_t       h0   = t.group * p.G;
    const char *        keys = static_cast<const char *>(t.a->k.data) + h0 / p.rk2 * t.a->k.nb[2] + t.seq / p.rk3 * t.a->k.nb[3];
    const char *        vals = static_cast<const char *>(t.a->v.data) + h0 / p.rv2 * t.a->v.nb[2] + t.seq / p.rv3 * t.a->v.nb[3];
    const int64_t       ks = static_cast<int64_t>(t.a->k.nb[1]), vs = static_cast<int64_t>(t.a->v.nb[1]);
    const int64_t       end = (super + 1) * LS_ATT_SUPER < p.n_kv ? (super + 1) * LS_ATT_SUPER : p.n_kv;
    bool                any = false;

    for (int64_t key0 = super * LS_ATT_SUPER; key0 < end; key0 += B) {
        const int64_t n = end - key0 < B ? end - key0 : B;
        if (key0 + B > t.hole) {
            numbered_block<K, V>(t, key0, keys, ks, vals, vs, any);
            continue;
        }
        int64_t g0, g1;
        visible_groups(t, key0, n, &g0, &g1);
        if (g0 >= g1) {
            continue;
        }
        if (!any) {
            any = true;
            begin_rows(t);
        }
        ahead next_k, next_v;
        if (key0 + 2 * B <= p.n_kv) {
            next_k = { t.lines, reinterpret_cast<uintptr_t>(keys + (key0 + B) * ks), t.n_lines_k };
            next_v = { t.lines + t.n_lines_k, reinterpret_cast<uintptr_t>(vals + (key0 + B) * vs), t.n_lines_v };
        }
        block<K, V>(t, key0, n, g0, g1, keys + key0 * ks, ks, vals + key0 * vs, vs, next_k, next_v);
    }
    return any;
}

// The sum of a row's 16 lanes, in one order.
float sum_lanes(const float * lanes) {
    float x[LS_ATT_LANES];
    __builtin_memcpy(x, lanes, sizeof x);
    for (int half = LS_ATT_LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            x[i] += x[i + half];
        }
    }
    return x[0];
}

// Merges a super-chunk's acc, m and l into the total's. A row that saw none of its keys (l == 0) is left as it is.
void merge(float * total, float * total_m, float * total_l, const float * acc, float m, float l, int64_t DVp) {
    if (l == 0.0f) {
        return;
    }
    const float now = m > *total_m ? m : *total_m;
    const float old = exp2_of(*total_m - now), add = exp2_of(m - now);
    const vf    vo = v_set1(old), va = v_set1(add), zero = v_set1(0.0f);
    for (int64_t d = 0; d < DVp; d += W) {
        // + 0 turns -0 into 0: whether a zero sum has a sign may hang on hidden keys.
        v_store(total + d, v_fma(v_add(v_load(acc + d), zero), va, v_mul(v_load(total + d), vo)));
    }
    *total_l = __builtin_fmaf(l, add, *total_l * old);
    *total_m = now;
}

// Applies the sink, divides, and writes row r of the tile.
void finish_row(const tile & t, int64_t r, float * total, float m, float l) {
    float factor = 1.0f;
    const float sink   = t.a->sinks ? t.a->sinks[t.head(r)] * LOG2E : -__builtin_inff();
    if (sink > -__builtin_inff()) {
        const float now  = sink > m ? sink : m;
        factor           = exp2_of(m - now);
        l                = __builtin_fmaf(l, factor, exp2_of(sink - now));
    }
    float * dst = reinterpret_cast<float *>(static_cast<char *>(t.a->dst) + t.head(r) * t.a->nb_dst[1] + t.query(r) * t.a->nb_dst[2] +
                                            t.seq * t.a->nb_dst[3]);
    for (int64_t d = 0; d < t.p->DV; d++) {
        dst[d] = l == 0.0f ? 0.0f : total[d] * factor / l;
    }
}

// How many bytes a row of n elements takes.
int64_t row_bytes(int type, int64_t n) {
    return type == LS_ATT_F32 ? row_f32::bytes(n) : type == LS_ATT_F16 ? row_f16::bytes(n) : row_q8_0::bytes(n);
}

// Where the lines of a block lie, for tile::lines.
int64_t block_lines(const ls_att_tensor & x, int type, int32_t * lines) {
    const bool aligned = (reinterpret_cast<uintptr_t>(x.data) | x.nb[1] | x.nb[2] | x.nb[3]) % 64 == 0;
    return list_lines(B, row_bytes(type, x.ne[0]), static_cast<int64_t>(x.nb[1]), aligned, lines);
}

typedef bool (*super_fn)(const tile &, int64_t);
template <typename K> super_fn super_of(int v_type) {
    return v_type == LS_ATT_F32 ? super_chunk<K, row_f32> : v_type == LS_ATT_F16 ? super_chunk<K, row_f16> : super_chunk<K, row_q8_0>;
}

// Threads take units of work from a counter; units that go through memory are merged after a barrier.
void run(const ls_attention_args * a, int ith, int nth, void * scratch, ls_att_barrier barrier, void * ctx) {
    ls_att_plan p;
    ls_att_make_plan(a, nth, &p);
    const super_fn super = a->k_type == LS_ATT_F32   ? super_of<row_f32>(a->v_type)
                           : a->k_type == LS_ATT_F16 ? super_of<row_f16>(a->v_type)
                                                     : super_of<row_q8_0>(a->v_type);

    char * const    from    = static_cast<char *>(scratch);
    float * const   base    = reinterpret_cast<float *>(from + (64 - reinterpret_cast<uintptr_t>(from) % 64) % 64);
    int64_t * const counter = reinterpret_cast<int64_t *>(base);
    float * const   mine    = base + p.o_threads + ith * p.per_thread;
    float * const   state   = mine + p.o_state;

    tile t;
    t.a       = a;
    t.p       = &p;
    t.kt      = mine + p.o_kt;
    t.v32     = mine + p.o_v;
    t.q       = mine + p.o_q;
    t.s       = mine + p.o_s;
    t.mask    = t.s + p.tile * B;
    t.lanes   = state;
    t.m       = state + p.tile * 16;
    t.rescale = state + p.tile * 17;
    t.slope   = state + p.tile * 18;
    t.q_one    = mine + p.o_q_one;
    t.k_rows   = reinterpret_cast<char *>(mine + p.o_k_rows);
    t.v_rows   = reinterpret_cast<char *>(mine + p.o_v_rows);
    t.mask_row = reinterpret_cast<uint16_t *>(mine + p.o_mask_row);
    int32_t * const lines = reinterpret_cast<int32_t *>(mine + p.o_lines);
    t.lines               = lines;
    t.n_lines_k           = block_lines(a->k, a->k_type, lines);
    t.n_lines_v           = block_lines(a->v, a->v_type, lines + t.n_lines_k);
    float * const total_m = state + p.tile * 19;
    float * const total_l = state + p.tile * 20;
    float * const total   = mine + p.o_total;

    if (ith == 0) {
        __atomic_store_n(counter, 0, __ATOMIC_RELEASE);
    }
    if (nth > 1) {
        barrier(ctx);
    }

    int64_t packed = -1; // which tile's queries lie in t.q
    for (;;) {
        const int64_t unit = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
        if (unit >= p.n_unit) {
            break;
        }
        // Groups side by side, so that threads read neighbouring memory; late tiles first, since they see the most keys.
        const int64_t heads = p.n_group * p.n_seq, cut = unit / heads, head = unit % heads;
        const int64_t n_cut = p.split ? p.n_super : 1;
        const int64_t tile  = p.n_tile - 1 - cut / n_cut;
        t.group             = head % p.n_group;
        t.seq               = head / p.n_group;
        t.row0              = tile * p.tile;
        t.rows              = p.rows - t.row0 < p.tile ? p.rows - t.row0 : p.tile;
        if (packed != head * p.n_tile + tile) {
            packed = head * p.n_tile + tile;
            pack_queries(t);
            t.hole = NO_HOLE;
            for (int64_t r = 0; r < t.rows; r++) {
                if (r == 0 || t.mask_row_of(r) != t.mask_row_of(r - 1)) {
                    const int64_t hole = hole_of(t.mask_row_of(r), p.n_kv);
                    t.hole             = hole < t.hole ? hole : t.hole;
                }
            }
        }
        if (p.split) {
            const int64_t s     = cut % n_cut;
            float *       first = base + p.o_partials + ((head * p.rows + t.row0) * p.n_super + s) * p.partial;
            t.acc               = first;
            t.acc_stride        = p.n_super * p.partial;
            const bool any      = super(t, s);
            for (int64_t r = 0; r < t.rows; r++) {
                float * state_of = first + r * t.acc_stride + p.DVp;
                state_of[0]      = any ? t.m[r] : 0.0f;
                state_of[1]      = any ? sum_lanes(t.lanes + r * LS_ATT_LANES) : 0.0f;
            }
            continue;
        }
        t.acc        = mine + p.o_acc;
        t.acc_stride = p.DVp;
        for (int64_t r = 0; r < t.rows; r++) {
            total_m[r] = -__builtin_inff();
            total_l[r] = 0.0f;
        }
        __builtin_memset(total, 0, t.rows * p.DVp * sizeof(float));
        for (int64_t s = 0; s < p.n_super; s++) {
            if (!super(t, s)) {
                continue;
            }
            for (int64_t r = 0; r < t.rows; r++) {
                merge(total + r * p.DVp, total_m + r, total_l + r, t.acc + r * p.DVp, t.m[r], sum_lanes(t.lanes + r * LS_ATT_LANES), p.DVp);
            }
        }
        for (int64_t r = 0; r < t.rows; r++) {
            finish_row(t, r, total + r * p.DVp, total_m[r], total_l[r]);
        }
    }
    if (!p.split) {
        return;
    }

    if (nth > 1) {
        barrier(ctx);
    }
    const int64_t all = p.n_group * p.n_seq * p.rows;
    for (int64_t row = all * ith / nth; row < all * (ith + 1) / nth; row++) {
        const float * part = base + p.o_partials + row * p.n_super * p.partial;
        float         m = -__builtin_inff(), l = 0.0f;
        __builtin_memset(total, 0, p.DVp * sizeof(float));
        for (int64_t s = 0; s < p.n_super; s++, part += p.partial) {
            merge(total, &m, &l, part, part[p.DVp], part[p.DVp + 1], p.DVp);
        }
        t.group = row / p.rows % p.n_group;
        t.seq   = row / p.rows / p.n_group;
        t.row0  = row % p.rows;
        finish_row(t, 0, total, m, l);
    }
}
