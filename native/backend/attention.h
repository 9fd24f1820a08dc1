// Attention over a KV cache with one fixed order of operations per query row.
//
// The operation is ggml's GGML_OP_FLASH_ATTN_EXT: for each query row, softmax(scale * q.K + mask) V, with ALiBi slopes, soft-capping,
// attention sinks and grouped query heads. What is ours is the promise that a row's bits depend on nothing but that row's query,
// the keys and values it may see and their places in the cache: not on the number of queries or threads, not on how much masked padding
// follows, and not on the instruction set (every vector kernel does the same fused multiply-adds in the same order; the portable one too).
//
// Places are counted from the start of the cache, but within the last LS_ATT_TAIL cells up to the last that a row sees, from the first
// one there that it sees, hidden cells don't count: the tokens of a draft tree lie behind one another, branch after branch, and each
// one's row is that of the same tokens in a chain.
//
// This header knows nothing of ggml: the caller copies the tensors' shapes and strides into ls_attention_args.
#ifndef LS_ATTENTION_H
#define LS_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Element types of keys and values, with ggml's numbers.
enum { LS_ATT_F32 = 0, LS_ATT_F16 = 1, LS_ATT_Q8_0 = 8 };

// A tensor: element counts and byte strides, innermost first. Rows (dimension 0) are contiguous, the rest may be strided.
typedef struct ls_att_tensor {
    const void * data;
    int64_t      ne[4];
    size_t       nb[4];
} ls_att_tensor;

typedef struct ls_attention_args {
    ls_att_tensor q;     // f32 [DK, n_q, n_head, n_seq]
    ls_att_tensor k;     // k_type [DK, n_kv, n_head_k, n_seq_k]
    ls_att_tensor v;     // v_type [DV, n_kv, n_head_v, n_seq_v]
    ls_att_tensor mask;  // f16 [>= n_kv, >= n_q, divides n_head, divides n_seq]; all zero: every key is visible
    const float * sinks; // f32 [n_head] or NULL: one logit per head that takes probability and gives no value
    void *        dst;   // f32 [DV, n_head, n_q, n_seq], note the order
    size_t        nb_dst[4];
    int           k_type, v_type;
    float         scale;         // of q.k
    float         max_bias;      // > 0: ALiBi, the mask is multiplied by the head's slope
    float         logit_softcap; // != 0: logits become cap * tanh(logit / cap)
} ls_attention_args;

// Called by every one of the nth threads; returns when all of them have called it.
typedef void (*ls_att_barrier)(void * ctx);

// One instruction set's kernel. `run` as ls_attention_run below.
typedef struct ls_attention_kernel {
    const char * name;
    void (*run)(const ls_attention_args * a, int ith, int nth, void * scratch, ls_att_barrier barrier, void * ctx);
} ls_attention_kernel;

// The kernels that this build has and this CPU can run, best first: "avx512", "avx2", "neon", "portable". NULL past the last one.
const ls_attention_kernel * ls_attention_kernel_at(int i);
const ls_attention_kernel * ls_attention_kernel_named(const char * name);

// Whether the arguments are ones that ls_attention_run handles. Looks at shapes, strides and types, not at data.
bool ls_attention_supported(const ls_attention_args * a);

// Bytes of scratch (any alignment) for a run by up to n_threads threads, shared by all of them.
size_t ls_attention_scratch(const ls_attention_args * a, int n_threads);

// Computes dst with the best kernel. Called by nth threads at once with ith = 0..nth-1 and the same other arguments. The barrier may be
// NULL when nth is 1. The scratch needs no initial value; it and dst may be used again once every thread has returned.
void ls_attention_run(const ls_attention_args * a, int ith, int nth, void * scratch, ls_att_barrier barrier, void * ctx);

// The slow readable twin: the same function in double precision, one row after the other, by one thread.
void ls_attention_reference(const ls_attention_args * a);

#ifdef __cplusplus
}
#endif
#endif
