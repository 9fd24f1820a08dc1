// localspec._draft: the thin layer between Python's buffers and the networks. Checks sizes and ranges, releases the GIL.
#include "binding.h"

#include <cstring>

namespace ls::draft {

PyObject *refuse(const std::string &why) {
    PyErr_SetString(PyExc_ValueError, why.c_str());
    return nullptr;
}

bool take(PyObject *tensors, const std::string &name, int64_t k, int64_t rows, Stored *out, Numbers<uint8_t> *bytes) {
    PyObject *const entry = PyDict_GetItemString(tensors, name.c_str());
    if (entry == nullptr) return refuse("no tensor " + name), false;
    Py_buffer *const view = &bytes->view;
    unsigned long long to_float = 0;
    long long given_k, given_rows;
    if (!PyArg_ParseTuple(entry, "iLLy*K", &out->type, &given_k, &given_rows, view, &to_float)) return false;
    out->k = given_k, out->rows = given_rows;
    if (given_k != k || given_rows != rows || rows <= 0)
        return refuse(name + " has " + std::to_string(given_rows) + " rows of " + std::to_string(given_k) + ", not " +
                      std::to_string(rows) + " of " + std::to_string(k)),
               false;
    if (view->len % rows != 0) return refuse(name + " is not whole rows"), false;
    out->row_bytes = static_cast<size_t>(view->len / rows);
    out->data = static_cast<const uint8_t *>(view->buf);
    out->to_float = reinterpret_cast<ToFloat>(static_cast<uintptr_t>(to_float));
    const Format *const f = find_format(out->type);
    const bool packed = f != nullptr && k % f->super == 0;
    const size_t expected = packed ? static_cast<size_t>(k / f->super) * static_cast<size_t>(f->src_bytes)
                            : is_plain(out->type) ? static_cast<size_t>(k) * plain_size(out->type)
                                                  : out->row_bytes;
    if (out->row_bytes != expected) return refuse(name + " has rows of the wrong size"), false;
    if (out->type != kF32 && out->to_float == nullptr) return refuse(name + ": no conversion given"), false;
    return true;
}

bool take_vector(PyObject *norms, const std::string &name, int64_t n, const float **to, Numbers<float> *values) {
    PyObject *const entry = PyDict_GetItemString(norms, name.c_str());
    if (entry == nullptr) return refuse("no norm " + name), false;
    if (PyObject_GetBuffer(entry, &values->view, PyBUF_SIMPLE) != 0) return false;
    if (values->size() != n) return refuse("the norm " + name + " has the wrong size"), false;
    *to = values->data();
    return true;
}

const char *bad_tokens(int64_t n_tokens, const int32_t *tokens, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= n_tokens) return "a token lies outside the embedding";
    return nullptr;
}

const Kernels *kernels_in_use() {
    const Kernels *const kernels = choose_kernels();
    return kernels != nullptr ? kernels : kernels_reference();
}

}  // namespace ls::draft

namespace {

PyMethodDef *methods() {
    static PyMethodDef all[32] = {};
    int n = 0;
    for (PyMethodDef *const some : {ls::draft::eagle3_methods, ls::draft::dflash_methods})
        for (const PyMethodDef *m = some; m->ml_name != nullptr && n < 31; m++) all[n++] = *m;
    return all;
}

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_draft", "Networks of drafts.", 0, methods(), nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__draft() { return PyModuleDef_Init(&module); }
