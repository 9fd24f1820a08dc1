// The part of ggml's backend interface that this plug-in uses, declared by us.
//
// The plug-in is built without ggml present and meets it only at load time, so the structs below are the binary facts of
// ggml at llama.cpp commit 0c1e570 (backend interface version 2): field order and types, nothing else. host.cpp checks the
// version and the commit before any of them is touched; with another ggml the plug-in declines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ls {

constexpr int kBackendApiVersion = 2;
constexpr const char *kGgmlCommit = "0c1e570";

constexpr int kMaxDims = 4;
constexpr int kMaxSrc = 10;
constexpr int kMaxOpParams = 64;
constexpr int kMaxName = 64;

// Numbers of the tensor types in ggml and in GGUF files.
enum Type : int {
    kF32 = 0,
    kF16 = 1,
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
    kIQ4_NL = 20,
    kIQ4_XS = 23,
    kI32 = 26,
    kBF16 = 30,
    kTypeCount = 43,
};

// The operations this plug-in treats specially; every other number is passed on unread.
enum Op : int {
    kOpNone = 0,
    kOpAdd = 2,
    kOpMul = 7,
    kOpRmsNorm = 25,
    kOpMulMat = 29,
    kOpMulMatId = 30,
    kOpReshape = 36,
    kOpView = 37,
    kOpPermute = 38,
    kOpTranspose = 39,
    kOpGetRows = 40,
    kOpSetRows = 42,
    kOpRope = 48,
    kOpFlashAttnExt = 74,
    kOpCustom = 95,
    kOpGlu = 100,
};

constexpr int kFlagCompute = 16;  // set on tensors that a graph has to compute
constexpr int kStatusSuccess = 0;
constexpr int kStatusAllocFailed = -2;
constexpr int kStatusFailed = -1;
constexpr int kAllThreads = -1;  // "as many tasks as there are threads" of a custom op

enum DeviceType : int { kDeviceCpu = 0, kDeviceGpu = 1, kDeviceIgpu = 2, kDeviceAccel = 3 };
enum BufferUsage : int { kUsageAny = 0, kUsageWeights = 1, kUsageCompute = 2 };

struct Buffer;
struct BufferType;
struct Device;
struct Reg;
struct Backend;

struct Tensor {
    int32_t type;
    Buffer *buffer;
    int64_t ne[kMaxDims];  // elements per dimension, innermost first
    size_t nb[kMaxDims];   // bytes from one index to the next, per dimension
    int32_t op;
    int32_t op_params[kMaxOpParams / sizeof(int32_t)];
    int32_t flags;
    Tensor *src[kMaxSrc];
    Tensor *view_src;
    size_t view_offs;
    void *data;
    char name[kMaxName];
    void *extra;
    char padding[8];
};
static_assert(sizeof(void *) != 8 || sizeof(Tensor) == 336, "layout of a tensor at 0c1e570");

struct HashSet {
    size_t size;
    uint32_t *used;
    Tensor **keys;
};

struct Graph {
    int size;
    int n_nodes;
    int n_leafs;
    Tensor **nodes;
    Tensor **grads;
    Tensor **grad_accs;
    Tensor **leafs;
    int32_t *use_counts;
    HashSet visited;
    int order;
    uint64_t uid;
};

struct BufferTypeIface {
    const char *(*get_name)(BufferType *);
    Buffer *(*alloc_buffer)(BufferType *, size_t size);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
};

struct BufferType {
    BufferTypeIface iface;
    Device *device;
    void *context;
};

struct BufferIface {
    void (*free_buffer)(Buffer *);
    void *(*get_base)(Buffer *);
    int (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(Buffer *, Tensor *, const void *data, size_t offset, size_t size);
    void (*get_tensor)(Buffer *, const Tensor *, void *data, size_t offset, size_t size);
    void (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer *, const Tensor *src, Tensor *dst);
    void (*clear)(Buffer *, uint8_t value);
    void (*reset)(Buffer *);
};

struct Buffer {
    BufferIface iface;
    BufferType *buft;
    void *context;
    size_t size;
    int usage;
};

struct BackendIface {
    const char *(*get_name)(Backend *);
    void (*free)(Backend *);
    void (*set_tensor_async)(Backend *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor_async)(Backend *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d_async)(Backend *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d_async)(Backend *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor_async)(Backend *, Backend *, const Tensor *, Tensor *);
    void (*synchronize)(Backend *);
    void *(*graph_plan_create)(Backend *, const Graph *);
    void (*graph_plan_free)(Backend *, void *);
    void (*graph_plan_update)(Backend *, void *, const Graph *);
    int (*graph_plan_compute)(Backend *, void *);
    int (*graph_compute)(Backend *, Graph *);
    void (*event_record)(Backend *, void *);
    void (*event_wait)(Backend *, void *);
    void (*graph_optimize)(Backend *, Graph *, void *params);
};

struct Backend {
    uint8_t (*guid)[16];
    BackendIface iface;
    Device *device;
    void *context;
};

struct DeviceCaps {
    bool async;
    bool host_buffer;
    bool buffer_from_host_ptr;
    bool events;
    bool mmap_support;
};

struct DeviceProps {
    const char *name;
    const char *description;
    size_t memory_free;
    size_t memory_total;
    int type;
    const char *device_id;
    DeviceCaps caps;
};

struct DeviceIface {
    const char *(*get_name)(Device *);
    const char *(*get_description)(Device *);
    void (*get_memory)(Device *, size_t *free, size_t *total);
    int (*get_type)(Device *);
    void (*get_props)(Device *, DeviceProps *);
    Backend *(*init_backend)(Device *, const char *params);
    BufferType *(*get_buffer_type)(Device *);
    BufferType *(*get_host_buffer_type)(Device *);
    Buffer *(*buffer_from_host_ptr)(Device *, void *ptr, size_t size, size_t max_tensor_size);
    bool (*supports_op)(Device *, const Tensor *op);
    bool (*supports_buft)(Device *, BufferType *);
    bool (*offload_op)(Device *, const Tensor *op);
    void *(*event_new)(Device *);
    void (*event_free)(Device *, void *);
    void (*event_synchronize)(Device *, void *);
};

struct Device {
    DeviceIface iface;
    Reg *reg;
    void *context;
};

struct RegIface {
    const char *(*get_name)(Reg *);
    size_t (*get_device_count)(Reg *);
    Device *(*get_device)(Reg *, size_t index);
    void *(*get_proc_address)(Reg *, const char *name);
};

struct Reg {
    int api_version;
    RegIface iface;
    void *context;
};

// What a custom op keeps in op_params.
using CustomFn = void (*)(Tensor *dst, int ith, int nth, void *userdata);
struct CustomParams {
    CustomFn fun;
    int n_tasks;
    void *userdata;
};

}  // namespace ls
