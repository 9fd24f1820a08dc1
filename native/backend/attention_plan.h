// How one call is cut into work, and where its scratch lies. Every thread computes the same plan from the same arguments. None of these
// choices can change a result, except LS_ATT_BLOCK and LS_ATT_SUPER, which fix the order of operations.
#ifndef LS_ATTENTION_PLAN_H
#define LS_ATTENTION_PLAN_H

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LS_ATT_BLOCK 64  // keys whose logits are computed, then weighted, together; blocks start at multiples of this
#define LS_ATT_SUPER 256 // keys after which a partial result is closed and merged; a multiple of LS_ATT_BLOCK
#define LS_ATT_TAIL  64  // cells, up to the last that a row sees, in which hidden ones don't count: see attention.h
#define LS_ATT_LANES 16  // partial sums of a row's weights; also the granularity at which masked keys are skipped

// A loop whose arrays are to live in registers.
#if defined(__clang__)
#define LS_UNROLL _Pragma("unroll")
#else
#define LS_UNROLL _Pragma("GCC unroll 16")
#endif

// Rows of one group are numbered query * G + head in group: neighbours share the keys they see, and the mask row.
typedef struct ls_att_plan {
    int64_t DK, DV, DVp;  // head sizes; DVp is DV rounded up to LS_ATT_LANES
    int64_t n_kv, n_q, n_head, n_seq;
    int64_t G, n_group;   // query heads that share one key head and one value head; n_head / G
    int64_t rk2, rk3, rv2, rv3; // how many query heads (sequences) share a key or value head (sequence)
    int64_t rows;         // n_q * G
    int64_t tile, n_tile; // rows worked on at once, and how many such tiles there are
    int64_t n_super;      // ceil(n_kv / LS_ATT_SUPER)
    bool    split;        // each super-chunk is a unit of work of its own; partial results go through memory
    int64_t n_unit;
    // Scratch, in floats from a 64-byte boundary: counter, then per thread the buffers below, then the partial results.
    int64_t o_kt, o_v, o_q, o_q_one, o_k_rows, o_v_rows, o_mask_row, o_s, o_acc, o_total, o_state, o_lines, per_thread; // offsets in a thread's part
    int64_t o_threads, o_partials, total;                            // offsets in the whole
    int64_t partial;                                                 // floats of one row's partial: acc[DVp], m, l, padding
} ls_att_plan;

void ls_att_make_plan(const ls_attention_args * a, int nth, ls_att_plan * p);

// ALiBi slope of a query head (Press et al., 2021, for counts that aren't powers of two as ggml does); 1 without ALiBi.
float ls_att_slope(const ls_attention_args * a, int64_t head);

// The kernels of the vector sources, NULL where the build lacks them.
const ls_attention_kernel * ls_att_avx512(void);
const ls_attention_kernel * ls_att_avx2(void);
const ls_attention_kernel * ls_att_neon(void);
const ls_attention_kernel * ls_att_portable(void);

#ifdef __cplusplus
}
#endif
#endif
