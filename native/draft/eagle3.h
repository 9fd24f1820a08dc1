// The network of an EAGLE-3 draft (Li et al., 2025), for decoding one token after another as fast as a CPU can.
//
// One decoder layer stands on two inputs: the embedding of a token and a state g. A pair at position P is (token[P+1], g[P]),
// and predicts token[P+2]; g[P] is fc(taps of the target at P), or, while drafting, the layer's own output one pair before.
// Only keys and values of a pair are needed by later ones, so pairs of accepted tokens cost two small products (`extend`);
// the whole layer and the head run for drafted tokens alone (`step`). llama.cpp's graph of the same network is
// src/models/eagle3.cpp; the tests hold the two against each other.
#pragma once

#include <memory>
#include <vector>

#include "cache.h"
#include "matrix.h"
#include "team.h"

namespace ls::draft {

struct Shape {
    int64_t n_embd = 0, n_in = 0;  // of the draft; of the taps laid one after another
    int64_t n_head = 0, n_head_kv = 0, head_size = 0, n_ff = 0, n_rot = 0;
    int64_t n_draft_vocab = 0, n_tokens = 0;  // of the head; of the embedding
    int64_t window = 0;                       // positions that attention sees, 0: all
    float eps = 0, rope_base = 0;
    bool norm_before_residual = false, norm_before_fc = false;
};

// Tensors as stored; rows == 0 where the file has none.
struct Weights {
    Stored fc, q, k, v, o, gate, up, down, head, embedding;
    const float *norm_taps = nullptr, *norm_embedding = nullptr, *norm_state = nullptr, *norm_ffn = nullptr,
                *norm_output = nullptr, *rope_factors = nullptr;
};

class Eagle3 {
   public:
    // The embedding is read in place for as long as this lives; everything else is copied. Throws std::bad_alloc.
    Eagle3(const Shape &shape, const Weights &weights, const Kernels *kernels, int n_slots, int n_threads);

    ~Eagle3();

    const Shape &shape() const { return shape_; }
    int n_slots() const { return static_cast<int>(slots_.size()); }
    int n_threads() const { return team_.size(); }

    // g[n][n_embd] of taps[n][n_in].
    void fuse(const float *taps, int64_t n, float *g);

    // Keys and values of n pairs at positions first ... of a slot.
    void extend(int slot, int64_t first, const int32_t *tokens, const float *g, int64_t n);

    // One pair for each of m different slots: logits[m][n_draft_vocab] and the states[m][n_embd] that the next pairs take.
    // Positions before a pair's must have been given to `extend` or `step`.
    void step(int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *g, float *states,
              float *logits);

    // As `step` for m places of a tree in one slot, whose root is the pair at position `base`, given to `step` before. Node
    // numbers are the caller's, below kMostNodes; a parent, -1 for the root, has a lower one and was given in an earlier call.
    // Leaves the slot's pairs up to `base` as they were; what lay behind them is lost.
    void branch(int slot, int64_t base, int m, const int32_t *nodes, const int32_t *parents, const int32_t *tokens,
                const float *g, float *states, float *logits);

    static constexpr int kMostNodes = 256;

    // The same as a chain: the likeliest token, then the pair of it, up to ks[i] times, ending where its probability falls
    // below p_min. Tokens (as draft ids translated by ids) and probabilities are [m][k_most], counts[m].
    void greedy(int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *g, const int32_t *ks,
                int k_most, float p_min, const int32_t *ids, int32_t *out, float *probs, int32_t *counts);

   private:
    struct Scratch;  // of one thread

    struct Places;   // of a tree, that some columns stand for

    // Layer and head for m pairs, their slots' room made; `nodes`: the places of a tree that they stand for, or null.
    void rows(int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *g, float *states,
              float *logits, const int32_t *nodes);
    void layer(int ith, int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *const *g,
               float *const *states, const Places *places = nullptr);
    void attend(Scratch &mine, int c, int64_t head, int slot, int64_t position);

    Shape shape_;
    const Kernels *kernels_;
    Matrix fc_, q_, k_, v_, o_, gate_, up_, down_, head_;
    Stored embedding_;
    std::vector<float> norm_taps_, norm_embedding_, norm_state_, norm_ffn_, norm_output_;
    Rope rope_;
    std::vector<KeyValues> slots_;
    Team team_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
    // What the threads of a step share, for up to 8 columns.
    std::vector<float> qkv_, mixed_, projected_, hidden_, lowered_, state_, logits_;
    std::vector<float> tops_;         // per thread and column: the largest logit
    std::vector<int64_t> top_ids_;    // and where it is
    std::vector<float> node_keys_;    // [node][2][kv]: key and value of each node of a tree
    std::vector<int32_t> node_parents_;
};

}  // namespace ls::draft
