// Exercises the core without Python: random calls of every shape with the sanitizers on, each instruction set against the
// portable one. Built and run by tests/native/test_verify_sanitize.py. Exit code 0 and a line of counts when all is well.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "accept.h"
#include "kernels.h"
#include "pool.h"

using namespace localspec;

namespace {

std::mt19937_64 rng(1);

int64_t below(int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

template <class T> T pick(std::initializer_list<T> from) { return *(from.begin() + below(static_cast<int64_t>(from.size()))); }

// One random call. Arrays are exactly as long as they must be, so that the sanitizer sees a step past an end.
struct Call {
    std::vector<float> logits;
    std::vector<Block> blocks;
    std::vector<int32_t> history, tokens, q_ids, q_starts;
    std::vector<float> q_probs;
    std::vector<uint8_t> eog;
    int64_t n_vocab, n_rows = 0;
    Rule rule;

    Call() {
        n_vocab = below(3) != 0 ? 1 + below(300) : 1 + below(4000);
        rule = below(2) != 0 ? kMatch : kReject;
        const int64_t n_blocks = 1 + below(6);
        for (int64_t b = 0; b < n_blocks; b++) add_block();
        std::normal_distribution<float> normal(0, 3);
        logits.resize(n_rows * n_vocab);
        const bool ties = below(3) == 0, holes = below(3) == 0;
        for (float & x : logits) {
            x = normal(rng);
            if (ties) x = std::round(x);
            if (holes && below(3) == 0) x = pick({NAN, -INFINITY, -std::numeric_limits<float>::max()});
        }
        for (int64_t r = 0; r < n_rows; r++) logits[r * n_vocab + below(n_vocab)] = 1.0f;
        eog.resize(n_vocab);
        for (uint8_t & e : eog) e = below(20) == 0;
    }

    void add_block() {
        Block b{};
        b.sequence = rng();
        b.position = rng();
        b.seed = rng();
        b.n_drafted = below(5);
        b.temperature = pick({0.0, 0.5, 1.0, 3.0, 1e-30});
        b.top_k = pick<int64_t>({0, 1, 3, 40, 1000, 100000});
        b.top_p = pick({0.0, 0.5, 0.95, 1.0});
        b.min_p = pick({0.0, 1e-300, 0.05, 1.0});
        b.repeat_penalty = pick({1.0, 1.2});
        b.presence_penalty = pick({0.0, 0.5});
        b.frequency_penalty = pick({0.0, -0.5});
        b.penalty_last_n = pick<int64_t>({-1, 0, 2, 64});
        b.n_history = below(100);
        for (int64_t i = 0; i < b.n_history; i++) history.push_back(static_cast<int32_t>(below(n_vocab + 4) - 2));
        b.has_q = rule == kReject && b.n_drafted > 0 && below(2) != 0;
        if (b.has_q) q_starts.push_back(static_cast<int32_t>(q_ids.size()));
        for (int64_t i = 0; i < b.n_drafted; i++) {
            tokens.push_back(static_cast<int32_t>(below(n_vocab)));
            if (!b.has_q) continue;
            const int64_t n = 1 + below(n_vocab);
            const int64_t first = below(2) != 0 ? tokens.back() : std::max<int64_t>(0, tokens.back() - below(n));
            for (int64_t j = 0; j < n; j++) {  // partly out of the vocabulary, sometimes descending: both are allowed
                q_ids.push_back(static_cast<int32_t>(b.seed % 2 != 0 ? first + j : first + n - 1 - j));
                q_probs.push_back(1.0f / static_cast<float>(n));
            }
            q_starts.push_back(static_cast<int32_t>(q_ids.size()));
        }
        n_rows += b.n_drafted + 1;
        blocks.push_back(b);
    }

    Input input() const {
        return {logits.data(),  n_rows, n_vocab, blocks.data(), static_cast<int64_t>(blocks.size()), history.data(),
                static_cast<int64_t>(history.size()), rule};
    }

    Drafted drafted() const {
        return {tokens.data(),  static_cast<int64_t>(tokens.size()),   q_ids.data(), q_probs.data(),
                static_cast<int64_t>(q_ids.size()), q_starts.data(), static_cast<int64_t>(q_starts.size()), eog.data()};
    }
};

template <class T> void append(std::string & to, const std::vector<T> & from) {
    to.append(reinterpret_cast<const char *>(from.data()), from.size() * sizeof(T));
}

// All that a call gives, as bytes; empty where it went wrong.
std::string outcome(const Call & call) {
    const Input in = call.input();
    if (misfit(in, call.drafted()) != nullptr) return "";
    std::vector<int32_t> tokens(in.n_rows, -1), counts(3 * in.n_blocks);
    std::vector<float> p(in.n_rows, -1.0f);
    std::string all;
    if (verify(in, call.drafted(), {tokens.data(), p.data(), counts.data()}) != kDone) return "";
    append(all, tokens);
    append(all, p);
    append(all, counts);

    // The first rows again, as draws.
    std::vector<Block> rows = call.blocks;
    int64_t room = 0;
    for (Block & row : rows) {
        row.n_drafted = row.has_q = 0;
        room += most_kept(row, in.n_vocab);
    }
    Input one = in;
    one.blocks = rows.data();
    one.n_rows = one.n_blocks;
    std::vector<int32_t> drawn(one.n_rows), ids(room), starts(one.n_rows + 1);
    std::vector<float> probs(one.n_rows), q(room);
    if (misfit(one, Drafted{}) != nullptr) return "";
    if (draw(one, {drawn.data(), probs.data(), ids.data(), q.data(), starts.data()}) != kDone) return "";
    ids.resize(starts.back());
    q.resize(starts.back());
    append(all, drawn);
    append(all, probs);
    append(all, ids);
    append(all, q);

    const int64_t k = 1 + static_cast<int64_t>(call.blocks[0].seed % static_cast<uint64_t>(std::min<int64_t>(in.n_vocab, 40)));
    std::vector<int32_t> top_ids(in.n_rows * k);
    std::vector<float> top(in.n_rows * k), largest(in.n_rows), log_sum(in.n_rows);
    const Tops tops = {top_ids.data(), top.data(), largest.data(), log_sum.data()};
    if (top_k(in.logits, in.n_rows, in.n_vocab, k, tops) != kDone) return "";
    append(all, top_ids);
    append(all, top);
    append(all, largest);
    append(all, log_sum);
    return all;
}

int fail(const char * what, int number) {
    std::printf("call %d: %s\n", number, what);
    return 1;
}

}  // namespace

int main(int argc, char ** argv) {
    const int n_calls = argc > 1 ? std::atoi(argv[1]) : 300;
    int n_kinds = 0;
    while (kernels_name(n_kinds) != nullptr) n_kinds++;
    for (int number = 0; number < n_calls; number++) {
        const Call call;
        kernels_use(kernels_name(n_kinds - 1));
        set_threads(1);
        const std::string plain = outcome(call);
        if (plain.empty()) return fail("refused", number);
        for (int kind = 0; kind < n_kinds; kind++) {
            kernels_use(kernels_name(kind));
            set_threads(1 + number % 3);
            if (outcome(call) != plain) return fail(kernels_name(kind), number);
        }
        if (number % 20 == 0) {  // several callers at once share the pool
            std::vector<std::string> got(3);
            std::vector<std::thread> callers;
            for (auto & mine : got) callers.emplace_back([&] { mine = outcome(call); });
            for (auto & caller : callers) caller.join();
            for (const auto & mine : got) {
                if (mine != plain) return fail("callers at once", number);
            }
        }
    }
    // A row that can't be judged is named, and nothing is read past it.
    Call call;
    for (int64_t i = 0; i < call.n_vocab; i++) call.logits[i] = NAN;
    std::vector<int32_t> tokens(call.n_rows), counts(3 * call.blocks.size());
    std::vector<float> p(call.n_rows);
    if (verify(call.input(), call.drafted(), {tokens.data(), p.data(), counts.data()}) != 0) return fail("NaN row", n_calls);
    std::printf("%d calls, %d kinds of kernels\n", n_calls, n_kinds);
    return 0;
}
