#include "dflash.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vector_math.h"

namespace ls::draft {
namespace {

constexpr int kMost = Columns::kMost;

void at_least(std::vector<float> &v, int64_t n) {
    if (static_cast<int64_t>(v.size()) < n) v.resize(static_cast<size_t>(n));
}

}  // namespace

struct DFlash::Layer {
    Matrix q, k, v, o, gate, up, down;
    std::vector<float> norm_in, norm_q, norm_k, norm_ffn;
    int64_t window;
    size_t index;

    Layer(const LayerWeights &w, const BlockShape &s, size_t i)
        : q(w.q),
          k(w.k),
          v(w.v),
          o(w.o),
          gate(w.gate),
          up(w.up),
          down(w.down),
          norm_in(copied(w.norm_in, s.n_embd)),
          norm_q(copied(w.norm_q, s.head_size)),
          norm_k(copied(w.norm_k, s.head_size)),
          norm_ffn(copied(w.norm_ffn, s.n_embd)),
          window(w.window),
          index(i) {}
};

struct DFlash::Scratch {
    Columns columns;
    std::vector<float> fused;            // [8][n_embd]
    std::vector<float> keys;             // [8][2 kv]
    std::vector<float> queries;          // [rows of a block][heads of a group][head_size]
    std::vector<float> weights;          // [rows of a block][heads of a group][positions]
    std::vector<float> states;           // [8][rank]
    std::vector<float> cosines, sines;

    Scratch(const BlockShape &s, int64_t longest) : columns(longest) {
        fused.resize(size_t(kMost * s.n_embd));
        keys.resize(size_t(kMost * 2 * s.n_head_kv * s.head_size));
        states.resize(size_t(kMost * s.rank));
        cosines.resize(size_t(s.n_rot / 2));
        sines.resize(size_t(s.n_rot / 2));
    }
};

DFlash::DFlash(const BlockShape &s, const BlockWeights &w, const Kernels *kernels, int n_slots, int n_threads)
    : shape_(s),
      kernels_(kernels),
      fc_(w.fc),
      head_(w.head),
      embedding_(w.embedding),
      markov_first_(w.markov_first),
      norm_taps_(copied(w.norm_taps, s.n_embd)),
      norm_output_(copied(w.norm_output, s.n_embd)),
      sure_(copied(w.sure, s.n_embd + s.rank)),
      rope_(s.n_rot, s.rope_base, w.rope_factors),
      slots_(size_t(n_slots)),
      team_(n_threads) {
    for (const LayerWeights &layer : w.layers) layers_.emplace_back(layer, s, layers_.size());
    for (auto &slot : slots_) slot.resize(layers_.size());
    if (s.rank > 0) markov_second_ = Matrix(w.markov_second);
    if (w.sure_bias != nullptr) sure_bias_ = *w.sure_bias;
    const int64_t longest = std::max({s.n_in, s.n_embd, s.n_ff, s.n_head * s.head_size, s.rank});
    for (int i = 0; i < team_.size(); i++) scratch_.push_back(std::make_unique<Scratch>(s, longest));
}

DFlash::~DFlash() = default;

void DFlash::inject(int slot, int64_t first, const float *taps, int64_t n) {
    if (n <= 0) return;
    const int64_t e = shape_.n_embd, size = shape_.head_size, kv = shape_.n_head_kv * size, tiles = (n + kMost - 1) / kMost;
    for (KeyValues &cache : slots_[size_t(slot)]) cache.make_room(first + n, shape_.n_head_kv, size);
    team_.run([&](int ith) {
        Scratch &mine = *scratch_[size_t(ith)];
        for (int64_t t = ith; t < tiles; t += team_.size()) {
            const int nc = static_cast<int>(std::min<int64_t>(kMost, n - t * kMost));
            const float *in[kMost];
            float *fused[kMost], *keys[kMost], *values[kMost];
            for (int c = 0; c < nc; c++) {
                in[c] = taps + (t * kMost + c) * shape_.n_in;
                fused[c] = &mine.fused[size_t(c * e)];
                keys[c] = &mine.keys[size_t(c * 2 * kv)];
                values[c] = keys[c] + kv;
            }
            mine.columns.set(in, nc, shape_.n_in);
            fc_.multiply(*kernels_, mine.columns, 0, fc_.groups(), fused);
            for (int c = 0; c < nc; c++) {
                rms_norm(fused[c], norm_taps_.data(), e, shape_.eps, fused[c]);
                in[c] = fused[c];
            }
            mine.columns.set(in, nc, e);
            for (const Layer &layer : layers_) {
                layer.k.multiply(*kernels_, mine.columns, 0, layer.k.groups(), keys);
                layer.v.multiply(*kernels_, mine.columns, 0, layer.v.groups(), values);
                KeyValues &cache = slots_[size_t(slot)][layer.index];
                for (int c = 0; c < nc; c++) {
                    const int64_t position = first + t * kMost + c;
                    rope_.angles(position, mine.cosines.data(), mine.sines.data());
                    for (int64_t h = 0; h < shape_.n_head_kv; h++) {
                        float *const key = keys[c] + h * size;
                        rms_norm(key, layer.norm_k.data(), size, shape_.eps, key);
                        rotate_halves(key, mine.cosines.data(), mine.sines.data(), shape_.n_rot);
                        cache.put(h, position, key, values[c] + h * size);
                    }
                }
            }
        }
    });
}

// Lays out the blocks' rows and makes room for them; returns the number of drafted places.
int64_t DFlash::plan(const Anchors &a) {
    const int64_t lead = shape_.from_anchor ? 0 : 1, e = shape_.n_embd, q_rows = shape_.n_head * shape_.head_size;
    int64_t wanted = 0;
    n_rows_ = 0;
    blocks_.clear();
    for (int i = 0; i < a.m; i++) {
        const int64_t n = a.ks[i] + lead;
        blocks_.push_back({a.slots[i], a.positions[i], n_rows_, n, wanted});
        for (KeyValues &cache : slots_[size_t(a.slots[i])])
            cache.make_room(a.positions[i] + n, shape_.n_head_kv, shape_.head_size);
        n_rows_ += n;
        wanted += a.ks[i];
    }
    at_least(cosines_, n_rows_ * (shape_.n_rot / 2));
    at_least(sines_, n_rows_ * (shape_.n_rot / 2));
    for (auto *v : {&residual_, &normed_, &projected_}) at_least(*v, n_rows_ * e);
    at_least(qkv_, n_rows_ * (q_rows + 2 * shape_.n_head_kv * shape_.head_size));
    at_least(mixed_, n_rows_ * q_rows);
    at_least(gates_, n_rows_ * shape_.n_ff);
    at_least(hidden_, n_rows_ * shape_.n_ff);
    return wanted;
}

// This thread's share of the rows of some matrices, times n vectors of k values each.
void DFlash::product(int ith, const float *in, int64_t k, int64_t n, std::initializer_list<To> to) {
    Scratch &mine = *scratch_[size_t(ith)];
    const int nth = team_.size();
    for (int64_t at = 0; at < n; at += kMost) {
        const int nc = static_cast<int>(std::min<int64_t>(kMost, n - at));
        const float *columns[kMost];
        float *out[kMost];
        for (int c = 0; c < nc; c++) columns[c] = in + (at + c) * k;
        mine.columns.set(columns, nc, k);
        for (const To &t : to) {
            for (int c = 0; c < nc; c++) out[c] = t.data + (at + c) * t.stride;
            const int64_t groups = t.matrix->groups();
            t.matrix->multiply(*kernels_, mine.columns, share(groups, ith, nth), share(groups, ith + 1, nth), out);
        }
    }
}

// All rows of one block, for the heads that share one head of keys: their keys and values go into the cache.
void DFlash::attend(int ith, Layer &layer, const Block &block, int64_t head) {
    Scratch &mine = *scratch_[size_t(ith)];
    const int64_t size = shape_.head_size, q_rows = shape_.n_head * size, kv = shape_.n_head_kv * size;
    const int64_t stride = q_rows + 2 * kv, per_group = shape_.n_head / shape_.n_head_kv, half = shape_.n_rot / 2;
    KeyValues &cache = slots_[size_t(block.slot)][layer.index];
    at_least(mine.queries, block.n * per_group * size);
    for (int64_t r = 0; r < block.n; r++) {
        float *const row = &qkv_[size_t((block.first + r) * stride)], *const key = row + q_rows + head * size;
        const float *const cosines = &cosines_[size_t((block.first + r) * half)];
        const float *const sines = &sines_[size_t((block.first + r) * half)];
        rms_norm(key, layer.norm_k.data(), size, shape_.eps, key);
        rotate_halves(key, cosines, sines, shape_.n_rot);
        cache.put(head, block.position + r, key, key + kv);
        for (int64_t i = 0; i < per_group; i++) {
            float *const q = &mine.queries[size_t((r * per_group + i) * size)];
            rms_norm(row + (head * per_group + i) * size, layer.norm_q.data(), size, shape_.eps, q);
            rotate_halves(q, cosines, sines, shape_.n_rot);
        }
    }
    const auto begin = [&](int64_t position) {
        return layer.window > 0 ? std::max<int64_t>(0, position + 1 - layer.window) : int64_t(0);
    };
    const int64_t first = begin(block.position), end = block.position + block.n;
    const int64_t room = (end - first + 2 * kKeyBlock + 15) / 16 * 16;
    at_least(mine.weights, block.n * per_group * room);
    scores(mine.queries.data(), block.n * per_group, size, cache.keys(head), first, end,
           1.0f / std::sqrt(static_cast<float>(size)), mine.weights.data(), room);
    for (int64_t r = 0; r < block.n; r++) {
        const int64_t from = begin(block.position + r), to = shape_.causal ? block.position + r + 1 : end;
        float *const weights = &mine.weights[size_t(r * per_group * room + from - first)];
        for (int64_t i = 0; i < per_group; i++) softmax(weights + i * room, to - from);
        weigh(weights, room, per_group, cache.values(head, from), to - from, size,
              &mixed_[size_t((block.first + r) * q_rows + head * per_group * size)]);
    }
}

// Every layer, by every thread of the team; leaves the drafted places' states behind the last norm in hidden, complete for all.
void DFlash::forward(int ith, const Anchors &anchors, float *hidden) {
    const int nth = team_.size();
    const int64_t e = shape_.n_embd, ff = shape_.n_ff, q_rows = shape_.n_head * shape_.head_size;
    const int64_t kv = shape_.n_head_kv * shape_.head_size, stride = q_rows + 2 * kv, half = shape_.n_rot / 2;
    const int64_t r0 = share(n_rows_, ith, nth), r1 = share(n_rows_, ith + 1, nth);
    for (size_t b = 0; b < blocks_.size(); b++) {
        const Block &block = blocks_[b];
        for (int64_t r = std::max(r0, block.first); r < std::min(r1, block.first + block.n); r++) {
            embedding_.row(r == block.first ? anchors.tokens[b] : shape_.mask, &residual_[size_t(r * e)]);
            rope_.angles(block.position + r - block.first, &cosines_[size_t(r * half)], &sines_[size_t(r * half)]);
            rms_norm(&residual_[size_t(r * e)], layers_[0].norm_in.data(), e, shape_.eps, &normed_[size_t(r * e)]);
        }
    }
    team_.meet();
    for (Layer &layer : layers_) {
        product(ith, normed_.data(), e, n_rows_,
                {{&layer.q, qkv_.data(), stride}, {&layer.k, qkv_.data() + q_rows, stride},
                 {&layer.v, qkv_.data() + q_rows + kv, stride}});
        team_.meet();
        const int64_t items = static_cast<int64_t>(blocks_.size()) * shape_.n_head_kv;
        for (int64_t item = ith; item < items; item += nth)
            attend(ith, layer, blocks_[size_t(item / shape_.n_head_kv)], item % shape_.n_head_kv);
        team_.meet();
        product(ith, mixed_.data(), q_rows, n_rows_, {{&layer.o, projected_.data(), e}});
        team_.meet();
        for (int64_t r = r0; r < r1; r++) {
            float *const x = &residual_[size_t(r * e)];
            add(x, &projected_[size_t(r * e)], e, x);
            rms_norm(x, layer.norm_ffn.data(), e, shape_.eps, &normed_[size_t(r * e)]);
        }
        team_.meet();
        product(ith, normed_.data(), e, n_rows_, {{&layer.gate, gates_.data(), ff}, {&layer.up, hidden_.data(), ff}});
        const int64_t f0 = share(layer.gate.groups(), ith, nth) * kGroupRows;
        const int64_t f1 = std::min(share(layer.gate.groups(), ith + 1, nth) * kGroupRows, ff);
        for (int64_t r = 0; r < n_rows_ && f0 < f1; r++) {
            float *const up = &hidden_[size_t(r * ff + f0)];
            silu_mul(&gates_[size_t(r * ff + f0)], up, f1 - f0, up);
        }
        team_.meet();
        product(ith, hidden_.data(), ff, n_rows_, {{&layer.down, projected_.data(), e}});
        team_.meet();
        const bool is_last = &layer == &layers_.back();
        for (int64_t r = r0; r < r1; r++) {
            float *const x = &residual_[size_t(r * e)];
            add(x, &projected_[size_t(r * e)], e, x);
            if (!is_last) rms_norm(x, layers_[layer.index + 1].norm_in.data(), e, shape_.eps, &normed_[size_t(r * e)]);
        }
        if (is_last) break;
        team_.meet();
    }
    const int64_t lead = shape_.from_anchor ? 0 : 1;
    for (const Block &block : blocks_)
        for (int64_t r = std::max(r0, block.first + lead); r < std::min(r1, block.first + block.n); r++)
            rms_norm(&residual_[size_t(r * e)], norm_output_.data(), e, shape_.eps,
                     hidden + (block.wanted + r - block.first - lead) * e);
    team_.meet();
}

void DFlash::block(const Anchors &anchors, float *logits, float *hidden) {
    const int64_t wanted = plan(anchors);
    team_.run([&](int ith) {
        forward(ith, anchors, hidden);
        product(ith, hidden, shape_.n_embd, wanted, {{&head_, logits, shape_.n_draft_vocab}});
    });
}

// Up to 8 rows, by every thread of the team.
void DFlash::lean_by(int ith, int64_t n, const int32_t *previous, const float *const *hidden, float *const *logits,
                     float *confidence) {
    Scratch &mine = *scratch_[size_t(ith)];
    const int nth = team_.size();
    const int64_t rank = shape_.rank, n_vocab = shape_.n_draft_vocab, groups = markov_second_.groups();
    const float *in[kMost];
    float *out[kMost];
    for (int64_t c = 0; c < n; c++) {
        float *const state = &mine.states[size_t(c * rank)];
        markov_first_.row(previous[c], state);
        in[c] = state;
        out[c] = &bias_[size_t(c * n_vocab)];
        if (c % nth != ith) continue;
        confidence[c] = std::numeric_limits<float>::quiet_NaN();
        if (!has_confidence()) continue;
        const float x = dot(sure_.data(), hidden[c], shape_.n_embd) + dot(sure_.data() + shape_.n_embd, state, rank) + sure_bias_;
        confidence[c] = 1.0f / (1.0f + std::exp(-x));
    }
    mine.columns.set(in, static_cast<int>(n), rank);
    const int64_t g0 = share(groups, ith, nth), g1 = share(groups, ith + 1, nth);
    markov_second_.multiply(*kernels_, mine.columns, g0, g1, out);
    const int64_t r0 = g0 * kGroupRows, r1 = std::min(g1 * kGroupRows, n_vocab);
    for (int64_t c = 0; c < n && r0 < r1; c++) add(logits[c] + r0, out[c] + r0, r1 - r0, logits[c] + r0);
    team_.meet();
}

void DFlash::lean(int64_t n, const int32_t *previous, const float *hidden, float *logits, float *confidence) {
    if (!has_markov()) return std::fill(confidence, confidence + n, std::numeric_limits<float>::quiet_NaN());
    at_least(bias_, kMost * shape_.n_draft_vocab);
    team_.run([&](int ith) {
        for (int64_t at = 0; at < n; at += kMost) {
            const int64_t nc = std::min<int64_t>(kMost, n - at);
            const float *states[kMost];
            float *to[kMost];
            for (int64_t c = 0; c < nc; c++) {
                states[c] = hidden + (at + c) * shape_.n_embd;
                to[c] = logits + (at + c) * shape_.n_draft_vocab;
            }
            lean_by(ith, nc, previous + at, states, to, confidence + at);
        }
    });
}

void DFlash::greedy(const Anchors &a, int k_most, float p_min, const int32_t *ids, int32_t *out, float *confidence,
                    int32_t *counts) {
    const int64_t wanted = plan(a), e = shape_.n_embd, n_vocab = shape_.n_draft_vocab;
    at_least(final_, wanted * e);
    at_least(logits_, wanted * n_vocab);
    at_least(bias_, has_markov() ? kMost * n_vocab : 0);
    team_.run([&](int ith) {
        forward(ith, a, final_.data());
        product(ith, final_.data(), e, wanted, {{&head_, logits_.data(), n_vocab}});
        team_.meet();
        const int nth = team_.size();
        const auto choose = [&](int b, int64_t k) {
            const float *const row = &logits_[size_t((blocks_[size_t(b)].wanted + k) * n_vocab)];
            float top;
            const int64_t best = argmax(row, n_vocab, &top);
            out[int64_t(b) * k_most + k] = ids[best];
            return 1.0f / sum_exp(row, n_vocab, top);
        };
        if (!has_markov()) {
            for (int b = 0; b < a.m; b++)
                for (int64_t k = 0; k < a.ks[b]; k++)
                    if ((blocks_[size_t(b)].wanted + k) % nth == ith) confidence[int64_t(b) * k_most + k] = choose(b, k);
            return;
        }
        // One place after another, for up to 8 blocks at a time.
        for (int at = 0; at < a.m; at += kMost) {
            const int end = std::min(a.m, at + kMost);
            for (int64_t k = 0; k < k_most; k++) {
                int which[kMost], n = 0;
                int32_t previous[kMost];
                const float *states[kMost];
                float *to[kMost], sure[kMost];
                for (int b = at; b < end; b++) {
                    if (k >= a.ks[b]) continue;
                    const int64_t place = blocks_[size_t(b)].wanted + k;
                    previous[n] = k == 0 ? a.tokens[b] : out[int64_t(b) * k_most + k - 1];
                    states[n] = &final_[size_t(place * e)];
                    to[n] = &logits_[size_t(place * n_vocab)];
                    which[n++] = b;
                }
                if (n == 0) break;
                lean_by(ith, n, previous, states, to, sure);
                for (int c = ith; c < n; c += nth) {
                    const float likely = choose(which[c], k);
                    confidence[int64_t(which[c]) * k_most + k] = has_confidence() ? sure[c] : likely;
                }
                team_.meet();
            }
        }
    });
    for (int b = 0; b < a.m; b++) {
        const float *const sure = confidence + int64_t(b) * k_most;
        counts[b] = 0;
        while (counts[b] < a.ks[b] && sure[counts[b]] >= p_min) counts[b]++;
    }
}

}  // namespace ls::draft
