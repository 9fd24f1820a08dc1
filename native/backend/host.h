// The few functions of the ggml that loaded us, found at load time.
#pragma once

#include "ggml_abi.h"

namespace ls {

struct Host {
    const char *(*ggml_commit)();
    Buffer *(*buffer_init)(BufferType *, BufferIface, void *context, size_t size);
    BufferType *(*cpu_buffer_type)();
    Device *(*dev_by_type)(int type);
};

// Finds the host's functions through the code address `caller` inside the library (or program) that loaded us, and checks
// that it is the ggml we were written against. Prints one line and returns false when it is not.
bool bind_host(void *caller);

// Valid after bind_host returned true.
const Host &host();

// One line on standard error, for the rare things a person should know.
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace ls
