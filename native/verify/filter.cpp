#include "filter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace localspec {

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

bool before(const Candidate & a, const Candidate & b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

}  // namespace

int64_t Kept::find(int32_t token) const {
    if (ids == nullptr) return token;
    const int32_t * at = std::find(ids, ids + n, token);
    return at == ids + n ? -1 : at - ids;
}

const float * Filter::penalised(const float * row, int64_t n_vocab, const Block & s, const int32_t * history,
                                int64_t n_history, const int32_t * drafted, int64_t n_drafted) {
    if (!s.needs_history()) return row;
    const int64_t all = n_history + n_drafted;
    const int64_t n = s.penalty_last_n < 0 ? all : std::min(all, s.penalty_last_n);
    const int64_t from_history = std::max<int64_t>(0, n - n_drafted);
    window_.assign(history + n_history - from_history, history + n_history);
    window_.insert(window_.end(), drafted + n_drafted - (n - from_history), drafted + n_drafted);
    std::sort(window_.begin(), window_.end());

    row_.resize(n_vocab);
    std::memcpy(row_.data(), row, n_vocab * sizeof(float));
    const float repeat = static_cast<float>(s.repeat_penalty);
    const float frequency = static_cast<float>(s.frequency_penalty);
    const float presence = static_cast<float>(s.presence_penalty);
    for (size_t i = 0, next; i < window_.size(); i = next) {
        for (next = i; next < window_.size() && window_[next] == window_[i]; next++) {
        }
        const int32_t id = window_[i];
        if (id < 0 || id >= n_vocab) continue;  // the history may hold tokens that this vocabulary lacks
        float x = row_[id];
        x = x > 0 ? x / repeat : x * repeat;
        row_[id] = x - (static_cast<float>(next - i) * frequency + presence);
    }
    return row_.data();
}

bool Filter::largest(const float * row, int64_t n_vocab, float & top, int32_t & id) {
    maxima_.resize((n_vocab + kChunk - 1) / kChunk);
    kernels().chunk_max(row, n_vocab, maxima_.data());
    const auto chunk = std::max_element(maxima_.begin(), maxima_.end());  // the first of equals
    top = *chunk;
    if (!std::isfinite(top)) return false;
    int64_t at = (chunk - maxima_.begin()) * kChunk;
    while (row[at] != top) at++;
    id = static_cast<int32_t>(at);
    return true;
}

bool Filter::first(const float * row, int64_t n_vocab, int64_t k, float & top) {
    int32_t id;
    if (!largest(row, n_vocab, top, id)) return false;
    select(row, n_vocab, k, top, kNothing);
    return true;
}

// Into ranked_: the first k of the row by rank, those with logit - top below `floor` left out. Needs maxima_ of this row.
void Filter::select(const float * row, int64_t n_vocab, int64_t k, double top, double floor) {
    // k chunks have a maximum of at least `lowest`, so at least k logits have: the first k by rank are among those.
    float lowest = kNothing;
    if (k < static_cast<int64_t>(maxima_.size())) {
        sorted_maxima_ = maxima_;
        std::nth_element(sorted_maxima_.begin(), sorted_maxima_.begin() + (k - 1), sorted_maxima_.end(), std::greater<float>());
        lowest = sorted_maxima_[k - 1];
    }
    ranked_.clear();
    for (size_t c = 0; c < maxima_.size(); c++) {
        if (!(maxima_[c] >= lowest && maxima_[c] - top >= floor)) continue;
        const int64_t end = std::min<int64_t>(n_vocab, (c + 1) * kChunk);
        for (int64_t i = c * kChunk; i < end; i++) {
            if (row[i] >= lowest && row[i] > kNothing && row[i] - top >= floor) {
                ranked_.push_back({row[i], static_cast<int32_t>(i)});
            }
        }
    }
    if (static_cast<int64_t>(ranked_.size()) > k) {
        std::nth_element(ranked_.begin(), ranked_.begin() + k, ranked_.end(), before);
        ranked_.resize(k);
    }
    std::sort(ranked_.begin(), ranked_.end(), before);
}

bool Filter::keep(const float * row, int64_t n_vocab, const Block & s, Kept & kept) {
    const Kernels & use = kernels();
    float top_logit;
    int32_t top_id;
    if (!largest(row, n_vocab, top_logit, top_id)) return false;
    const double top = top_logit;
    const double inverse = 1.0 / std::max(s.temperature, 1e-30);
    const bool limited = s.top_k > 0 && s.top_k < n_vocab;
    if (!limited && s.top_p >= 1.0 && s.min_p <= 0.0) {
        weights_.resize(n_vocab);
        const double total = use.weights(row, n_vocab, top, inverse, weights_.data());
        kept = {nullptr, weights_.data(), n_vocab, total};
        return true;
    }

    const double floor = s.min_p > 0.0 ? use.log(s.min_p) : -std::numeric_limits<double>::infinity();
    int64_t n;
    if (limited) {
        select(row, n_vocab, s.top_k, top, -std::numeric_limits<double>::infinity());
        n = static_cast<int64_t>(ranked_.size());
        if (s.top_p < 1.0) n = top_p_prefix(top, s.top_p, nullptr);
        while (n > 1 && !(ranked_[n - 1].logit - top >= floor)) n--;
    } else if (s.top_p >= 1.0) {
        select(row, n_vocab, n_vocab, top, floor);
        n = static_cast<int64_t>(ranked_.size());
    } else {
        weights_.resize(n_vocab);
        const double total = use.weights(row, n_vocab, top, 1.0, weights_.data());
        const double enough = reach(row, n_vocab, top, s.top_p * total);
        select(row, n_vocab, n_vocab, top, std::max(floor, enough));
        n = top_p_prefix(top, s.top_p, &total);
        if (n == static_cast<int64_t>(ranked_.size()) && enough > floor) {  // perhaps short of it by a rounding error
            select(row, n_vocab, n_vocab, top, floor);
            n = top_p_prefix(top, s.top_p, &total);
        }
    }

    gather(n);
    use.weights(logits_.data(), n, top, inverse, weights_.data());
    double total = 0.0;
    for (int64_t i = 0; i < n; i++) total += weights_[i];
    kept = {ids_.data(), weights_.data(), n, total};
    return true;
}

// A bound on logit - top above which weights_ sum up to `sum`, but for rounding: what lies below need not be ranked. By a
// histogram of the weights over the distance from the largest logit, and one bin more than enough.
double Filter::reach(const float * row, int64_t n_vocab, double top, double sum) const {
    constexpr int kBins = 512;
    constexpr double kPerUnit = 8.0;
    double bins[kBins] = {};
    for (int64_t i = 0; i < n_vocab; i++) {
        if (!(weights_[i] > 0.0)) continue;  // -inf, NaN, or too far away to count
        bins[std::min(static_cast<int>((top - row[i]) * kPerUnit), kBins - 1)] += weights_[i];
    }
    double running = 0.0;
    for (int b = 0; b + 2 < kBins; b++) {
        running += bins[b];
        if (running >= sum) return -(b + 2) / kPerUnit;
    }
    return -std::numeric_limits<double>::infinity();
}

// Logits and ids of the first n candidates as arrays.
void Filter::gather(int64_t n) {
    logits_.resize(n);
    ids_.resize(n);
    if (static_cast<int64_t>(weights_.size()) < n) weights_.resize(n);
    for (int64_t i = 0; i < n; i++) {
        logits_[i] = ranked_[i].logit;
        ids_[i] = ranked_[i].id;
    }
}

// How many of ranked_ it takes to reach top_p of the sum of weights at temperature 1; that sum is theirs where null.
int64_t Filter::top_p_prefix(double top, double top_p, const double * total) {
    const int64_t n = static_cast<int64_t>(ranked_.size());
    gather(n);
    kernels().weights(logits_.data(), n, top, 1.0, weights_.data());
    double sum = 0.0;
    if (total == nullptr) {
        for (int64_t i = 0; i < n; i++) sum += weights_[i];
    } else {
        sum = *total;
    }
    double running = 0.0;
    for (int64_t i = 0; i < n; i++) {
        running += weights_[i];
        if (running >= top_p * sum) return i + 1;
    }
    return n;
}

}  // namespace localspec
