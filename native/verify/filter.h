// One row of logits: penalties, filters, and what is left of it. In llama.cpp's order: penalties, top-k, top-p, min-p,
// temperature.
#pragma once

#include <cstdint>
#include <vector>

#include "accept.h"

namespace localspec {

struct Candidate {
    float logit;
    int32_t id;
};

// What is left of a row: ids by rank (null: all of them, by id) and weights exp((logit - max) / T), not normalised.
struct Kept {
    const int32_t * ids;
    double * weights;
    int64_t n;
    double total;

    int32_t id(int64_t i) const { return ids == nullptr ? static_cast<int32_t>(i) : ids[i]; }
    int64_t find(int32_t token) const;  // its index, -1 where the filters removed it
};

// A thread's working memory and the steps that use it. Each method overwrites what it returned before.
class Filter {
public:
    // The row after penalties for the last of `history` followed by `drafted`; the row itself where none is on.
    const float * penalised(const float * row, int64_t n_vocab, const Block & s, const int32_t * history, int64_t n_history,
                            const int32_t * drafted, int64_t n_drafted);

    // Largest logit of a row and the lowest id that has it. False where it is not finite.
    bool largest(const float * row, int64_t n_vocab, float & top, int32_t & id);

    // Into `ranked`: the first k of the row by rank (k at most n_vocab; fewer where others are no numbers). False where the
    // largest logit is not finite.
    bool first(const float * row, int64_t n_vocab, int64_t k, float & top);
    const std::vector<Candidate> & ranked() const { return ranked_; }

    // Filter a penalised row, for temperature > 0. False where the largest logit is not finite.
    bool keep(const float * row, int64_t n_vocab, const Block & s, Kept & kept);

    std::vector<double> residual;
    std::vector<Candidate> pairs;  // (probability, id), by id

private:
    void select(const float * row, int64_t n_vocab, int64_t k, double top, double floor);
    double reach(const float * row, int64_t n_vocab, double top, double sum) const;
    void gather(int64_t n);
    int64_t top_p_prefix(double top, double top_p, const double * total);

    std::vector<float> row_;
    std::vector<int32_t> window_;
    std::vector<float> maxima_, sorted_maxima_;
    std::vector<Candidate> ranked_;
    std::vector<float> logits_;
    std::vector<int32_t> ids_;
    std::vector<double> weights_;
};

}  // namespace localspec
