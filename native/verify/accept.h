// The core of accept and reject: rows of logits in, kept tokens out. Knows no Python. The plain twin of this code, and the
// definition of every step, is localspec/accept_reference.py.
#pragma once

#include <cstdint>

namespace localspec {

// One block (or, for draw, one row) and its sampling settings; laid out as _RECORD in localspec/accept.py packs it.
struct Block {
    uint64_t sequence;
    uint64_t position;  // absolute, of the token that the block's first row produces
    uint64_t seed;
    int64_t n_drafted;
    int64_t n_history;
    int64_t has_q;
    int64_t top_k;
    int64_t penalty_last_n;
    double temperature;
    double top_p;
    double min_p;
    double repeat_penalty;
    double presence_penalty;
    double frequency_penalty;

    bool greedy() const { return temperature <= 0.0; }
    bool needs_history() const {
        return penalty_last_n != 0 && (repeat_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0);
    }
};
static_assert(sizeof(Block) == 14 * 8, "8 bytes each, no padding");

enum Rule { kMatch, kReject };

// What every call reads. Arrays of all blocks stand one after another, in block order.
struct Input {
    const float * logits;  // [n_rows, n_vocab]
    int64_t n_rows;
    int64_t n_vocab;
    const Block * blocks;
    int64_t n_blocks;
    const int32_t * history;
    int64_t n_history;
    Rule rule;
};

struct Drafted {
    const int32_t * tokens;
    int64_t n_tokens;
    const int32_t * q_ids;  // of the blocks that have a distribution
    const float * q_probs;
    int64_t n_q;
    const int32_t * q_starts;  // n_drafted + 1 indices into q_ids for each of those blocks
    int64_t n_q_starts;
    const uint8_t * eog;  // [n_vocab] or null
};

struct Verdicts {
    int32_t * tokens;  // [n_rows] the block's kept tokens, from its first row on
    float * p_drafted;  // [n_rows] set for the rows that were judged against a drafted token
    int32_t * counts;  // [n_blocks, 3] accepted, kept, stopped by end-of-generation
};

struct Draws {
    int32_t * tokens;  // [n_rows]
    float * probs;  // [n_rows]
    int32_t * q_ids;  // null: not wanted; else room for most_kept of every row
    float * q_probs;
    int32_t * q_starts;  // [n_rows + 1]
};

constexpr int64_t kDone = -1;
constexpr int64_t kNoMemory = -2;

// Null where the arrays fit together, else what does not. Nothing below may run on input that this refuses.
const char * misfit(const Input & in, const Drafted & drafted);

// Judge every block. Returns kDone, kNoMemory, or the lowest row met whose largest logit is not finite.
int64_t verify(const Input & in, const Drafted & drafted, const Verdicts & out);

// Draw a token from every row; in.blocks has one entry per row, with nothing drafted. Returns as verify does.
int64_t draw(const Input & in, const Draws & out);

// The k largest logits of each of n_rows rows: ids by rank, their logits less the largest one, that one, and the logarithm of
// the sum of exp(logit - largest) over the whole row. Rows are judged on several threads. Returns as verify does.
struct Tops {
    int32_t * ids;  // [n_rows, k]
    float * logits;  // [n_rows, k]; -inf past the end of a row with fewer numbers
    float * largest;  // [n_rows]
    float * log_sum;  // [n_rows]
};
int64_t top_k(const float * logits, int64_t n_rows, int64_t n_vocab, int64_t k, const Tops & out);

// The most ids that a row's filtered distribution can hold.
int64_t most_kept(const Block & settings, int64_t n_vocab);

}  // namespace localspec
