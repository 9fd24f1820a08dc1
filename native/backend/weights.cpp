#include "weights.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "host.h"
#include "pack.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ls {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSlack = 256;  // the last group may be read past its end by a vector

// Bytes of one ne0 x ne1 matrix as it lies in our buffer.
size_t plane_bytes(const Tensor *t) {
    if (const Format *f = find_format(t->type)) return matrix_bytes(*f, t->ne[0], t->ne[1]);
    return t->nb[2];
}

size_t file_row_bytes(const Tensor *t) {
    const Format *const f = find_format(t->type);
    return f ? size_t(t->ne[0] / f->super) * f->src_bytes : t->nb[1];
}

bool is_packed(const Tensor *t) { return !t->view_src && find_format(t->type) && can_multiply(t); }

size_t plain_bytes(const Tensor *t) {
    size_t n = file_row_bytes(t);
    for (int i = 1; i < kMaxDims; i++) n += size_t(t->ne[i] - 1) * t->nb[i];
    return n;
}

const char *get_name(BufferType *) { return "LOCALSPEC"; }
size_t get_alignment(BufferType *) { return kAlignment; }
size_t get_alloc_size(BufferType *, const Tensor *t) {
    if (is_packed(t)) return plane_bytes(t) * size_t(t->ne[2] * t->ne[3]);
    return plain_bytes(t);
}
bool is_host(BufferType *) { return false; }

void free_buffer(Buffer *b) { std::free(b->context); }
void *get_base(Buffer *b) { return b->context; }
int init_tensor(Buffer *, Tensor *) { return kStatusSuccess; }

// Splits the rows [row0, row0 + rows) of all planes into per-thread parts and calls part(plane, first row, rows, offset in
// the file's bytes). Packing is one pass over memory: two threads already come close to what the memory gives.
template <typename F>
void for_rows(const Tensor *t, int64_t row0, int64_t rows, F part) {
    const auto run = [&](int64_t first, int64_t last) {
        while (first < last) {
            const int64_t plane = first / t->ne[1], row = first % t->ne[1];
            const int64_t n = last - first < t->ne[1] - row ? last - first : t->ne[1] - row;
            part(plane, row, n, size_t(first - row0) * file_row_bytes(t));
            first += n;
        }
    };
    const size_t work = size_t(rows) * file_row_bytes(t);
    int64_t threads = work < (size_t(1) << 20) ? 1 : std::thread::hardware_concurrency();
    threads = threads < 1 ? 1 : threads > 8 ? 8 : threads;
    // Whole groups of rows per thread: two threads never write into one group.
    const int64_t step = ((rows + threads - 1) / threads + kGroupRows - 1) / kGroupRows * kGroupRows;
    std::vector<std::thread> pool;
    for (int64_t n = 1; n < threads && n * step < rows; n++)
        pool.emplace_back(run, row0 + n * step, row0 + (n + 1) * step < row0 + rows ? row0 + (n + 1) * step : row0 + rows);
    run(row0, row0 + (step < rows ? step : rows));
    for (std::thread &th : pool) th.join();
}

// Gives the memory behind a mapped model file back once it is packed: the pages stay in the system's file cache and come
// back by themselves if they are read again. Only for read-only mappings of files, where that can lose nothing.
void release_mapping(const void *data, size_t size) {
#if defined(__linux__)
    const uintptr_t page = 4096, from = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t to = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
    if (to <= from || to - from < (64 << 10)) return;
    FILE *const maps = std::fopen("/proc/self/maps", "r");
    if (!maps) return;
    char line[4400], access[8];
    unsigned long start, end, inode;
    while (std::fgets(line, sizeof line, maps)) {
        if (std::sscanf(line, "%lx-%lx %7s %*s %*s %lu", &start, &end, access, &inode) != 4) continue;
        if (start > from || end < to) continue;
        if (inode != 0 && access[0] == 'r' && access[1] != 'w')
            madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
        break;
    }
    std::fclose(maps);
#else
    (void)data;
    (void)size;
#endif
}

bool whole_rows(const Tensor *t, size_t offset, size_t size, int64_t *row0, int64_t *rows) {
    const size_t row = file_row_bytes(t);
    if (offset % row || size % row) {
        warn("%s: packed weights are read and written in whole rows of %zu bytes, not %zu at %zu", t->name, row, size, offset);
        return false;
    }
    *row0 = int64_t(offset / row);
    *rows = int64_t(size / row);
    return true;
}

// A view into a packed tensor is read and written through the tensor itself, at its place in the file's layout.
const Tensor *through_view(const Tensor *t, size_t *offset) {
    if (!t->view_src || !is_packed(t->view_src)) return t;
    *offset += t->view_offs;
    return t->view_src;
}

void set_tensor(Buffer *, Tensor *tensor, const void *data, size_t offset, size_t size) {
    const Tensor *const t = through_view(tensor, &offset);
    if (!is_packed(t)) {
        std::memcpy(static_cast<char *>(t->data) + offset, data, size);
        return;
    }
    int64_t row0, rows;
    if (!whole_rows(t, offset, size, &row0, &rows)) return;
    const Format &f = *find_format(t->type);
    for_rows(t, row0, rows, [&](int64_t plane, int64_t row, int64_t n, size_t at) {
        pack_rows(f, static_cast<const uint8_t *>(data) + at, t->ne[0], row, n,
                  static_cast<uint8_t *>(t->data) + size_t(plane) * plane_bytes(t));
    });
    release_mapping(data, size);
}

void get_tensor(Buffer *, const Tensor *tensor, void *data, size_t offset, size_t size) {
    const Tensor *const t = through_view(tensor, &offset);
    if (!is_packed(t)) {
        std::memcpy(data, static_cast<const char *>(t->data) + offset, size);
        return;
    }
    int64_t row0, rows;
    if (!whole_rows(t, offset, size, &row0, &rows)) return;
    const Format &f = *find_format(t->type);
    for_rows(t, row0, rows, [&](int64_t plane, int64_t row, int64_t n, size_t at) {
        unpack_rows(f, static_cast<const uint8_t *>(t->data) + size_t(plane) * plane_bytes(t), t->ne[0], row, n,
                    static_cast<uint8_t *>(data) + at);
    });
}

void memset_tensor(Buffer *, Tensor *t, uint8_t value, size_t offset, size_t size) {
    if (is_packed(t) && value != 0) return warn("%s: packed weights can only be filled with zeros", t->name);
    if (is_packed(t)) {
        const std::vector<uint8_t> zeros(size);
        return set_tensor(t->buffer, t, zeros.data(), offset, size);
    }
    std::memset(static_cast<char *>(t->data) + offset, value, size);
}

void clear(Buffer *b, uint8_t value) { std::memset(b->context, value, b->size); }

Buffer *alloc_buffer(BufferType *type, size_t size) {
    const size_t room = (size + kSlack + kHugePage - 1) / kHugePage * kHugePage;
    const bool large = size >= kHugePage;
    void *const p = std::aligned_alloc(large ? kHugePage : kAlignment, large ? room : round64(size + kSlack));
    if (!p) return nullptr;
#if defined(__linux__)
    if (large) madvise(p, room, MADV_HUGEPAGE);
#endif
    BufferIface iface{};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.init_tensor = init_tensor;
    iface.memset_tensor = memset_tensor;
    iface.set_tensor = set_tensor;
    iface.get_tensor = get_tensor;
    iface.clear = clear;
    return host().buffer_init(type, iface, p, size);
}

BufferType buffer_type{{get_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, is_host}, nullptr, nullptr};

}  // namespace

BufferType *weights_buffer_type() { return &buffer_type; }

bool in_weights_buffer(const Tensor *t) {
    const Buffer *const b = t->view_src ? t->view_src->buffer : t->buffer;
    return b && b->buft == &buffer_type;
}

bool can_multiply(const Tensor *w) {
    if (is_plain(w->type)) return w->nb[0] == plain_size(w->type);
    const Format *const f = find_format(w->type);
    return f && w->ne[0] % f->super == 0 && w->nb[0] == size_t(f->src_bytes);
}

}  // namespace ls
