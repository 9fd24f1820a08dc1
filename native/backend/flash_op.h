// The flash-attention operation of ggml's graph, handed to the kernel of attention.h.
#pragma once

#include <cstring>

#include "attention.h"
#include "barrier.h"
#include "ggml_abi.h"

namespace ls {

struct AttentionOp {
    ls_attention_args args;
    void *scratch = nullptr;

    // Reads the operation; false when the kernel can't do it.
    bool set(const Tensor *op) {
        std::memset(&args, 0, sizeof args);
        copy(op->src[0], &args.q);
        copy(op->src[1], &args.k);
        copy(op->src[2], &args.v);
        if (op->src[3]) copy(op->src[3], &args.mask);
        args.sinks = op->src[4] ? static_cast<const float *>(op->src[4]->data) : nullptr;
        args.dst = op->data;
        std::memcpy(args.nb_dst, op->nb, sizeof args.nb_dst);
        args.k_type = op->src[1]->type;
        args.v_type = op->src[2]->type;
        float f[3];
        std::memcpy(f, op->op_params, sizeof f);
        args.scale = f[0];
        args.max_bias = f[1];
        args.logit_softcap = f[2];
        return op->type == kF32 && op->src[0]->type == kF32 && (!op->src[3] || op->src[3]->type == kF16) &&
               (!op->src[4] || op->src[4]->type == kF32) && ls_attention_supported(&args);
    }

    size_t scratch_bytes(int n_threads) const { return ls_attention_scratch(&args, n_threads); }

    void run(int ith, int nth, Barrier &barrier) const {
        Context context{&barrier, nth};
        ls_attention_run(&args, ith, nth, scratch, wait, &context);
    }

   private:
    struct Context {
        Barrier *barrier;
        int nth;
    };
    static void wait(void *p) {
        const auto *const c = static_cast<Context *>(p);
        c->barrier->wait(c->nth);
    }
    static void copy(const Tensor *t, ls_att_tensor *out) {
        out->data = t->data;
        std::memcpy(out->ne, t->ne, sizeof out->ne);
        std::memcpy(out->nb, t->nb, sizeof out->nb);
    }
};

// Whether `op` is an attention that the kernel can do. Looks at types and shapes only.
inline bool is_our_attention(const Tensor *op) {
    AttentionOp a;
    return op->op == kOpFlashAttnExt && a.set(op);
}

}  // namespace ls
