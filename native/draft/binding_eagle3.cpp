// EAGLE-3's part of localspec._draft.
#include "binding.h"
#include "eagle3.h"

namespace ls::draft {

template <> const char *const kCapsule<Eagle3> = "localspec._draft.eagle3";

namespace {

// eagle3(shape, floats, n_slots, n_threads, tensors, norms) -> capsule. shape: i64[11], floats: f32[2].
PyObject *py_eagle3(PyObject *, PyObject *args) {
    Numbers<int64_t> numbers;
    Numbers<float> floats;
    int n_slots, n_threads;
    PyObject *tensors, *norms;
    if (!PyArg_ParseTuple(args, "y*y*iiO!O!", &numbers.view, &floats.view, &n_slots, &n_threads, &PyDict_Type, &tensors,
                          &PyDict_Type, &norms))
        return nullptr;
    if (numbers.size() != 13 || floats.size() != 2) return refuse("the shape is not 13 numbers and 2 floats");
    const int64_t *const n = numbers.data();
    Shape s;
    s.n_embd = n[0], s.n_in = n[1], s.n_head = n[2], s.n_head_kv = n[3], s.head_size = n[4], s.n_ff = n[5], s.n_rot = n[6];
    s.n_draft_vocab = n[7], s.n_tokens = n[8], s.window = n[9];
    s.norm_before_residual = n[10] != 0, s.norm_before_fc = n[11] != 0;
    const bool has_factors = n[12] != 0;
    s.eps = floats.data()[0], s.rope_base = floats.data()[1];
    for (int i = 0; i < 9; i++)
        if (n[i] <= 0 || n[i] > (1 << 24)) return refuse("a number of the shape is out of range");
    if (s.n_head % s.n_head_kv != 0 || s.n_rot % 2 != 0 || s.n_rot > s.head_size || s.window < 0)
        return refuse("the numbers of the shape don't fit together");
    if (n_slots < 1 || n_slots > 4096 || n_threads < 1 || n_threads > 64) return refuse("slots or threads out of range");

    Weights w;
    auto held = std::make_unique<Held<Eagle3>>();
    const int64_t e = s.n_embd, q = s.n_head * s.head_size, kv = s.n_head_kv * s.head_size;
    const struct {
        const char *name;
        int64_t k, rows;
        Stored *to;
    } wanted[] = {
        {"fc", s.n_in, e, &w.fc}, {"q", 2 * e, q, &w.q},         {"k", 2 * e, kv, &w.k},        {"v", 2 * e, kv, &w.v},
        {"o", q, e, &w.o},        {"gate", e, s.n_ff, &w.gate},  {"up", e, s.n_ff, &w.up},      {"down", s.n_ff, e, &w.down},
        {"head", e, s.n_draft_vocab, &w.head}, {"embedding", e, s.n_tokens, &w.embedding},
    };
    constexpr int kTensors = sizeof(wanted) / sizeof(wanted[0]);
    Numbers<uint8_t> views[kTensors];
    for (int i = 0; i < kTensors; i++)
        if (!take(tensors, wanted[i].name, wanted[i].k, wanted[i].rows, wanted[i].to, &views[i])) return nullptr;

    const struct {
        const char *name;
        int64_t n;
        const float **to;
        bool needed;
    } vectors[] = {
        {"embedding", e, &w.norm_embedding, true},   {"state", e, &w.norm_state, true},
        {"ffn", e, &w.norm_ffn, true},               {"output", e, &w.norm_output, true},
        {"taps", s.n_in, &w.norm_taps, s.norm_before_fc}, {"rope_factors", s.n_rot / 2, &w.rope_factors, has_factors},
    };
    constexpr int kVectors = sizeof(vectors) / sizeof(vectors[0]);
    Numbers<float> values[kVectors];
    for (int i = 0; i < kVectors; i++) {
        if (vectors[i].needed && !take_vector(norms, vectors[i].name, vectors[i].n, vectors[i].to, &values[i])) return nullptr;
    }

    try {
        held->net = std::make_unique<Eagle3>(s, w, kernels_in_use(), n_slots, n_threads);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
    held->kept.push_back(std::move(views[kTensors - 1]));
    return capsule_of(std::move(held));
}

// fuse(net, taps f32[n, n_in], g f32[n, n_embd])
PyObject *py_fuse(PyObject *, PyObject *args) {
    PyObject *capsule;
    Numbers<float> taps, g;
    if (!PyArg_ParseTuple(args, "Oy*w*", &capsule, &taps.view, &g.view)) return nullptr;
    Eagle3 *const net = net_of<Eagle3>(capsule);
    if (net == nullptr) return nullptr;
    const int64_t n = g.size() / net->shape().n_embd;
    if (g.size() != n * net->shape().n_embd || taps.size() != n * net->shape().n_in) return refuse("taps and states differ in rows");
    return run([&] { net->fuse(taps.data(), n, g.data()); });
}

// extend(net, slot, first, tokens i32[n], g f32[n, n_embd])
PyObject *py_extend(PyObject *, PyObject *args) {
    PyObject *capsule;
    int slot;
    long long first;
    Numbers<int32_t> tokens;
    Numbers<float> g;
    if (!PyArg_ParseTuple(args, "OiLy*y*", &capsule, &slot, &first, &tokens.view, &g.view)) return nullptr;
    Eagle3 *const net = net_of<Eagle3>(capsule);
    if (net == nullptr) return nullptr;
    if (slot < 0 || slot >= net->n_slots() || first < 0 || first > (1 << 24)) return refuse("slot or position out of range");
    if (g.size() != tokens.size() * net->shape().n_embd) return refuse("tokens and states differ in number");
    if (const char *why = bad_tokens(net->shape().n_tokens, tokens.data(), tokens.size())) return refuse(why);
    return run([&] { net->extend(slot, first, tokens.data(), g.data(), tokens.size()); });
}

// What `step` and `greedy` share: a pair for each of m slots.
struct Pairs {
    PyObject *capsule = nullptr;
    Numbers<int32_t> slots, positions, tokens;
    Numbers<float> g;

    const char *misfit(const Eagle3 &net) const {
        const int64_t m = slots.size();
        if (positions.size() != m || tokens.size() != m || g.size() != m * net.shape().n_embd) return "the pairs differ in number";
        for (int64_t i = 0; i < m; i++) {
            if (slots.data()[i] < 0 || slots.data()[i] >= net.n_slots()) return "a slot is out of range";
            if (positions.data()[i] < 0 || positions.data()[i] > (1 << 24)) return "a position is out of range";
            for (int64_t j = 0; j < i; j++)
                if (slots.data()[j] == slots.data()[i]) return "a slot is named twice";
        }
        return bad_tokens(net.shape().n_tokens, tokens.data(), m);
    }
};

// step(net, slots, positions, tokens i32[m], g f32[m, n_embd], states f32[m, n_embd], logits f32[m, n_draft_vocab])
PyObject *py_step(PyObject *, PyObject *args) {
    Pairs p;
    Numbers<float> states, logits;
    if (!PyArg_ParseTuple(args, "Oy*y*y*y*w*w*", &p.capsule, &p.slots.view, &p.positions.view, &p.tokens.view, &p.g.view,
                          &states.view, &logits.view))
        return nullptr;
    Eagle3 *const net = net_of<Eagle3>(p.capsule);
    if (net == nullptr) return nullptr;
    if (const char *why = p.misfit(*net)) return refuse(why);
    const int64_t m = p.slots.size();
    if (states.size() != m * net->shape().n_embd || logits.size() != m * net->shape().n_draft_vocab)
        return refuse("the output arrays have the wrong size");
    return run([&] {
        net->step(static_cast<int>(m), p.slots.data(), p.positions.data(), p.tokens.data(), p.g.data(), states.data(),
                  logits.data());
    });
}

// branch(net, slot, base, nodes, parents, tokens i32[m], g f32[m, n_embd], states f32[m, n_embd], logits f32[m, n_draft_vocab])
PyObject *py_branch(PyObject *, PyObject *args) {
    PyObject *capsule;
    int slot;
    long long base;
    Numbers<int32_t> nodes, parents, tokens;
    Numbers<float> g, states, logits;
    if (!PyArg_ParseTuple(args, "OiLy*y*y*y*w*w*", &capsule, &slot, &base, &nodes.view, &parents.view, &tokens.view, &g.view,
                          &states.view, &logits.view))
        return nullptr;
    Eagle3 *const net = net_of<Eagle3>(capsule);
    if (net == nullptr) return nullptr;
    const int64_t m = nodes.size(), e = net->shape().n_embd;
    if (slot < 0 || slot >= net->n_slots() || base < 0 || base > (1 << 24)) return refuse("slot or position out of range");
    if (parents.size() != m || tokens.size() != m || g.size() != m * e) return refuse("the pairs differ in number");
    if (states.size() != m * e || logits.size() != m * net->shape().n_draft_vocab)
        return refuse("the output arrays have the wrong size");
    for (int64_t i = 0; i < m; i++) {
        const int32_t node = nodes.data()[i], parent = parents.data()[i];
        if (node < 0 || node >= Eagle3::kMostNodes || (i > 0 && node <= nodes.data()[i - 1])) return refuse("a node is out of range");
        if (parent < -1 || parent >= nodes.data()[0]) return refuse("a node's parent was not given before");
    }
    if (const char *why = bad_tokens(net->shape().n_tokens, tokens.data(), m)) return refuse(why);
    return run([&] {
        net->branch(slot, base, static_cast<int>(m), nodes.data(), parents.data(), tokens.data(), g.data(), states.data(),
                    logits.data());
    });
}

// greedy(net, slots, positions, tokens i32[m], g, ks i32[m], p_min, ids i32[n_draft_vocab], out i32[m, k], probs f32[m, k],
// counts i32[m])
PyObject *py_greedy(PyObject *, PyObject *args) {
    Pairs p;
    Numbers<int32_t> ks, ids, out, counts;
    Numbers<float> probs;
    float p_min;
    if (!PyArg_ParseTuple(args, "Oy*y*y*y*y*fy*w*w*w*", &p.capsule, &p.slots.view, &p.positions.view, &p.tokens.view, &p.g.view,
                          &ks.view, &p_min, &ids.view, &out.view, &probs.view, &counts.view))
        return nullptr;
    Eagle3 *const net = net_of<Eagle3>(p.capsule);
    if (net == nullptr) return nullptr;
    if (const char *why = p.misfit(*net)) return refuse(why);
    const int64_t m = p.slots.size();
    if (m == 0) Py_RETURN_NONE;
    const int64_t k = out.size() / m;
    if (ks.size() != m || counts.size() != m || out.size() != m * k || probs.size() != m * k || k > 1024)
        return refuse("the output arrays have the wrong size");
    for (int64_t i = 0; i < m; i++)
        if (ks.data()[i] > k) return refuse("more tokens asked for than there is room");
    if (ids.size() != net->shape().n_draft_vocab) return refuse("ids don't name every draft token");
    if (const char *why = bad_tokens(net->shape().n_tokens, ids.data(), ids.size())) return refuse(why);
    return run([&] {
        net->greedy(static_cast<int>(m), p.slots.data(), p.positions.data(), p.tokens.data(), p.g.data(), ks.data(),
                    static_cast<int>(k), p_min, ids.data(), out.data(), probs.data(), counts.data());
    });
}

}  // namespace

PyMethodDef eagle3_methods[] = {
    {"eagle3", py_eagle3, METH_VARARGS, "Build a network; see localspec/eagle3_net.py."},
    {"fuse", py_fuse, METH_VARARGS, "States of taps."},
    {"extend", py_extend, METH_VARARGS, "Keys and values of pairs."},
    {"step", py_step, METH_VARARGS, "Logits and states of one pair per slot."},
    {"branch", py_branch, METH_VARARGS, "Logits and states of places of a tree in one slot."},
    {"greedy", py_greedy, METH_VARARGS, "Likeliest tokens, one after another."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ls::draft
