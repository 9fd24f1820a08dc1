#include "accept.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <vector>

#include "filter.h"
#include "kernels.h"
#include "pool.h"
#include "random.h"

namespace localspec {

namespace {

// Working memory of each thread that ever judged a row: a few vocabularies at most.
thread_local Filter filter;

// From here on, in logits looked at (a filter or the exponentials weigh more), other threads are worth waking: about 1 ms.
constexpr double kGain = 8e6;

double work(const Block & s, int64_t n_vocab) {
    const bool limited = s.top_k > 0 && s.top_k < n_vocab;
    return static_cast<double>(n_vocab) * (s.greedy() ? 1.0 : limited ? 2.0 : 12.0);
}

bool worth_threads(const Input & in) {
    double sum = 0.0;
    for (int64_t b = 0; b < in.n_blocks; b++) sum += work(in.blocks[b], in.n_vocab) * (1 + in.blocks[b].n_drafted);
    return sum >= kGain;
}

void lower(std::atomic<int64_t> & bad, int64_t row) {
    int64_t now = bad.load();
    while ((now == kDone || (now != kNoMemory && row < now)) && !bad.compare_exchange_weak(now, row)) {
    }
}

uint64_t key_of(const Block & block, int64_t i, Stream stream) {
    return row_key(block.seed, block.sequence, block.position + static_cast<uint64_t>(i), stream);
}

// The draft distribution of one drafted token; n 0: a point mass on it.
struct Distribution {
    const int32_t * ids;
    const float * probs;
    int64_t n;
};

struct Ruling {
    float p_drafted;
    bool accepted;
    int32_t token;
};

// The token in place of a refused one: a sample of what max(p - q, 0) leaves, or of p where rounding left nothing.
int32_t replace(const Kept & kept, int32_t drafted, const Distribution & q, uint64_t key) {
    auto & residual = filter.residual;
    residual.resize(kept.n);
    for (int64_t i = 0; i < kept.n; i++) residual[i] = kept.weights[i] / kept.total;
    const auto take = [&](int64_t at, double amount) { residual[at] = std::max(residual[at] - amount, 0.0); };
    if (q.n == 0) {
        const int64_t at = kept.find(drafted);
        if (at >= 0) take(at, 1.0);
    } else if (kept.ids == nullptr) {
        for (int64_t j = 0; j < q.n; j++) {
            if (q.ids[j] >= 0 && q.ids[j] < kept.n) take(q.ids[j], q.probs[j]);
        }
    } else {
        auto & pairs = filter.pairs;
        const auto by_id = [](const Candidate & a, const Candidate & b) { return a.id < b.id; };
        pairs.clear();
        for (int64_t j = 0; j < q.n; j++) pairs.push_back({q.probs[j], q.ids[j]});
        if (!std::is_sorted(pairs.begin(), pairs.end(), by_id)) std::sort(pairs.begin(), pairs.end(), by_id);
        for (int64_t i = 0; i < kept.n; i++) {
            const auto at = std::lower_bound(pairs.begin(), pairs.end(), Candidate{0.0f, kept.ids[i]}, by_id);
            if (at != pairs.end() && at->id == kept.ids[i]) take(i, at->logit);
        }
    }
    const bool nothing = std::none_of(residual.begin(), residual.end(), [](double r) { return r > 0.0; });
    return kept.id(kernels().race(nothing ? kept.weights : residual.data(), kept.ids, kept.n, key));
}

// Judge one drafted token on a penalised row, or (drafted null) produce the row's token. False: no finite largest logit.
bool judge(const float * row, const Input & in, const Block & block, int64_t i, const int32_t * drafted,
           const Distribution & q, Ruling & out) {
    if (block.greedy()) {
        float top;
        if (!filter.largest(row, in.n_vocab, top, out.token)) return false;
        out.accepted = drafted != nullptr && *drafted == out.token;
        out.p_drafted = out.accepted ? 1.0f : 0.0f;
        return true;
    }
    Kept kept;
    if (!filter.keep(row, in.n_vocab, block, kept)) return false;
    const int64_t at = drafted != nullptr ? kept.find(*drafted) : -1;
    const double p = at >= 0 ? kept.weights[at] / kept.total : 0.0;
    out.p_drafted = static_cast<float>(p);
    if (in.rule == kMatch || drafted == nullptr) {
        out.token = kept.id(kernels().race(kept.weights, kept.ids, kept.n, key_of(block, i, kTokenStream)));
        out.accepted = drafted != nullptr && *drafted == out.token;
        return true;
    }
    double q_drafted = 1.0;
    if (q.n > 0) {
        const int32_t * place = std::find(q.ids, q.ids + q.n, *drafted);
        q_drafted = place == q.ids + q.n ? 0.0 : q.probs[place - q.ids];
    }
    out.accepted = uniform(key_of(block, i, kAcceptStream), 0) * q_drafted < p;
    out.token = out.accepted ? *drafted : replace(kept, *drafted, q, key_of(block, i, kResidualStream));
    return true;
}

// Where a block's part of each array begins.
struct Place {
    int64_t row, drafted, history, q_starts;
};

template <class Each> void walk(const Input & in, Each each) {
    Place at{};
    for (int64_t b = 0; b < in.n_blocks; b++) {
        const Block & block = in.blocks[b];
        each(b, at);
        at.row += block.n_drafted + 1;
        at.drafted += block.n_drafted;
        at.history += block.n_history;
        at.q_starts += block.has_q ? block.n_drafted + 1 : 0;
    }
}

// Returns kDone or the row that could not be judged.
int64_t verify_block(const Input & in, const Drafted & all, const Verdicts & out, int64_t b, const Place & at) {
    const Block & block = in.blocks[b];
    const int32_t * drafted = all.tokens + at.drafted;
    int32_t n_accepted = 0, n_kept = 0, stopped = 0;
    for (int64_t i = 0; i <= block.n_drafted; i++) {
        const bool judged = i < block.n_drafted;
        const float * row = filter.penalised(in.logits + (at.row + i) * in.n_vocab, in.n_vocab, block,
                                             in.history + at.history, block.n_history, drafted, i);
        Distribution q{};
        if (judged && block.has_q) {
            const int32_t * starts = all.q_starts + at.q_starts + i;
            q = {all.q_ids + starts[0], all.q_probs + starts[0], starts[1] - starts[0]};
        }
        Ruling ruling;
        if (!judge(row, in, block, i, judged ? drafted + i : nullptr, q, ruling)) return at.row + i;
        if (judged) out.p_drafted[at.row + i] = ruling.p_drafted;
        out.tokens[at.row + n_kept++] = ruling.token;
        n_accepted += ruling.accepted;
        stopped = all.eog != nullptr && all.eog[ruling.token] != 0;
        if (stopped || !ruling.accepted) break;
    }
    int32_t * counts = out.counts + 3 * b;
    counts[0] = n_accepted;
    counts[1] = n_kept;
    counts[2] = stopped;
    return kDone;
}

// A row's distribution by id, weights of 0 left out. Returns how many it wrote.
int64_t write_q(const Kept & kept, int32_t * ids, float * probs) {
    int64_t n = 0;
    if (kept.ids == nullptr) {
        for (int64_t i = 0; i < kept.n; i++) {
            if (!(kept.weights[i] > 0.0)) continue;
            ids[n] = static_cast<int32_t>(i);
            probs[n++] = static_cast<float>(kept.weights[i] / kept.total);
        }
        return n;
    }
    auto & pairs = filter.pairs;
    pairs.clear();
    for (int64_t i = 0; i < kept.n; i++) {
        if (kept.weights[i] > 0.0) pairs.push_back({static_cast<float>(kept.weights[i] / kept.total), kept.ids[i]});
    }
    std::sort(pairs.begin(), pairs.end(), [](const Candidate & a, const Candidate & b) { return a.id < b.id; });
    for (const Candidate & pair : pairs) {
        ids[n] = pair.id;
        probs[n++] = pair.logit;
    }
    return n;
}

bool draw_row(const Input & in, const Draws & out, int64_t r, const Place & at, int64_t room, int64_t & n_q) {
    const Block & s = in.blocks[r];
    const float * row =
        filter.penalised(in.logits + r * in.n_vocab, in.n_vocab, s, in.history + at.history, s.n_history, nullptr, 0);
    n_q = 0;
    if (s.greedy()) {
        float top;
        if (!filter.largest(row, in.n_vocab, top, out.tokens[r])) return false;
        out.probs[r] = static_cast<float>(1.0 / kernels().weights(row, in.n_vocab, top, 1.0, nullptr));
        if (out.q_ids != nullptr) {
            out.q_ids[room] = out.tokens[r];
            out.q_probs[room] = 1.0f;
            n_q = 1;
        }
        return true;
    }
    Kept kept;
    if (!filter.keep(row, in.n_vocab, s, kept)) return false;
    const Stream stream = in.rule == kMatch ? kTokenStream : kDraftStream;
    const int64_t winner = kernels().race(kept.weights, kept.ids, kept.n, key_of(s, 0, stream));
    out.tokens[r] = kept.id(winner);
    out.probs[r] = static_cast<float>(kept.weights[winner] / kept.total);
    if (out.q_ids != nullptr) n_q = write_q(kept, out.q_ids + room, out.q_probs + room);
    return true;
}

bool top_row(const float * row, int64_t n_vocab, int64_t k, const Tops & out, int64_t r) {
    float top;
    if (!filter.first(row, n_vocab, k, top)) return false;
    const auto & ranked = filter.ranked();
    const int64_t n = static_cast<int64_t>(ranked.size());
    for (int64_t i = 0; i < k; i++) {
        out.ids[r * k + i] = i < n ? ranked[i].id : 0;
        out.logits[r * k + i] = i < n ? ranked[i].logit - top : -std::numeric_limits<float>::infinity();
    }
    out.largest[r] = top;
    out.log_sum[r] = static_cast<float>(kernels().log(kernels().sum_exp(row, n_vocab, top)));
    return true;
}

// Run task(i) for each of n; it answers kDone or a row. Memory that can't be had becomes kNoMemory.
template <class Task> int64_t run_all(int64_t n, bool gain, Task task) {
    std::atomic<int64_t> bad{kDone};
    run_tasks(n, gain, [&](int64_t i) {
        try {
            const int64_t row = task(i);
            if (row != kDone) lower(bad, row);
        } catch (const std::bad_alloc &) {
            bad.store(kNoMemory);
        }
    });
    return bad.load();
}

}  // namespace

int64_t most_kept(const Block & s, int64_t n_vocab) {
    if (s.greedy()) return 1;
    return s.top_k > 0 && s.top_k < n_vocab ? s.top_k : n_vocab;
}

const char * misfit(const Input & in, const Drafted & drafted) {
    if (in.n_vocab <= 0) return "the vocabulary is empty";
    for (int64_t b = 0; b < in.n_blocks; b++) {
        const Block & block = in.blocks[b];
        // Bounds first, so that the sums below can't overflow.
        if (block.n_drafted < 0 || block.n_drafted > drafted.n_tokens) return "drafted tokens are missing";
        if (block.n_history < 0 || block.n_history > in.n_history) return "history is missing";
    }
    Place end{};
    bool sound = true;
    walk(in, [&](int64_t b, const Place & at) {
        const Block & block = in.blocks[b];
        end = {at.row + block.n_drafted + 1, at.drafted + block.n_drafted, at.history + block.n_history, at.q_starts};
        if (!block.has_q) return;
        end.q_starts += block.n_drafted + 1;
        if (end.q_starts > drafted.n_q_starts) {
            sound = false;
            return;
        }
        const int32_t * starts = drafted.q_starts + at.q_starts;
        for (int64_t i = 0; i <= block.n_drafted; i++) {
            if (starts[i] < 0 || starts[i] > drafted.n_q || (i > 0 && starts[i] <= starts[i - 1])) sound = false;
        }
    });
    if (end.row != in.n_rows) return "blocks and rows of logits differ in number";
    if (end.drafted != drafted.n_tokens) return "drafted tokens are left over";
    if (end.history != in.n_history) return "history is left over";
    if (!sound || end.q_starts != drafted.n_q_starts) return "the draft distributions' starts don't fit";
    for (int64_t i = 0; i < drafted.n_tokens; i++) {
        if (drafted.tokens[i] < 0 || drafted.tokens[i] >= in.n_vocab) return "a drafted token is not in the vocabulary";
    }
    return nullptr;
}

int64_t verify(const Input & in, const Drafted & drafted, const Verdicts & out) {
    std::vector<Place> places(in.n_blocks);
    walk(in, [&](int64_t b, const Place & at) { places[b] = at; });
    return run_all(in.n_blocks, worth_threads(in), [&](int64_t b) { return verify_block(in, drafted, out, b, places[b]); });
}

int64_t top_k(const float * logits, int64_t n_rows, int64_t n_vocab, int64_t k, const Tops & out) {
    const bool gain = 4.0 * static_cast<double>(n_vocab) * static_cast<double>(n_rows) >= kGain;
    return run_all(n_rows, gain,
                   [&](int64_t r) { return top_row(logits + r * n_vocab, n_vocab, k, out, r) ? kDone : r; });
}

int64_t draw(const Input & in, const Draws & out) {
    std::vector<Place> places(in.n_blocks);
    std::vector<int64_t> room(in.n_blocks + 1), n_q(in.n_blocks);
    walk(in, [&](int64_t r, const Place & at) {
        places[r] = at;
        room[r + 1] = room[r] + most_kept(in.blocks[r], in.n_vocab);
    });
    const int64_t bad =
        run_all(in.n_blocks, worth_threads(in), [&](int64_t r) { return draw_row(in, out, r, places[r], room[r], n_q[r]) ? kDone : r; });
    if (bad != kDone || out.q_ids == nullptr) return bad;
    // Every row wrote at the beginning of its own room: close the gaps.
    int64_t n = 0;
    for (int64_t r = 0; r < in.n_blocks; r++) {
        std::copy(out.q_ids + room[r], out.q_ids + room[r] + n_q[r], out.q_ids + n);
        std::copy(out.q_probs + room[r], out.q_probs + room[r] + n_q[r], out.q_probs + n);
        n += n_q[r];
        out.q_starts[r + 1] = static_cast<int32_t>(n);
    }
    return kDone;
}

}  // namespace localspec
