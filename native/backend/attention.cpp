// What all attention kernels share: the choice of kernel, the checks, the plan of a call.
#include "attention.h"

#include "attention_plan.h"

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t TILE_FLOATS   = 36864;     // about what a tile's queries and sums may take: 144 KiB, well inside any L2
constexpr int64_t PARTIAL_BYTES = 32 << 20;  // the most that partial results may take
constexpr int     UNITS_EACH    = 4;         // units of work per thread that let a delayed thread do less

int64_t align16(int64_t floats) {
    return (floats + 15) / 16 * 16;
}

int64_t gcd(int64_t a, int64_t b) {
    return b == 0 ? a : gcd(b, a % b);
}

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

bool kv_type_ok(int type, int64_t n, size_t nb0) {
    switch (type) {
        case LS_ATT_F32:  return nb0 == 4;
        case LS_ATT_F16:  return nb0 == 2;
        case LS_ATT_Q8_0: return nb0 == 34 && n % 32 == 0;
        default:          return false;
    }
}

struct choice {
    const ls_attention_kernel * kernel[4] = {};
    choice() {
        int n = 0;
#if defined(__x86_64__) || defined(_M_X64)
        __builtin_cpu_init();
        // GCC and clang ask the system, too: without its support for the wide registers these are false.
        if (ls_att_avx512() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            kernel[n++] = ls_att_avx512();
        }
        if (ls_att_avx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
            kernel[n++] = ls_att_avx2();
        }
#elif defined(__aarch64__)
        if (ls_att_neon()) {
            kernel[n++] = ls_att_neon();
        }
#endif
        kernel[n++] = ls_att_portable();
    }
};

const choice & chosen() {
    static const choice c;
    return c;
}

} // namespace

extern "C" const ls_attention_kernel * ls_attention_kernel_at(int i) {
    return i >= 0 && i < 4 ? chosen().kernel[i] : nullptr;
}

extern "C" const ls_attention_kernel * ls_attention_kernel_named(const char * name) {
    for (const auto * k : chosen().kernel) {
        if (k && std::strcmp(k->name, name) == 0) {
            return k;
        }
    }
    return nullptr;
}

extern "C" float ls_att_slope(const ls_attention_args * a, int64_t head) {
    if (!(a->max_bias > 0)) {
        return 1;
    }
    int64_t n = 1;
    while (2 * n <= a->q.ne[2]) {
        n *= 2;
    }
    const float m0 = std::pow(2.0f, -a->max_bias / n);
    const float m1 = std::pow(2.0f, -a->max_bias / 2 / n);
    return head < n ? std::pow(m0, static_cast<float>(head + 1)) : std::pow(m1, static_cast<float>(2 * (head - n) + 1));
}

extern "C" bool ls_attention_supported(const ls_attention_args * a) {
    const auto & q = a->q;
    const auto & k = a->k;
    const auto & v = a->v;
    for (int i = 0; i < 4; i++) {
        if (q.ne[i] < 1 || k.ne[i] < 1 || v.ne[i] < 1) {
            return false;
        }
    }
    if (q.nb[0] != 4 || !kv_type_ok(a->k_type, k.ne[0], k.nb[0]) || !kv_type_ok(a->v_type, v.ne[0], v.nb[0])) {
        return false;
    }
    // Rows of f32 are read in place, those of f16 and q8_0 too: their elements must be aligned.
    const size_t kb = a->k_type == LS_ATT_F32 ? 4 : 2, vb = a->v_type == LS_ATT_F32 ? 4 : 2;
    for (int i = 1; i < 4; i++) {
        if (q.nb[i] % 4 || k.nb[i] % kb || v.nb[i] % vb || a->nb_dst[i] % 4) {
            return false;
        }
    }
    if (k.ne[0] != q.ne[0] || k.ne[1] != v.ne[1] || k.ne[0] > 4096 || v.ne[0] > 4096) {
        return false;
    }
    if (q.ne[2] % k.ne[2] || q.ne[2] % v.ne[2] || q.ne[3] % k.ne[3] || q.ne[3] % v.ne[3]) {
        return false;
    }
    if (a->nb_dst[0] != 4) {
        return false;
    }
    if (a->mask.ne[0] == 0) { // not its data: a graph is asked about before it has memory
        return !(a->max_bias > 0);
    }
    const auto & m = a->mask;
    return m.nb[0] == 2 && m.nb[1] % 2 == 0 && m.ne[0] >= k.ne[1] && m.ne[1] >= q.ne[1] && m.ne[2] >= 1 && m.ne[3] >= 1 &&
           q.ne[2] % m.ne[2] == 0 && q.ne[3] % m.ne[3] == 0;
}

extern "C" void ls_att_make_plan(const ls_attention_args * a, int nth, ls_att_plan * p) {
    std::memset(p, 0, sizeof *p);
    p->DK      = a->k.ne[0];
    p->DV      = a->v.ne[0];
    p->DVp     = align16(p->DV);
    p->n_kv    = a->k.ne[1];
    p->n_q     = a->q.ne[1];
    p->n_head  = a->q.ne[2];
    p->n_seq   = a->q.ne[3];
    p->rk2     = p->n_head / a->k.ne[2];
    p->rk3     = p->n_seq / a->k.ne[3];
    p->rv2     = p->n_head / a->v.ne[2];
    p->rv3     = p->n_seq / a->v.ne[3];
    p->G       = gcd(p->rk2, p->rv2);
    p->n_group = p->n_head / p->G;
    p->rows    = p->n_q * p->G;
    p->n_super = ceil_div(p->n_kv, LS_ATT_SUPER);
    p->partial = p->DVp + 16;

    int64_t most = TILE_FLOATS / (p->DK + 2 * p->DVp) / 12 * 12;
    most         = most < 12 ? 12 : most > 192 ? 192 : most;
    p->tile      = p->rows < most ? p->rows : most;
    p->n_tile    = ceil_div(p->rows, p->tile);

    // Few queries: the keys are cut, too, as far as the partial results stay small. Else smaller tiles must do.
    const int64_t heads = p->n_group * p->n_seq;
    const int64_t want  = nth > 1 ? static_cast<int64_t>(nth) * UNITS_EACH : 1;
    if (heads * p->n_tile < want && p->n_super > 1) {
        p->split = heads * p->rows * p->n_super * p->partial * 4 <= PARTIAL_BYTES;
    }
    if (!p->split) {
        while (heads * p->n_tile < want && p->tile > 12) {
            p->tile   = ceil_div(p->tile, 2);
            p->n_tile = ceil_div(p->rows, p->tile);
        }
    }
    p->n_unit = heads * p->n_tile * (p->split ? p->n_super : 1);

    int64_t at  = 0;
    auto    put = [&at](int64_t floats) {
        const int64_t here = at;
        at += align16(floats);
        return here;
    };
    p->o_kt       = put(align16(p->DK) * LS_ATT_BLOCK);
    p->o_v        = put(p->DVp * LS_ATT_BLOCK);
    p->o_q        = put(p->tile * p->DK);
    p->o_q_one    = put((p->G < p->tile ? p->G : p->tile) * p->DK);
    p->o_k_rows   = put(p->DK * LS_ATT_BLOCK);
    p->o_v_rows   = put(p->DV * LS_ATT_BLOCK);
    p->o_mask_row = put(LS_ATT_BLOCK / 2);
    p->o_s        = put(p->tile * LS_ATT_BLOCK + LS_ATT_BLOCK);
    p->o_acc      = put(p->tile * p->DVp);
    p->o_total    = put(p->tile * p->DVp);
    p->o_state    = put(p->tile * 32);
    p->o_lines    = put(LS_ATT_BLOCK * (p->DK / 16 + 2 + p->DV / 16 + 2)); // at most a line per 16 elements, and one begun and one ended
    p->per_thread = at;
    at            = 0;
    put(16);
    p->o_threads  = put(p->per_thread * nth);
    p->o_partials = put(p->split ? heads * p->rows * p->n_super * p->partial : 0);
    p->total      = at;
}

extern "C" size_t ls_attention_scratch(const ls_attention_args * a, int n_threads) {
    size_t most = 0;
    for (int n = 1; n <= n_threads; n++) {
        ls_att_plan p;
        ls_att_make_plan(a, n, &p);
        const size_t bytes = static_cast<size_t>(p.total) * 4 + 64;
        most               = bytes > most ? bytes : most;
    }
    return most;
}

extern "C" void ls_attention_run(const ls_attention_args * a, int ith, int nth, void * scratch, ls_att_barrier barrier, void * ctx) {
    ls_attention_kernel_at(0)->run(a, ith, nth, scratch, barrier, ctx);
}
