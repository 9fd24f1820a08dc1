// localspec._verify: the thin layer between Python's buffers and the core. Checks sizes, releases the GIL, maps errors.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <cstdint>
#include <new>

#include "accept.h"
#include "kernels.h"
#include "pool.h"

namespace {

using namespace localspec;

// A borrowed buffer as numbers of one type; released with the scope.
template <class T> struct Numbers {
    Py_buffer view{};

    Numbers() = default;
    Numbers(const Numbers &) = delete;
    Numbers & operator=(const Numbers &) = delete;
    ~Numbers() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }

    T * data() const { return static_cast<T *>(view.buf); }
    int64_t size() const { return view.len / static_cast<int64_t>(sizeof(T)); }
};

bool refuse(const char * why) {
    PyErr_Format(PyExc_ValueError, "%s", why);
    return false;
}

// The parts that both functions read.
bool take(Input & in, const Numbers<float> & logits, long long n_vocab, const Numbers<Block> & blocks,
          const Numbers<int32_t> & history, int rule) {
    if (n_vocab <= 0 || n_vocab > INT32_MAX || logits.size() % n_vocab != 0) return refuse("logits are not [rows, vocabulary]");
    if (rule != kMatch && rule != kReject) return refuse("no such rule");
    in = {logits.data(),  logits.size() / n_vocab, n_vocab,        blocks.data(),
          blocks.size(), history.data(),          history.size(), static_cast<Rule>(rule)};
    return true;
}

// None when all went well, the number of the row that can't be judged, or an exception.
template <class Work> PyObject * run(Work work) {
    int64_t result;
    Py_BEGIN_ALLOW_THREADS
    try {
        result = work();
    } catch (const std::bad_alloc &) {
        result = kNoMemory;
    }
    Py_END_ALLOW_THREADS
    if (result == kNoMemory) return PyErr_NoMemory();
    if (result == kDone) Py_RETURN_NONE;
    return PyLong_FromLongLong(result);
}

PyObject * py_verify(PyObject *, PyObject * args) {
    Numbers<float> logits, q_probs, p_drafted;
    Numbers<Block> blocks;
    Numbers<int32_t> tokens, history, q_ids, q_starts, out_tokens, counts;
    Numbers<uint8_t> eog;
    long long n_vocab;
    int rule;
    if (!PyArg_ParseTuple(args, "y*Ly*y*y*y*y*y*iz*w*w*w*", &logits.view, &n_vocab, &blocks.view, &tokens.view, &history.view,
                          &q_ids.view, &q_probs.view, &q_starts.view, &rule, &eog.view, &out_tokens.view, &p_drafted.view,
                          &counts.view)) {
        return nullptr;
    }
    Input in;
    if (!take(in, logits, n_vocab, blocks, history, rule)) return nullptr;
    const Drafted drafted = {tokens.data(),   tokens.size(),   q_ids.data(),    q_probs.data(),
                             q_ids.size(),    q_starts.data(), q_starts.size(), eog.data()};
    const char * why = misfit(in, drafted);
    if (why == nullptr && q_probs.size() != q_ids.size()) why = "q_ids and q_probs differ in number";
    if (why == nullptr && eog.data() != nullptr && eog.size() != n_vocab) why = "eog has not the vocabulary's size";
    if (why == nullptr && (out_tokens.size() != in.n_rows || p_drafted.size() != in.n_rows || counts.size() != 3 * in.n_blocks)) {
        why = "the output arrays have the wrong size";
    }
    if (why != nullptr) return refuse(why), nullptr;
    const Verdicts out = {out_tokens.data(), p_drafted.data(), counts.data()};
    return run([&] { return verify(in, drafted, out); });
}

PyObject * py_draw(PyObject *, PyObject * args) {
    Numbers<float> logits, probs, q_probs;
    Numbers<Block> blocks;
    Numbers<int32_t> history, tokens, q_ids, q_starts;
    long long n_vocab;
    int rule, with_q;
    if (!PyArg_ParseTuple(args, "y*Ly*y*ipw*w*w*w*w*", &logits.view, &n_vocab, &blocks.view, &history.view, &rule, &with_q,
                          &tokens.view, &probs.view, &q_ids.view, &q_probs.view, &q_starts.view)) {
        return nullptr;
    }
    Input in;
    if (!take(in, logits, n_vocab, blocks, history, rule)) return nullptr;
    const char * why = misfit(in, Drafted{});
    if (why == nullptr && in.n_blocks != in.n_rows) why = "settings and rows of logits differ in number";
    if (why == nullptr && (tokens.size() != in.n_rows || probs.size() != in.n_rows || q_starts.size() != in.n_rows + 1)) {
        why = "the output arrays have the wrong size";
    }
    if (why == nullptr && with_q) {
        int64_t room = 0;
        for (int64_t r = 0; r < in.n_rows; r++) room += most_kept(in.blocks[r], in.n_vocab);
        if (room > INT32_MAX) why = "the distributions are too large for one call";
        if (q_ids.size() != room || q_probs.size() != room) why = "the output arrays have the wrong size";
    }
    if (why != nullptr) return refuse(why), nullptr;
    const Draws out = {tokens.data(), probs.data(), with_q ? q_ids.data() : nullptr, q_probs.data(), q_starts.data()};
    return run([&] { return draw(in, out); });
}

PyObject * py_top_k(PyObject *, PyObject * args) {
    Numbers<float> logits, values, largest, log_sum;
    Numbers<int32_t> ids;
    long long n_vocab, k;
    if (!PyArg_ParseTuple(args, "y*LLw*w*w*w*", &logits.view, &n_vocab, &k, &ids.view, &values.view, &largest.view,
                          &log_sum.view)) {
        return nullptr;
    }
    if (n_vocab <= 0 || n_vocab > INT32_MAX || logits.size() % n_vocab != 0) {
        return refuse("logits are not [rows, vocabulary]"), nullptr;
    }
    const int64_t n_rows = logits.size() / n_vocab;
    if (k < 1 || k > n_vocab) return refuse("k must be between 1 and the vocabulary's size"), nullptr;
    if (ids.size() != n_rows * k || values.size() != n_rows * k || largest.size() != n_rows || log_sum.size() != n_rows) {
        return refuse("the output arrays have the wrong size"), nullptr;
    }
    const Tops out = {ids.data(), values.data(), largest.data(), log_sum.data()};
    return run([&] { return top_k(logits.data(), n_rows, n_vocab, k, out); });
}

PyObject * py_isa(PyObject *, PyObject *) { return PyUnicode_FromString(kernels().name); }

PyObject * py_isas(PyObject *, PyObject *) {
    PyObject * names = PyList_New(0);
    for (int n = 0; names != nullptr && kernels_name(n) != nullptr; n++) {
        PyObject * name = PyUnicode_FromString(kernels_name(n));
        if (name == nullptr || PyList_Append(names, name) != 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyObject * py_set_isa(PyObject *, PyObject * args) {
    const char * name;
    if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
    if (!kernels_use(name)) return PyErr_Format(PyExc_ValueError, "this CPU has no kernels '%s'", name);
    Py_RETURN_NONE;
}

PyObject * py_set_threads(PyObject *, PyObject * args) {
    int n;
    if (!PyArg_ParseTuple(args, "i", &n)) return nullptr;
    if (n < 0 || n > 64) return refuse("threads must be between 0 and 64"), nullptr;
    set_threads(n);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"verify", py_verify, METH_VARARGS, "Judge blocks; see localspec.accept.verify. None, or the row that can't be judged."},
    {"draw", py_draw, METH_VARARGS, "Draw a token per row; see localspec.accept.draw. None, or the row that can't be judged."},
    {"top_k", py_top_k, METH_VARARGS, "Largest logits per row; see localspec.topk.top_k. None, or the row without any."},
    {"isa", py_isa, METH_NOARGS, "Name of the kernels in use."},
    {"isas", py_isas, METH_NOARGS, "Names of the kernels that this CPU can run, best first."},
    {"set_isa", py_set_isa, METH_VARARGS, "Use the kernels of that name (for tests)."},
    {"set_threads", py_set_threads, METH_VARARGS, "Threads per call, 0: automatic."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_verify", "Accept and reject, vectorised.", 0, methods, nullptr, nullptr,
                      nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__verify() { return PyModuleDef_Init(&module); }
