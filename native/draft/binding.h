// What the bindings of the networks share: Python's buffers as numbers, tensors with their sizes checked, errors.
#pragma once

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "matrix.h"

namespace ls::draft {

// A borrowed buffer as numbers of one type; released with the scope.
template <class T> struct Numbers {
    Py_buffer view{};

    Numbers() = default;
    Numbers(const Numbers &) = delete;
    Numbers &operator=(const Numbers &) = delete;
    Numbers(Numbers &&other) noexcept { std::swap(view, other.view); }
    ~Numbers() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }
    T *data() const { return static_cast<T *>(view.buf); }
    int64_t size() const { return view.len / static_cast<int64_t>(sizeof(T)); }
};

// A network and the bytes that it reads where they are.
template <class Net> struct Held {
    std::unique_ptr<Net> net;
    std::vector<Numbers<uint8_t>> kept;
};

// Each network's capsule has a name of its own.
template <class Net> extern const char *const kCapsule;

template <class Net> void destroy(PyObject *capsule) {
    delete static_cast<Held<Net> *>(PyCapsule_GetPointer(capsule, kCapsule<Net>));
}

template <class Net> Net *net_of(PyObject *capsule) {
    auto *const held = static_cast<Held<Net> *>(PyCapsule_GetPointer(capsule, kCapsule<Net>));
    return held == nullptr ? nullptr : held->net.get();
}

template <class Net> PyObject *capsule_of(std::unique_ptr<Held<Net>> held) {
    PyObject *const capsule = PyCapsule_New(held.get(), kCapsule<Net>, destroy<Net>);
    if (capsule != nullptr) held.release();
    return capsule;
}

PyObject *refuse(const std::string &why);

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
bool take(PyObject *tensors, const std::string &name, int64_t k, int64_t rows, Stored *out, Numbers<uint8_t> *bytes);

// One entry of the dictionary of vectors, f32[n].
bool take_vector(PyObject *norms, const std::string &name, int64_t n, const float **to, Numbers<float> *values);

const char *bad_tokens(int64_t n_tokens, const int32_t *tokens, int64_t n);

const Kernels *kernels_in_use();

extern PyMethodDef eagle3_methods[], dflash_methods[];

}  // namespace ls::draft
