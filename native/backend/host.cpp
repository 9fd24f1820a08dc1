#include "host.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ls {
namespace {

Host bound;

void *handle_of(void *caller) {
    Dl_info info;
    if (!caller || !dladdr(caller, &info) || !info.dli_fname) return nullptr;
    // Already loaded, so this opens nothing; a lookup through the handle also searches what that library depends on. A
    // program's own name may not be openable: then its global scope is searched instead.
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

template <typename F>
bool find(void *handle, const char *name, F *out) {
    void *p = handle ? dlsym(handle, name) : nullptr;
    if (!p) p = dlsym(RTLD_DEFAULT, name);
    std::memcpy(out, &p, sizeof p);
    return p != nullptr;
}

}  // namespace

bool bind_host(void *caller) {
    void *const handle = handle_of(caller);
    Host h{};
    const char *missing = nullptr;
    if (!find(handle, "ggml_commit", &h.ggml_commit)) missing = "ggml_commit";
    else if (!find(handle, "ggml_backend_buffer_init", &h.buffer_init)) missing = "ggml_backend_buffer_init";
    else if (!find(handle, "ggml_backend_cpu_buffer_type", &h.cpu_buffer_type)) missing = "ggml_backend_cpu_buffer_type";
    else if (!find(handle, "ggml_backend_dev_by_type", &h.dev_by_type)) missing = "ggml_backend_dev_by_type";
    if (handle) dlclose(handle);
    if (missing) {
        warn("this program does not export %s; its own kernels are used", missing);
        return false;
    }
    const char *const commit = h.ggml_commit();
    if (!commit || std::strncmp(commit, kGgmlCommit, std::strlen(kGgmlCommit)) != 0) {
        warn("built for ggml commit %s, this is %s; its own kernels are used", kGgmlCommit, commit ? commit : "unknown");
        return false;
    }
    bound = h;
    return true;
}

const Host &host() { return bound; }

void warn(const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    std::fprintf(stderr, "localspec kernels: %s\n", line);
}

}  // namespace ls
