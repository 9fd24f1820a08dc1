// The network of a DFlash draft, and of DSpark, which is one with two more heads.
//
// Several layers draft a block at once. Behind the n tokens whose hidden states the target has given (positions 0 ... n - 1)
// stands the block: the pending token at n, the anchor, then a mask for each further place. Keys and values of the first n
// are not computed from tokens: the target's taps, fused by one matrix and normalised, take the place of a layer's input,
// in every layer alike (`inject`, once per accepted token). The block's rows are embeddings; each sees the injected rows and all
// rows of its block, both ways. A mask's row predicts the token of its own place; where a draft samples from the anchor, every
// row predicts the token after it, and the block is one row shorter. The keys of a block lie in the cache behind the injected ones
// until the next `inject` overwrites them. llama.cpp's graph of the same network is src/models/dflash.cpp.
//
// A Markov head adds W2 W1[previous token] to a place's logits, so tokens are chosen one after another; a confidence head
// says from the place's hidden state and W1[previous token] how likely it is to be kept.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "cache.h"
#include "matrix.h"
#include "team.h"

namespace ls::draft {

struct BlockShape {
    int64_t n_embd = 0, n_in = 0;  // of the draft; of the taps laid one after another
    int64_t n_head = 0, n_head_kv = 0, head_size = 0, n_ff = 0, n_rot = 0, n_layer = 0;
    int64_t n_draft_vocab = 0, n_tokens = 0;  // of the head; of the embedding
    int64_t mask = 0;                         // the mask's token
    int64_t rank = 0;                         // of the Markov head, 0: none
    bool causal = false, from_anchor = false;
    float eps = 0, rope_base = 0;
};

struct LayerWeights {
    Stored q, k, v, o, gate, up, down;
    const float *norm_in = nullptr, *norm_q = nullptr, *norm_k = nullptr, *norm_ffn = nullptr;
    int64_t window = 0;  // positions that attention sees back from a row, itself included; 0: all
};

struct BlockWeights {
    std::vector<LayerWeights> layers;
    Stored fc, head, embedding, markov_first, markov_second;
    const float *norm_taps = nullptr, *norm_output = nullptr, *rope_factors = nullptr;
    const float *sure = nullptr, *sure_bias = nullptr;  // [n_embd + rank], [1]; sure == nullptr: no confidence head
};

// Drafts for m different slots: anchors at `positions`, ks[i] >= 1 tokens wanted of each.
struct Anchors {
    int m = 0;
    const int32_t *slots = nullptr, *positions = nullptr, *tokens = nullptr, *ks = nullptr;
};

class DFlash {
   public:
    // The embedding and the Markov head's first matrix are read in place for as long as this lives; everything else is
    // copied. Throws std::bad_alloc.
    DFlash(const BlockShape &shape, const BlockWeights &weights, const Kernels *kernels, int n_slots, int n_threads);
    ~DFlash();

    const BlockShape &shape() const { return shape_; }
    int n_slots() const { return static_cast<int>(slots_.size()); }
    bool has_markov() const { return shape_.rank > 0; }
    bool has_confidence() const { return !sure_.empty(); }

    // Keys and values of the target's rows at positions first ... of a slot; taps[n][n_in].
    void inject(int slot, int64_t first, const float *taps, int64_t n);

    // Of every drafted place, block after block: the logits before any Markov head, [sum of ks][n_draft_vocab], and the
    // states behind the last norm, [sum of ks][n_embd]. Positions before an anchor's must have been injected.
    void block(const Anchors &anchors, float *logits, float *hidden);

    // Adds the Markov head's part to n rows of logits, given the token before each; confidence[n] from hidden[n][n_embd],
    // NaN without such a head. Changes nothing without a Markov head.
    void lean(int64_t n, const int32_t *previous, const float *hidden, float *logits, float *confidence);

    // The likeliest tokens, ending where the confidence (the head's, or the likeliest token's probability) falls below p_min.
    // Tokens (as draft ids translated by ids) and confidences are [m][k_most], counts[m].
    void greedy(const Anchors &anchors, int k_most, float p_min, const int32_t *ids, int32_t *out, float *confidence,
                int32_t *counts);

   private:
    struct Layer;
    struct Scratch;  // of one thread
    struct Block {
        int slot;
        int64_t position, first, n;     // of the anchor; of its first row among all, and its rows
        int64_t wanted;                 // its first drafted place among all
    };
    struct To {
        const Matrix *matrix;
        float *data;
        int64_t stride;
    };

    int64_t plan(const Anchors &anchors);
    void forward(int ith, const Anchors &anchors, float *hidden);
    void attend(int ith, Layer &layer, const Block &block, int64_t head);
    void product(int ith, const float *in, int64_t k, int64_t n, std::initializer_list<To> to);
    void lean_by(int ith, int64_t n, const int32_t *previous, const float *const *hidden, float *const *logits,
                 float *confidence);

    BlockShape shape_;
    const Kernels *kernels_;
    std::vector<Layer> layers_;
    Matrix fc_, head_, markov_second_;
    Stored embedding_, markov_first_;
    std::vector<float> norm_taps_, norm_output_, sure_;
    float sure_bias_ = 0;
    Rope rope_;
    std::vector<std::vector<KeyValues>> slots_;  // [slot][layer]
    Team team_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
    // What the threads of a block share, for all its rows.
    std::vector<Block> blocks_;
    int64_t n_rows_ = 0;
    std::vector<float> cosines_, sines_, residual_, normed_, qkv_, mixed_, projected_, gates_, hidden_, logits_, final_, bias_;
};

}  // namespace ls::draft
