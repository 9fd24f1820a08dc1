// localspec._draft: the thin layer between Python's buffers and the network. Checks sizes and ranges, releases the GIL.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <cstring>
#include <new>
#include <string>

#include "eagle3.h"

namespace {

using namespace ls;
using namespace ls::draft;

constexpr const char *kCapsule = "localspec._draft.eagle3";

// A borrowed buffer as numbers of one type; released with the scope.
template <class T> struct Numbers {
    Py_buffer view{};

    Numbers() = default;
    Numbers(const Numbers &) = delete;
    Numbers &operator=(const Numbers &) = delete;
    ~Numbers() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }
    T *data() const { return static_cast<T *>(view.buf); }
    int64_t size() const { return view.len / static_cast<int64_t>(sizeof(T)); }
};

// The network and the embedding's bytes, which stay where they are.
struct Held {
    std::unique_ptr<Eagle3> net;
    Py_buffer embedding{};
    ~Held() {
        if (embedding.obj != nullptr) PyBuffer_Release(&embedding);
    }
};

void destroy(PyObject *capsule) { delete static_cast<Held *>(PyCapsule_GetPointer(capsule, kCapsule)); }

Eagle3 *net_of(PyObject *capsule) {
    auto *const held = static_cast<Held *>(PyCapsule_GetPointer(capsule, kCapsule));
    return held == nullptr ? nullptr : held->net.get();
}

PyObject *refuse(const std::string &why) {
    PyErr_SetString(PyExc_ValueError, why.c_str());
    return nullptr;
}

template <class Work> PyObject *run(Work work) {
    bool no_memory = false;
    Py_BEGIN_ALLOW_THREADS
    try {
        work();
    } catch (const std::bad_alloc &) {
        no_memory = true;
    }
    Py_END_ALLOW_THREADS
    if (no_memory) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

// One entry of the dictionary of tensors: (type, k, rows, bytes, address of ggml's conversion).
bool take(PyObject *tensors, const char *name, int64_t k, int64_t rows, Stored *out, Py_buffer *view) {
    PyObject *const entry = PyDict_GetItemString(tensors, name);
    if (entry == nullptr) return refuse(std::string("no tensor ") + name), false;
    unsigned long long to_float = 0;
    long long given_k, given_rows;
    if (!PyArg_ParseTuple(entry, "iLLy*K", &out->type, &given_k, &given_rows, view, &to_float)) return false;
    out->k = given_k, out->rows = given_rows;
    if (given_k != k || given_rows != rows || rows <= 0)
        return refuse(std::string(name) + " has " + std::to_string(given_rows) + " rows of " + std::to_string(given_k) + ", not " +
                      std::to_string(rows) + " of " + std::to_string(k)),
               false;
    if (view->len % rows != 0) return refuse(std::string(name) + " is not whole rows"), false;
    out->row_bytes = static_cast<size_t>(view->len / rows);
    out->data = static_cast<const uint8_t *>(view->buf);
    out->to_float = reinterpret_cast<ToFloat>(static_cast<uintptr_t>(to_float));
    const Format *const f = find_format(out->type);
    const bool packed = f != nullptr && k % f->super == 0;
    const size_t expected = packed ? static_cast<size_t>(k / f->super) * static_cast<size_t>(f->src_bytes)
                            : is_plain(out->type) ? static_cast<size_t>(k) * plain_size(out->type)
                                                  : out->row_bytes;
    if (out->row_bytes != expected) return refuse(std::string(name) + " has rows of the wrong size"), false;
    if (out->type != kF32 && out->to_float == nullptr) return refuse(std::string(name) + ": no conversion given"), false;
    return true;
}

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
    auto held = std::make_unique<Held>();
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
        if (!take(tensors, wanted[i].name, wanted[i].k, wanted[i].rows, wanted[i].to, &views[i].view)) return nullptr;

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
        if (!vectors[i].needed) continue;
        PyObject *const entry = PyDict_GetItemString(norms, vectors[i].name);
        if (entry == nullptr) return refuse(std::string("no norm ") + vectors[i].name);
        if (PyObject_GetBuffer(entry, &values[i].view, PyBUF_SIMPLE) != 0) return nullptr;
        if (values[i].size() != vectors[i].n) return refuse(std::string("the norm ") + vectors[i].name + " has the wrong size");
        *vectors[i].to = values[i].data();
    }

    const Kernels *kernels = choose_kernels();
    if (kernels == nullptr) kernels = kernels_reference();
    try {
        held->net = std::make_unique<Eagle3>(s, w, kernels, n_slots, n_threads);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
    std::swap(held->embedding, views[kTensors - 1].view);
    PyObject *const capsule = PyCapsule_New(held.get(), kCapsule, destroy);
    if (capsule != nullptr) held.release();
    return capsule;
}

const char *bad_tokens(const Shape &s, const int32_t *tokens, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= s.n_tokens) return "a token lies outside the embedding";
    return nullptr;
}

// fuse(net, taps f32[n, n_in], g f32[n, n_embd])
PyObject *py_fuse(PyObject *, PyObject *args) {
    PyObject *capsule;
    Numbers<float> taps, g;
    if (!PyArg_ParseTuple(args, "Oy*w*", &capsule, &taps.view, &g.view)) return nullptr;
    Eagle3 *const net = net_of(capsule);
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
    Eagle3 *const net = net_of(capsule);
    if (net == nullptr) return nullptr;
    if (slot < 0 || slot >= net->n_slots() || first < 0 || first > (1 << 24)) return refuse("slot or position out of range");
    if (g.size() != tokens.size() * net->shape().n_embd) return refuse("tokens and states differ in number");
    if (const char *why = bad_tokens(net->shape(), tokens.data(), tokens.size())) return refuse(why);
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
        return bad_tokens(net.shape(), tokens.data(), m);
    }
};

// step(net, slots, positions, tokens i32[m], g f32[m, n_embd], states f32[m, n_embd], logits f32[m, n_draft_vocab])
PyObject *py_step(PyObject *, PyObject *args) {
    Pairs p;
    Numbers<float> states, logits;
    if (!PyArg_ParseTuple(args, "Oy*y*y*y*w*w*", &p.capsule, &p.slots.view, &p.positions.view, &p.tokens.view, &p.g.view,
                          &states.view, &logits.view))
        return nullptr;
    Eagle3 *const net = net_of(p.capsule);
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
    Eagle3 *const net = net_of(p.capsule);
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
    if (const char *why = bad_tokens(net->shape(), ids.data(), ids.size())) return refuse(why);
    return run([&] {
        net->greedy(static_cast<int>(m), p.slots.data(), p.positions.data(), p.tokens.data(), p.g.data(), ks.data(),
                    static_cast<int>(k), p_min, ids.data(), out.data(), probs.data(), counts.data());
    });
}

PyMethodDef methods[] = {
    {"eagle3", py_eagle3, METH_VARARGS, "Build a network; see localspec/drafters/eagle3_net.py."},
    {"fuse", py_fuse, METH_VARARGS, "States of taps."},
    {"extend", py_extend, METH_VARARGS, "Keys and values of pairs."},
    {"step", py_step, METH_VARARGS, "Logits and states of one pair per slot."},
    {"greedy", py_greedy, METH_VARARGS, "Likeliest tokens, one after another."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_draft", "A draft's network.", 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__draft() { return PyModuleDef_Init(&module); }
