// DFlash's part of localspec._draft.
#include "binding.h"
#include "dflash.h"

namespace ls::draft {

template <> const char *const kCapsule<DFlash> = "localspec._draft.dflash";

namespace {

// dflash(shape i64[16], floats f32[2], windows i64[n_layer], n_slots, n_threads, tensors, norms) -> capsule
PyObject *py_dflash(PyObject *, PyObject *args) {
    Numbers<int64_t> numbers, windows;
    Numbers<float> floats;
    int n_slots, n_threads;
    PyObject *tensors, *norms;
    if (!PyArg_ParseTuple(args, "y*y*y*iiO!O!", &numbers.view, &floats.view, &windows.view, &n_slots, &n_threads, &PyDict_Type,
                          &tensors, &PyDict_Type, &norms))
        return nullptr;
    if (numbers.size() != 16 || floats.size() != 2) return refuse("the shape is not 16 numbers and 2 floats");
    const int64_t *const n = numbers.data();
    BlockShape s;
    s.n_embd = n[0], s.n_in = n[1], s.n_head = n[2], s.n_head_kv = n[3], s.head_size = n[4], s.n_ff = n[5], s.n_rot = n[6];
    s.n_draft_vocab = n[7], s.n_tokens = n[8], s.n_layer = n[9], s.mask = n[10], s.rank = n[11];
    s.causal = n[12] != 0, s.from_anchor = n[13] != 0;
    const bool has_factors = n[14] != 0, has_confidence = n[15] != 0;
    s.eps = floats.data()[0], s.rope_base = floats.data()[1];
    for (int i = 0; i < 10; i++)
        if (n[i] <= 0 || n[i] > (1 << 24)) return refuse("a number of the shape is out of range");
    if (s.n_head % s.n_head_kv != 0 || s.n_rot % 2 != 0 || s.n_rot > s.head_size || s.n_layer > 512 ||
        windows.size() != s.n_layer || s.mask < 0 || s.mask >= s.n_tokens || s.rank < 0 || s.rank > (1 << 16) ||
        (has_confidence && s.rank == 0))
        return refuse("the numbers of the shape don't fit together");
    if (n_slots < 1 || n_slots > 4096 || n_threads < 1 || n_threads > 64) return refuse("slots or threads out of range");

    BlockWeights w;
    w.layers.resize(static_cast<size_t>(s.n_layer));
    const int64_t e = s.n_embd, q = s.n_head * s.head_size, kv = s.n_head_kv * s.head_size;
    std::vector<Numbers<uint8_t>> views;
    std::vector<Numbers<float>> values;
    const auto matrix = [&](const std::string &name, int64_t k, int64_t rows, Stored *to) {
        return take(tensors, name, k, rows, to, &views.emplace_back());
    };
    const auto vector = [&](const std::string &name, int64_t size, const float **to) {
        return take_vector(norms, name, size, to, &values.emplace_back());
    };
    for (int64_t i = 0; i < s.n_layer; i++) {
        LayerWeights &l = w.layers[static_cast<size_t>(i)];
        const std::string p = std::to_string(i) + ".";
        l.window = windows.data()[i];
        if (l.window < 0) return refuse("a window is negative");
        if (!matrix(p + "q", e, q, &l.q) || !matrix(p + "k", e, kv, &l.k) || !matrix(p + "v", e, kv, &l.v) ||
            !matrix(p + "o", q, e, &l.o) || !matrix(p + "gate", e, s.n_ff, &l.gate) || !matrix(p + "up", e, s.n_ff, &l.up) ||
            !matrix(p + "down", s.n_ff, e, &l.down) || !vector(p + "in", e, &l.norm_in) ||
            !vector(p + "norm_q", s.head_size, &l.norm_q) || !vector(p + "norm_k", s.head_size, &l.norm_k) ||
            !vector(p + "ffn", e, &l.norm_ffn))
            return nullptr;
    }
    if (!matrix("fc", s.n_in, e, &w.fc) || !matrix("head", e, s.n_draft_vocab, &w.head) || !vector("taps", e, &w.norm_taps) ||
        !vector("output", e, &w.norm_output) || (has_factors && !vector("rope_factors", s.n_rot / 2, &w.rope_factors)) ||
        (has_confidence && (!vector("sure", e + s.rank, &w.sure) || !vector("sure_bias", 1, &w.sure_bias))) ||
        (s.rank > 0 && !matrix("markov_second", s.rank, s.n_draft_vocab, &w.markov_second)))
        return nullptr;
    // What is read in place, last.
    const size_t copied_views = views.size();
    if ((s.rank > 0 && !matrix("markov_first", s.rank, s.n_tokens, &w.markov_first)) ||
        !matrix("embedding", e, s.n_tokens, &w.embedding))
        return nullptr;

    auto held = std::make_unique<Held<DFlash>>();
    try {
        held->net = std::make_unique<DFlash>(s, w, kernels_in_use(), n_slots, n_threads);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
    for (size_t i = copied_views; i < views.size(); i++) held->kept.push_back(std::move(views[i]));
    return capsule_of(std::move(held));
}

// inject(net, slot, first, taps f32[n, n_in])
PyObject *py_inject(PyObject *, PyObject *args) {
    PyObject *capsule;
    int slot;
    long long first;
    Numbers<float> taps;
    if (!PyArg_ParseTuple(args, "OiLy*", &capsule, &slot, &first, &taps.view)) return nullptr;
    DFlash *const net = net_of<DFlash>(capsule);
    if (net == nullptr) return nullptr;
    const int64_t n = taps.size() / net->shape().n_in;
    if (slot < 0 || slot >= net->n_slots() || first < 0 || first + n > (1 << 24)) return refuse("slot or position out of range");
    if (taps.size() != n * net->shape().n_in) return refuse("the taps are not whole rows");
    return run([&] { net->inject(slot, first, taps.data(), n); });
}

// What `block` and `greedy` share: an anchor in each of m slots.
struct Asked {
    PyObject *capsule = nullptr;
    Numbers<int32_t> slots, positions, tokens, ks;

    Anchors anchors() const {
        return {static_cast<int>(slots.size()), slots.data(), positions.data(), tokens.data(), ks.data()};
    }
    int64_t wanted() const {
        int64_t sum = 0;
        for (int64_t i = 0; i < ks.size(); i++) sum += ks.data()[i];
        return sum;
    }
    const char *misfit(const DFlash &net) const {
        const int64_t m = slots.size();
        if (positions.size() != m || tokens.size() != m || ks.size() != m) return "the anchors differ in number";
        for (int64_t i = 0; i < m; i++) {
            if (slots.data()[i] < 0 || slots.data()[i] >= net.n_slots()) return "a slot is out of range";
            if (positions.data()[i] < 0 || positions.data()[i] > (1 << 24)) return "a position is out of range";
            if (ks.data()[i] < 1 || ks.data()[i] > 1024) return "1 to 1024 tokens can be drafted";
            for (int64_t j = 0; j < i; j++)
                if (slots.data()[j] == slots.data()[i]) return "a slot is named twice";
        }
        return bad_tokens(net.shape().n_tokens, tokens.data(), m);
    }
};

// block(net, slots, positions, tokens, ks i32[m], logits f32[sum of ks, n_draft_vocab], hidden f32[sum of ks, n_embd])
PyObject *py_block(PyObject *, PyObject *args) {
    Asked p;
    Numbers<float> logits, hidden;
    if (!PyArg_ParseTuple(args, "Oy*y*y*y*w*w*", &p.capsule, &p.slots.view, &p.positions.view, &p.tokens.view, &p.ks.view,
                          &logits.view, &hidden.view))
        return nullptr;
    DFlash *const net = net_of<DFlash>(p.capsule);
    if (net == nullptr) return nullptr;
    if (const char *why = p.misfit(*net)) return refuse(why);
    if (logits.size() != p.wanted() * net->shape().n_draft_vocab || hidden.size() != p.wanted() * net->shape().n_embd)
        return refuse("the output arrays have the wrong size");
    return run([&] { net->block(p.anchors(), logits.data(), hidden.data()); });
}

// lean(net, previous i32[n], hidden f32[n, n_embd], logits f32[n, n_draft_vocab], confidence f32[n])
PyObject *py_lean(PyObject *, PyObject *args) {
    PyObject *capsule;
    Numbers<int32_t> previous;
    Numbers<float> hidden, logits, confidence;
    if (!PyArg_ParseTuple(args, "Oy*y*w*w*", &capsule, &previous.view, &hidden.view, &logits.view, &confidence.view))
        return nullptr;
    DFlash *const net = net_of<DFlash>(capsule);
    if (net == nullptr) return nullptr;
    const int64_t n = previous.size();
    if (hidden.size() != n * net->shape().n_embd || logits.size() != n * net->shape().n_draft_vocab || confidence.size() != n)
        return refuse("tokens, states and logits differ in number");
    if (const char *why = bad_tokens(net->shape().n_tokens, previous.data(), n)) return refuse(why);
    return run([&] { net->lean(n, previous.data(), hidden.data(), logits.data(), confidence.data()); });
}

// greedy_block(net, slots, positions, tokens, ks i32[m], p_min, ids i32[n_draft_vocab], out i32[m, k], confidence f32[m, k],
// counts i32[m])
PyObject *py_greedy_block(PyObject *, PyObject *args) {
    Asked p;
    Numbers<int32_t> ids, out, counts;
    Numbers<float> confidence;
    float p_min;
    if (!PyArg_ParseTuple(args, "Oy*y*y*y*fy*w*w*w*", &p.capsule, &p.slots.view, &p.positions.view, &p.tokens.view, &p.ks.view,
                          &p_min, &ids.view, &out.view, &confidence.view, &counts.view))
        return nullptr;
    DFlash *const net = net_of<DFlash>(p.capsule);
    if (net == nullptr) return nullptr;
    if (const char *why = p.misfit(*net)) return refuse(why);
    const int64_t m = p.slots.size();
    if (m == 0) Py_RETURN_NONE;
    const int64_t k = out.size() / m;
    if (counts.size() != m || out.size() != m * k || confidence.size() != m * k)
        return refuse("the output arrays have the wrong size");
    for (int64_t i = 0; i < m; i++)
        if (p.ks.data()[i] > k) return refuse("more tokens asked for than there is room");
    if (ids.size() != net->shape().n_draft_vocab) return refuse("ids don't name every draft token");
    if (const char *why = bad_tokens(net->shape().n_tokens, ids.data(), ids.size())) return refuse(why);
    return run([&] {
        net->greedy(p.anchors(), static_cast<int>(k), p_min, ids.data(), out.data(), confidence.data(), counts.data());
    });
}

}  // namespace

PyMethodDef dflash_methods[] = {
    {"dflash", py_dflash, METH_VARARGS, "Build a network; see localspec/dflash_net.py."},
    {"inject", py_inject, METH_VARARGS, "Keys and values of the target's rows."},
    {"block", py_block, METH_VARARGS, "Logits and states of blocks."},
    {"lean", py_lean, METH_VARARGS, "The Markov head's part of logits, and confidences."},
    {"greedy_block", py_greedy_block, METH_VARARGS, "Likeliest tokens of blocks."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ls::draft
