#include "eagle3.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector_math.h"

namespace ls::draft {
namespace {

constexpr int kMost = Columns::kMost;

}  // namespace

struct Eagle3::Scratch {
    Columns columns;
    std::vector<float> joined;    // [8][2 n_embd]: embedding and state, each normalised
    std::vector<float> residual;  // [8][n_embd]
    std::vector<float> normed;    // [8][longest]
    std::vector<float> gates;     // [8][n_ff]
    std::vector<float> keys;      // [8][2 kv]
    std::vector<float> weights;   // [heads of a group][positions]
    std::vector<float> cosines, sines;

    Scratch(const Shape &s, int64_t longest) : columns(longest) {
        joined.resize(size_t(kMost * 2 * s.n_embd));
        residual.resize(size_t(kMost * s.n_embd));
        normed.resize(size_t(kMost * longest));
        gates.resize(size_t(kMost * s.n_ff));
        keys.resize(size_t(kMost * 2 * s.n_head_kv * s.head_size));
        cosines.resize(size_t(s.head_size / 2));
        sines.resize(size_t(s.head_size / 2));
    }
};

Eagle3::Eagle3(const Shape &s, const Weights &w, const Kernels *kernels, int n_slots, int n_threads)
    : shape_(s),
      kernels_(kernels),
      fc_(w.fc),
      q_(w.q),
      k_(w.k),
      v_(w.v),
      o_(w.o),
      gate_(w.gate),
      up_(w.up),
      down_(w.down),
      head_(w.head),
      embedding_(w.embedding),
      norm_taps_(copied(w.norm_taps, s.n_in)),
      norm_embedding_(copied(w.norm_embedding, s.n_embd)),
      norm_state_(copied(w.norm_state, s.n_embd)),
      norm_ffn_(copied(w.norm_ffn, s.n_embd)),
      norm_output_(copied(w.norm_output, s.n_embd)),
      rope_(s.n_rot, s.rope_base, w.rope_factors),
      slots_(size_t(n_slots)),
      team_(n_threads) {
    const int64_t q_rows = s.n_head * s.head_size, kv_rows = s.n_head_kv * s.head_size;
    const int64_t longest = std::max({s.n_in, 2 * s.n_embd, s.n_ff, q_rows});
    for (int i = 0; i < team_.size(); i++) scratch_.push_back(std::make_unique<Scratch>(s, longest));
    qkv_.resize(size_t(kMost * (q_rows + 2 * kv_rows)));
    mixed_.resize(size_t(kMost * q_rows));
    projected_.resize(size_t(kMost * s.n_embd));
    hidden_.resize(size_t(kMost * s.n_ff));
    lowered_.resize(size_t(kMost * s.n_embd));
    state_.resize(size_t(kMost * s.n_embd));
    tops_.resize(size_t(kMost * team_.size()));
    top_ids_.resize(size_t(kMost * team_.size()));
}

Eagle3::~Eagle3() = default;

void Eagle3::fuse(const float *taps, int64_t n, float *g) {
    const int64_t tiles = (n + kMost - 1) / kMost;
    // Few columns: the threads share the rows. Many: each takes tiles of its own.
    const bool by_rows = tiles < team_.size();
    team_.run([&](int ith) {
        Scratch &mine = *scratch_[size_t(ith)];
        const int nth = team_.size();
        for (int64_t t = by_rows ? 0 : ith; t < tiles; t += by_rows ? 1 : nth) {
            const int nc = static_cast<int>(std::min<int64_t>(kMost, n - t * kMost));
            const float *in[kMost];
            float *out[kMost];
            for (int c = 0; c < nc; c++) {
                in[c] = taps + (t * kMost + c) * shape_.n_in;
                out[c] = g + (t * kMost + c) * shape_.n_embd;
                if (!shape_.norm_before_fc) continue;
                float *const normed = &mine.normed[size_t(c * shape_.n_in)];
                rms_norm(in[c], norm_taps_.data(), shape_.n_in, shape_.eps, normed);
                in[c] = normed;
            }
            mine.columns.set(in, nc, shape_.n_in);
            const int64_t groups = fc_.groups();
            fc_.multiply(*kernels_, mine.columns, by_rows ? share(groups, ith, nth) : 0,
                         by_rows ? share(groups, ith + 1, nth) : groups, out);
        }
    });
}

void Eagle3::extend(int slot, int64_t first, const int32_t *tokens, const float *g, int64_t n) {
    if (n <= 0) return;
    KeyValues &cache = slots_[size_t(slot)];
    cache.make_room(first + n, shape_.n_head_kv, shape_.head_size);
    const int64_t e = shape_.n_embd, size = shape_.head_size, kv = shape_.n_head_kv * size, tiles = (n + kMost - 1) / kMost;
    team_.run([&](int ith) {
        Scratch &mine = *scratch_[size_t(ith)];
        for (int64_t t = ith; t < tiles; t += team_.size()) {
            const int nc = static_cast<int>(std::min<int64_t>(kMost, n - t * kMost));
            const float *in[kMost];
            float *keys[kMost], *values[kMost];
            for (int c = 0; c < nc; c++) {
                const int64_t i = t * kMost + c;
                float *const joined = &mine.joined[size_t(c * 2 * e)];
                embedding_.row(tokens[i], mine.residual.data());
                rms_norm(mine.residual.data(), norm_embedding_.data(), e, shape_.eps, joined);
                rms_norm(g + i * e, norm_state_.data(), e, shape_.eps, joined + e);
                in[c] = joined;
                keys[c] = &mine.keys[size_t(c * 2 * kv)];
                values[c] = keys[c] + kv;
            }
            mine.columns.set(in, nc, 2 * e);
            k_.multiply(*kernels_, mine.columns, 0, k_.groups(), keys);
            v_.multiply(*kernels_, mine.columns, 0, v_.groups(), values);
            for (int c = 0; c < nc; c++) {
                const int64_t position = first + t * kMost + c;
                rope_.angles(position, mine.cosines.data(), mine.sines.data());
                for (int64_t h = 0; h < shape_.n_head_kv; h++) {
                    rotate(keys[c] + h * size, mine.cosines.data(), mine.sines.data(), shape_.n_rot);
                    cache.put(h, position, keys[c] + h * size, values[c] + h * size);
                }
            }
        }
    });
}

struct Eagle3::Places {
    const int32_t *nodes;
};

// One column's attention over the keys of one head, its own among them: qkv_ to mixed_.
void Eagle3::attend(Scratch &mine, int c, int64_t h, int slot, int64_t position) {
    const int64_t size = shape_.head_size, q_rows = shape_.n_head * size, kv = shape_.n_head_kv * size;
    const int64_t stride = q_rows + 2 * kv, per_group = shape_.n_head / shape_.n_head_kv, last = position + 1;
    const int64_t first = shape_.window > 0 ? std::max<int64_t>(0, last - shape_.window) : 0;
    KeyValues &cache = slots_[size_t(slot)];
    float *const q = &qkv_[size_t(c * stride + h * per_group * size)];
    float *const key = &qkv_[size_t(c * stride + q_rows + h * size)];
    rope_.angles(position, mine.cosines.data(), mine.sines.data());
    for (int64_t i = 0; i < per_group; i++) rotate(q + i * size, mine.cosines.data(), mine.sines.data(), shape_.n_rot);
    rotate(key, mine.cosines.data(), mine.sines.data(), shape_.n_rot);
    cache.put(h, position, key, key + kv);
    const int64_t row = (last - first + 2 * kKeyBlock + 15) / 16 * 16;
    if (mine.weights.size() < size_t(per_group * row)) mine.weights.resize(size_t(per_group * row));
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    scores(q, per_group, size, cache.keys(h), first, last, scale, mine.weights.data(), row);
    for (int64_t i = 0; i < per_group; i++) softmax(&mine.weights[size_t(i * row)], last - first);
    weigh(mine.weights.data(), row, per_group, cache.values(h, first), last - first, size,
          &mixed_[size_t(c * q_rows + h * per_group * size)]);
}

// The layer for one pair of each of m slots, by every thread of the team; leaves states[c], the layer's output, complete
// for all threads.
void Eagle3::layer(int ith, int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens,
                   const float *const *g, float *const *states, const Places *places) {
    Scratch &mine = *scratch_[size_t(ith)];
    const int nth = team_.size();
    const int64_t e = shape_.n_embd, size = shape_.head_size, q_rows = shape_.n_head * size, kv = shape_.n_head_kv * size;
    const int64_t stride = q_rows + 2 * kv;
    const auto part = [&](const Matrix &w, int64_t *g0, int64_t *g1) {
        *g0 = share(w.groups(), ith, nth);
        *g1 = share(w.groups(), ith + 1, nth);
    };
    const float *in[kMost];
    float *out[kMost];
    int64_t g0, g1;

    for (int c = 0; c < m; c++) {
        float *const joined = &mine.joined[size_t(c * 2 * e)], *const residual = &mine.residual[size_t(c * e)];
        embedding_.row(tokens[c], residual);
        rms_norm(residual, norm_embedding_.data(), e, shape_.eps, joined);
        rms_norm(g[c], norm_state_.data(), e, shape_.eps, joined + e);
        std::memcpy(residual, shape_.norm_before_residual ? joined + e : g[c], size_t(e) * 4);
        in[c] = joined;
    }
    mine.columns.set(in, m, 2 * e);
    const Matrix *const three[] = {&q_, &k_, &v_};
    const int64_t offsets[] = {0, q_rows, q_rows + kv};
    for (int i = 0; i < 3; i++) {
        for (int c = 0; c < m; c++) out[c] = &qkv_[size_t(c * stride + offsets[i])];
        part(*three[i], &g0, &g1);
        three[i]->multiply(*kernels_, mine.columns, g0, g1, out);
    }
    team_.meet();

    if (places == nullptr) {
        for (int64_t item = ith; item < m * shape_.n_head_kv; item += nth) {
            const int c = static_cast<int>(item / shape_.n_head_kv);
            attend(mine, c, item % shape_.n_head_kv, slots[c], positions[c]);
        }
    } else {
        // Branches use the same positions of one slot: a head belongs to one thread, which lays each column's way there first.
        for (int64_t h = ith; h < shape_.n_head_kv; h += nth) {
            for (int c = 0; c < m; c++) {
                int64_t at = positions[c];
                for (int node = node_parents_[size_t(places->nodes[c])]; node >= 0; node = node_parents_[size_t(node)]) {
                    const float *const key = &node_keys_[size_t(node * 2 * kv + h * size)];
                    slots_[size_t(slots[c])].put(h, --at, key, key + kv);
                }
                attend(mine, c, h, slots[c], positions[c]);
                const float *const key = &qkv_[size_t(c * stride + q_rows + h * size)];  // rotated by now
                float *const to = &node_keys_[size_t(places->nodes[c] * 2 * kv + h * size)];
                std::memcpy(to, key, size_t(size) * 4);
                std::memcpy(to + kv, key + kv, size_t(size) * 4);
            }
        }
    }
    team_.meet();

    for (int c = 0; c < m; c++) {
        in[c] = &mixed_[size_t(c * q_rows)];
        out[c] = &projected_[size_t(c * e)];
    }
    mine.columns.set(in, m, q_rows);
    part(o_, &g0, &g1);
    o_.multiply(*kernels_, mine.columns, g0, g1, out);
    team_.meet();

    float *gates[kMost];
    for (int c = 0; c < m; c++) {
        float *const residual = &mine.residual[size_t(c * e)], *const normed = &mine.normed[size_t(c * e)];
        add(residual, &projected_[size_t(c * e)], e, residual);
        rms_norm(residual, norm_ffn_.data(), e, shape_.eps, normed);
        in[c] = normed;
        out[c] = &hidden_[size_t(c * shape_.n_ff)];
        gates[c] = &mine.gates[size_t(c * shape_.n_ff)];
    }
    mine.columns.set(in, m, e);
    part(gate_, &g0, &g1);
    gate_.multiply(*kernels_, mine.columns, g0, g1, gates);
    up_.multiply(*kernels_, mine.columns, g0, g1, out);
    const int64_t r0 = g0 * kGroupRows, r1 = std::min(g1 * kGroupRows, shape_.n_ff);
    for (int c = 0; c < m && r0 < r1; c++) silu_mul(gates[c] + r0, out[c] + r0, r1 - r0, out[c] + r0);
    team_.meet();

    for (int c = 0; c < m; c++) {
        in[c] = &hidden_[size_t(c * shape_.n_ff)];
        out[c] = &lowered_[size_t(c * e)];
    }
    mine.columns.set(in, m, shape_.n_ff);
    part(down_, &g0, &g1);
    down_.multiply(*kernels_, mine.columns, g0, g1, out);
    team_.meet();

    for (int c = 0; c < m; c++) {
        float *const residual = &mine.residual[size_t(c * e)];
        add(residual, &lowered_[size_t(c * e)], e, residual);
        if (ith == 0) std::memcpy(states[c], residual, size_t(e) * 4);
        float *const normed = &mine.normed[size_t(c * e)];
        rms_norm(residual, norm_output_.data(), e, shape_.eps, normed);
        in[c] = normed;
    }
    mine.columns.set(in, m, e);  // what the head is multiplied with
}

void Eagle3::step(int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *g, float *states,
                  float *logits) {
    for (int i = 0; i < m; i++) slots_[size_t(slots[i])].make_room(positions[i] + 1, shape_.n_head_kv, shape_.head_size);
    rows(m, slots, positions, tokens, g, states, logits, nullptr);
}

void Eagle3::branch(int slot, int64_t base, int m, const int32_t *nodes, const int32_t *parents, const int32_t *tokens,
                    const float *g, float *states, float *logits) {
    const int64_t kv = shape_.n_head_kv * shape_.head_size;
    node_keys_.resize(size_t(kMostNodes * 2 * kv));
    node_parents_.resize(kMostNodes, -1);
    std::vector<int32_t> slots(size_t(m), slot), positions(size_t(m), 0);
    for (int i = 0; i < m; i++) {
        node_parents_[size_t(nodes[i])] = parents[i];
        int64_t depth = 1;
        for (int node = parents[i]; node >= 0; node = node_parents_[size_t(node)]) depth++;
        positions[size_t(i)] = static_cast<int32_t>(base + depth);
        slots_[size_t(slot)].make_room(base + depth + 1, shape_.n_head_kv, shape_.head_size);
    }
    rows(m, slots.data(), positions.data(), tokens, g, states, logits, nodes);
}

void Eagle3::rows(int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *g, float *states,
                  float *logits, const int32_t *nodes) {
    for (int at = 0; at < m; at += kMost) {
        const int nc = std::min(kMost, m - at);
        const Places places{nodes ? nodes + at : nullptr};
        team_.run([&](int ith) {
            const float *in[kMost];
            float *out[kMost], *to[kMost];
            for (int c = 0; c < nc; c++) {
                in[c] = g + (at + c) * shape_.n_embd;
                out[c] = states + (at + c) * shape_.n_embd;
                to[c] = logits + (at + c) * shape_.n_draft_vocab;
            }
            layer(ith, nc, slots + at, positions + at, tokens + at, in, out, nodes ? &places : nullptr);
            head_.multiply(*kernels_, scratch_[size_t(ith)]->columns, share(head_.groups(), ith, team_.size()),
                           share(head_.groups(), ith + 1, team_.size()), to);
        });
    }
}

void Eagle3::greedy(int m, const int32_t *slots, const int32_t *positions, const int32_t *tokens, const float *g,
                    const int32_t *ks, int k_most, float p_min, const int32_t *ids, int32_t *out, float *probs,
                    int32_t *counts) {
    const int64_t e = shape_.n_embd, n_vocab = shape_.n_draft_vocab;
    logits_.resize(size_t(kMost * n_vocab));
    for (int i = 0; i < m; i++) {
        counts[i] = 0;
        slots_[size_t(slots[i])].make_room(positions[i] + std::max(1, ks[i]), shape_.n_head_kv, shape_.head_size);
    }
    for (int at = 0; at < m; at += kMost) {
        const int nc = std::min(kMost, m - at);
        // The columns that still draft: moved up as others end. Every thread keeps the same list for itself.
        team_.run([&](int ith) {
            const int nth = team_.size();
            int which[kMost], n = 0;
            int32_t slot[kMost], position[kMost], token[kMost];
            const float *in[kMost];
            float *state[kMost];
            for (int c = 0; c < nc; c++) {
                if (ks[at + c] <= 0) continue;
                which[n] = c;
                slot[n] = slots[at + c], position[n] = positions[at + c], token[n] = tokens[at + c];
                in[n] = g + (at + c) * e;
                state[n] = &state_[size_t(c * e)];
                n++;
            }
            const int64_t g0 = share(head_.groups(), ith, nth), g1 = share(head_.groups(), ith + 1, nth);
            const int64_t r0 = g0 * kGroupRows, r1 = std::min(g1 * kGroupRows, n_vocab);
            for (int k = 0; k < k_most && n > 0; k++) {
                float *to[kMost];
                for (int c = 0; c < n; c++) to[c] = &logits_[size_t(which[c] * n_vocab)];
                layer(ith, n, slot, position, token, in, state);
                head_.multiply(*kernels_, scratch_[size_t(ith)]->columns, g0, g1, to);
                for (int c = 0; c < n; c++) {
                    float &top = tops_[size_t(ith * kMost + c)];
                    top = -INFINITY;
                    if (r0 < r1) top_ids_[size_t(ith * kMost + c)] = r0 + argmax(to[c] + r0, r1 - r0, &top);
                }
                team_.meet();
                int left = 0;
                for (int c = 0; c < n; c++) {
                    int best = 0;
                    for (int t = 1; t < nth; t++)
                        if (tops_[size_t(t * kMost + c)] > tops_[size_t(best * kMost + c)]) best = t;
                    const int row = at + which[c];
                    const float prob = 1.0f / sum_exp(to[c], n_vocab, tops_[size_t(best * kMost + c)]);
                    if (!(prob >= p_min)) continue;
                    const int32_t id = ids[top_ids_[size_t(best * kMost + c)]];
                    if (ith == 0) {
                        out[row * k_most + k] = id;
                        probs[row * k_most + k] = prob;
                        counts[row] = k + 1;
                    }
                    if (k + 1 >= ks[row]) continue;
                    which[left] = which[c];
                    slot[left] = slot[c], position[left] = position[c] + 1, token[left] = id;
                    in[left] = state[left] = state[c];
                    left++;
                }
                n = left;
                // Nobody may overwrite the largest logits, or a state, before all have read them.
                if (nth > 1) team_.meet();
            }
        });
    }
}

}  // namespace ls::draft
