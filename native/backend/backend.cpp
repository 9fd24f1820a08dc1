// The plug-in as ggml sees it: one registry entry, one device, and a backend per context.
//
// The registered device offers our buffer type, so that llama.cpp places weights there. Each backend has a device struct of
// its own with the CPU's buffer type instead: what a graph computes then lies in ordinary memory that the CPU backend and
// this one share. A backend claims every operation the CPU backend can do ("whole") and hands the rewritten graph to a CPU
// backend of its own, so that a decode is one piece of work for one team of threads; or only the operations it has kernels
// for ("split"), which costs a hand-over at each of them. LOCALSPEC_GRAPH=whole|split chooses, whole is the default.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "flash_op.h"
#include "graph.h"
#include "host.h"
#include "kernels.h"
#include "weights.h"

#define LS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ls {
namespace {

constexpr const char *kName = "LOCALSPEC";

// A probe graph has one token per sequence, a prompt graph as many as fit into a batch; no more sequences than this in use.
constexpr int64_t kProbeTokens = 64;

const Kernels *kernels = nullptr;
std::string description;
Device registered;
Reg registry;
std::atomic<long long> multiplications{0}, attentions{0};

Device *cpu_device() {
    static Device *const dev = host().dev_by_type(kDeviceCpu);
    return dev;
}

template <typename F>
F cpu_function(const char *name) {
    Reg *const reg = cpu_device()->reg;
    void *const p = reg->iface.get_proc_address ? reg->iface.get_proc_address(reg, name) : nullptr;
    F f;
    std::memcpy(&f, &p, sizeof f);
    return f;
}

// With a GPU in the program only the multiplications whose weights it left to the CPU are ours.
bool claims_everything() {
    static const bool whole = [] {
        const char *const mode = std::getenv("LOCALSPEC_GRAPH");
        if (mode && std::strcmp(mode, "split") == 0) return false;
        return !host().dev_by_type(kDeviceGpu) && !host().dev_by_type(kDeviceIgpu);
    }();
    return whole;
}

struct Context {
    Backend backend;
    Device device;
    Backend *inner = nullptr;
    Rewriter rewriter{kernels};
    int n_threads = 4;
    // llama.cpp with flash attention on "auto" first splits a small graph and switches it off when the attention is not with
    // the layer's device, the CPU. Until a graph of another size follows, attention is left to the CPU backend.
    int64_t probe_tokens = -1;
    bool probing = true;

    Context() = default;
    ~Context() {
        if (inner) inner->iface.free(inner);
    }
};

Context *context_of(Backend *b) { return static_cast<Context *>(b->context); }
Context *context_of(Device *d) { return static_cast<Context *>(d->context); }

bool claims_attention(Context *ctx, const Tensor *op) {
    if (!is_our_attention(op)) return false;
    if (!ctx->probing) return true;
    const int64_t tokens = op->src[0]->ne[1] * op->src[0]->ne[3];
    if (ctx->probe_tokens < 0) ctx->probe_tokens = tokens;
    ctx->probing = tokens == ctx->probe_tokens && tokens <= kProbeTokens;
    return !ctx->probing;
}

// --- backend

const char *backend_name(Backend *) { return kName; }
void backend_free(Backend *b) { delete context_of(b); }

int backend_compute(Backend *b, Graph *graph) {
    Context *const ctx = context_of(b);
    Graph *const g = ctx->rewriter.rewrite(graph, ctx->n_threads);
    if (!g) return kStatusAllocFailed;
    multiplications += ctx->rewriter.multiplications;
    attentions += ctx->rewriter.attentions;
    return ctx->inner->iface.graph_compute(ctx->inner, g);
}

void backend_optimize(Backend *, Graph *graph, void *) { gather_multiplications(graph); }

void set_n_threads(Backend *b, int n) {
    Context *const ctx = context_of(b);
    ctx->n_threads = n;
    if (const auto f = cpu_function<void (*)(Backend *, int)>("ggml_backend_set_n_threads")) f(ctx->inner, n);
}

void set_abort_callback(Backend *b, bool (*callback)(void *), void *data) {
    const auto f = cpu_function<void (*)(Backend *, bool (*)(void *), void *)>("ggml_backend_set_abort_callback");
    if (f) f(context_of(b)->inner, callback, data);
}

// --- device: shared parts

const char *device_name(Device *) { return kName; }
const char *device_description(Device *) { return description.c_str(); }
void device_memory(Device *, size_t *free, size_t *total) { *free = *total = 0; }
int device_type(Device *) { return kDeviceAccel; }
void device_props(Device *d, DeviceProps *props) {
    *props = DeviceProps{};
    props->name = device_name(d);
    props->description = device_description(d);
    props->type = kDeviceAccel;
    props->caps.mmap_support = true;
}

Backend *init_backend(Device *, const char *);

// --- the registered device: asked while a model is loaded

BufferType *registered_buffer_type(Device *) { return weights_buffer_type(); }
bool registered_supports_op(Device *, const Tensor *op) {
    if (op->op == kOpNone) return true;
    return is_our_multiplication(op) && in_weights_buffer(op->src[0]);
}
bool registered_supports_buft(Device *, BufferType *t) {
    return t == weights_buffer_type() || (t->iface.is_host && t->iface.is_host(t));
}

// --- a backend's own device: asked while a graph is split

BufferType *own_buffer_type(Device *) { return host().cpu_buffer_type(); }
bool own_supports_op(Device *d, const Tensor *op) {
    if (is_our_multiplication(op)) return claims_everything() || in_weights_buffer(op->src[0]);
    for (const Tensor *src : op->src)
        if (src && in_weights_buffer(src) && !is_plain(src->type)) return false;
    if (op->op == kOpFlashAttnExt) return claims_everything() && claims_attention(context_of(d), op);
    if (!claims_everything()) return op->op == kOpNone;
    return cpu_device()->iface.supports_op(cpu_device(), op);
}
bool own_supports_buft(Device *d, BufferType *t) { return registered_supports_buft(d, t); }

uint8_t guid[16] = {0x6c, 0x6f, 0x63, 0x61, 0x6c, 0x73, 0x70, 0x65, 0x63, 0x2d, 0x6b, 0x65, 0x72, 0x6e, 0x65, 0x6c};

Backend *init_backend(Device *, const char *) {
    auto ctx = std::make_unique<Context>();
    ctx->inner = cpu_device()->iface.init_backend(cpu_device(), nullptr);
    if (!ctx->inner) return nullptr;
    ctx->device = registered;
    ctx->device.context = ctx.get();
    ctx->device.iface.get_buffer_type = own_buffer_type;
    ctx->device.iface.supports_op = own_supports_op;
    ctx->device.iface.supports_buft = own_supports_buft;
    ctx->backend = Backend{};
    ctx->backend.guid = &guid;
    ctx->backend.iface.get_name = backend_name;
    ctx->backend.iface.free = backend_free;
    ctx->backend.iface.graph_compute = backend_compute;
    ctx->backend.iface.graph_optimize = backend_optimize;
    ctx->backend.device = &ctx->device;
    ctx->backend.context = ctx.get();
    return &ctx.release()->backend;
}

// --- registry

const char *registry_name(Reg *) { return kName; }
size_t registry_count(Reg *) { return 1; }
Device *registry_device(Reg *, size_t) { return &registered; }

// How much work went through our kernels since the start; for tests and for `inspect`.
void counters(long long *n_multiplications, long long *n_attentions) {
    *n_multiplications = multiplications;
    *n_attentions = attentions;
}

void *registry_function(Reg *, const char *name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void *>(set_n_threads);
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) return reinterpret_cast<void *>(set_abort_callback);
    if (std::strcmp(name, "localspec_counters") == 0) return reinterpret_cast<void *>(counters);
    return nullptr;
}

}  // namespace
}  // namespace ls

LS_EXPORT int ggml_backend_score() {
    const ls::Kernels *const k = ls::choose_kernels();
    return k ? 1 : 0;
}

LS_EXPORT ls::Reg *ggml_backend_init() {
    using namespace ls;
    kernels = choose_kernels();
    if (!kernels || !bind_host(__builtin_return_address(0))) return nullptr;
    description = std::string("localspec kernels (") + kernels->name + ")";
    registered = Device{};
    registered.iface.get_name = device_name;
    registered.iface.get_description = device_description;
    registered.iface.get_memory = device_memory;
    registered.iface.get_type = device_type;
    registered.iface.get_props = device_props;
    registered.iface.init_backend = init_backend;
    registered.iface.get_buffer_type = registered_buffer_type;
    registered.iface.supports_op = registered_supports_op;
    registered.iface.supports_buft = registered_supports_buft;
    registered.reg = &registry;
    registry.api_version = kBackendApiVersion;
    registry.iface = RegIface{registry_name, registry_count, registry_device, registry_function};
    weights_buffer_type()->device = &registered;
    return &registry;
}
