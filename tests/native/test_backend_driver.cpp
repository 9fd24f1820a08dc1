// Checks of the multiplication kernels below the level of ggml: packing is exact, every instruction set equals the plain C
// twin bit for bit, results are right against float64, and neither the number of columns nor of threads changes a bit.
// Prints what ran, one line per failure, and returns their number.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../../native/backend/barrier.h"
#include "../../native/backend/kernels.h"
#include "../../native/backend/multiply.h"
#include "../../native/backend/pack.h"

using namespace ls;

static int failures = 0;

#define CHECK(condition, ...)                          \
    do {                                               \
        if (!(condition)) {                            \
            std::printf("FAIL %s: ", #condition);      \
            std::printf(__VA_ARGS__);                  \
            std::printf("\n");                         \
            failures++;                                \
        }                                              \
    } while (0)

static uint64_t state = 1;
static uint32_t random32() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33) ^ uint32_t(state >> 11);
}
static float gauss() {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += float(random32() & 0xffffff) / 16777216.0f;
    return sum;
}

// Random bytes are valid quants of every type; only the half-precision scales need care.
static uint16_t random_half() { return uint16_t((random32() & 0x83ff) | (10 + random32() % 4) << 10); }

static std::vector<uint8_t> random_weights(const Format &f, int64_t k, int64_t rows) {
    const int64_t supers = k / f.super * rows;
    std::vector<uint8_t> w(size_t(supers) * f.src_bytes);
    for (uint8_t &b : w) b = uint8_t(random32());
    for (int64_t i = 0; i < supers; i++) {
        uint8_t *const b = &w[size_t(i) * f.src_bytes];
        const uint16_t d = random_half(), m = random_half();
        std::memcpy(f.type == kQ6_K ? b + 208 : b, &d, 2);
        if (f.scales == Scales::kMin || f.scales == Scales::kK) std::memcpy(b + 2, &m, 2);
    }
    return w;
}

static double half(const uint8_t *p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

// Value j of a superblock as the file format defines it, read from the file's bytes and not from our packing.
static double value(const Format &f, const uint8_t *b, int j) {
    const auto nibble = [&](const uint8_t *qs) { return (qs[j % 16] >> (j < 16 ? 0 : 4)) & 15; };
    switch (f.type) {
        case kQ4_0: return half(b) * (nibble(b + 2) - 8);
        case kQ4_1: return half(b) * nibble(b + 4) + half(b + 2);
        case kQ5_0: return half(b) * ((nibble(b + 6) | ((b[2 + j / 8] >> (j % 8)) & 1) << 4) - 16);
        case kQ5_1: return half(b) * (nibble(b + 8) | ((b[4 + j / 8] >> (j % 8)) & 1) << 4) + half(b + 2);
        case kQ8_0: return half(b) * int8_t(b[2 + j]);
        case kIQ4_NL: return half(b) * (kIq4Table[nibble(b + 2)] - 128);
        case kQ4_K:
        case kQ5_K: {
            const int g = j / 32, l = j % 32;
            const uint8_t *const s = b + 4;
            const int sc = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
            const int mn = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
            const uint8_t *const qs = b + (f.type == kQ4_K ? 16 : 48);
            int q = (qs[g / 2 * 32 + l] >> (g % 2 * 4)) & 15;
            if (f.type == kQ5_K) q |= ((b[16 + l] >> g) & 1) << 4;
            return half(b) * sc * q - half(b + 2) * mn;
        }
        case kQ6_K: {
            const int n = j / 128, part = j % 128 / 32, l = j % 32;
            const int low = (b[64 * n + 32 * (part % 2) + l] >> (part / 2 * 4)) & 15;
            const int high = (b[128 + 32 * n + l] >> (2 * part)) & 3;
            return half(b + 208) * int8_t(b[192 + j / 16]) * ((low | high << 4) - 32);
        }
        default: {  // IQ4_XS
            const int g = j / 32, high = b[2] | b[3] << 8;
            const int sc = ((b[4 + g / 2] >> (4 * (g % 2))) & 15) | ((high >> (2 * g)) & 3) << 4;
            const int q = (b[8 + 16 * g + j % 16] >> (j % 32 < 16 ? 0 : 4)) & 15;
            return half(b) * (sc - 32) * (kIq4Table[q] - 128);
        }
    }
}

static void check_packing(const Format &f, int64_t k, int64_t rows) {
    const std::vector<uint8_t> w = random_weights(f, k, rows);
    std::vector<uint8_t> packed(matrix_bytes(f, k, rows)), back(w.size(), 0x5a);
    const int64_t split = rows / 2;
    pack_rows(f, w.data() + w.size() / size_t(rows) * size_t(split), k, split, rows - split, packed.data());
    pack_rows(f, w.data(), k, 0, split, packed.data());
    unpack_rows(f, packed.data(), k, 0, rows, back.data());
    CHECK(w == back, "type %d, k %" PRId64 ", rows %" PRId64, f.type, k, rows);
}

struct Problem {
    const Format &f;
    int64_t k, rows;
    std::vector<uint8_t> file, packed;
    std::vector<float> x;  // 8 columns
    Problem(const Format &format, int64_t k_, int64_t rows_) : f(format), k(k_), rows(rows_) {
        file = random_weights(f, k, rows);
        packed.resize(matrix_bytes(f, k, rows));
        pack_rows(f, file.data(), k, 0, rows, packed.data());
        x.resize(size_t(8 * k));
        for (float &v : x) v = gauss() * (random32() % 97 == 0 ? 12.0f : 1.0f);
    }
    std::vector<float> run(const Kernels &kernels, int nc, int first = 0) const {
        std::vector<float> y(size_t(nc * rows), -1.0f);
        std::vector<uint8_t> act(size_t(k / 32) * act_block_bytes(nc));
        const float *src[8];
        float *dst[8];
        for (int c = 0; c < nc; c++) src[c] = &x[size_t((first + c) * k)], dst[c] = &y[size_t(c * rows)];
        kernels.quantize(act_kind(f), src, nc, 0, k / 32, act.data());
        kernels.multiply[format_index(&f)](packed.data(), k, group_count(rows), rows, act.data(), nc, dst);
        return y;
    }
};

static void check_kernels(const Kernels &kernels, const Format &f, int64_t k, int64_t rows) {
    const Problem p(f, k, rows);
    const std::vector<float> all = p.run(kernels, 8), twin = p.run(*kernels_reference(), 8);
    CHECK(std::memcmp(all.data(), twin.data(), all.size() * 4) == 0, "%s, type %d, k %" PRId64 ", rows %" PRId64, kernels.name,
          f.type, k, rows);
    for (int nc = 1; nc < 8; nc++)
        for (int first = 0; first + nc <= 8; first += nc) {
            const std::vector<float> some = p.run(kernels, nc, first);
            CHECK(std::memcmp(some.data(), &all[size_t(first * rows)], some.size() * 4) == 0,
                  "%s, type %d, k %" PRId64 ", rows %" PRId64 ", %d columns", kernels.name, f.type, k, rows, nc);
        }
    double error = 0, power = 0;
    for (int c = 0; c < 8; c++)
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0;
            for (int64_t i = 0; i < k; i++) {
                const double w = value(f, &p.file[size_t(r * (k / f.super) + i / f.super) * f.src_bytes], int(i % f.super));
                sum += w * p.x[size_t(c * k + i)];
                // Of the products, not of their sum: that may cancel when there is one row only.
                power += w * w * p.x[size_t(c * k + i)] * p.x[size_t(c * k + i)];
            }
            const double d = all[size_t(c * rows + r)] - sum;
            error += d * d;
        }
    // Rounding activations to 8 bits per 32 values costs about 3e-5; one block of 32 alone can lose more.
    CHECK(error <= 3e-3 * power, "%s, type %d, k %" PRId64 ": NMSE %g", kernels.name, f.type, k, error / power);
}

static void check_extremes(const Kernels &kernels, const Format &f) {
    Problem p(f, f.super, 16);
    const std::vector<float> before = p.run(kernels, 2);
    const float bad[] = {INFINITY, -INFINITY, NAN};
    for (float v : bad) {
        Problem q = p;
        q.x[5] = v;
        const std::vector<float> y = q.run(kernels, 2);
        CHECK(!std::isfinite(y[0]), "%s, type %d: %g gave %g", kernels.name, f.type, v, y[0]);
        CHECK(std::memcmp(&y[16], &before[16], 64) == 0, "%s, type %d: a neighbour changed", kernels.name, f.type);
    }
    for (float scale : {1e-45f, 1e-40f, 1e-38f, 0.0f}) {
        Problem q = p;
        for (float &v : q.x) v = std::copysign(scale, v);
        for (float v : q.run(kernels, 3)) CHECK(std::fabs(v) < 1e-25f, "%s, type %d: %g gave %g", kernels.name, f.type, scale, v);
    }
    Problem q = p;
    for (float &v : q.x) v *= 1e30f;
    for (float v : q.run(kernels, 1)) CHECK(std::isfinite(v) || std::fabs(v) > 1e30f, "%s, type %d", kernels.name, f.type);
}

template <typename F>
static void on_threads(int n, F f) {
    std::vector<std::thread> pool;
    for (int i = 1; i < n; i++) pool.emplace_back(f, i);
    f(0);
    for (std::thread &t : pool) t.join();
}

static void shape(Tensor *t, int type, size_t size, std::vector<int64_t> ne, void *data) {
    std::memset(static_cast<void *>(t), 0, sizeof *t);
    t->type = type;
    t->data = data;
    for (int i = 0; i < kMaxDims; i++) t->ne[i] = ne[size_t(i)];
    t->nb[0] = size;
    const Format *const f = find_format(type);
    t->nb[1] = f ? size_t(ne[0] / f->super) * f->src_bytes : size * size_t(ne[0]);
    for (int i = 2; i < kMaxDims; i++) t->nb[i] = t->nb[i - 1] * size_t(ne[size_t(i) - 1]);
}

// A whole operation with planes that are broadcast and columns that are strided, by several threads.
static void check_operation(const Kernels &kernels, int type, int n_threads) {
    const Format *const f = find_format(type);
    const int64_t k = f ? f->super * 2 : 77, rows = 37, n1 = 11, n2 = 6, n3 = 2, p2 = 3, p3 = 1;
    std::vector<uint8_t> w;
    Tensor weights, x, y;
    if (f) {
        w.resize(matrix_bytes(*f, k, rows) * size_t(p2 * p3));
        for (int64_t p = 0; p < p2 * p3; p++) {
            const std::vector<uint8_t> file = random_weights(*f, k, rows);
            pack_rows(*f, file.data(), k, 0, rows, w.data() + matrix_bytes(*f, k, rows) * size_t(p));
        }
        shape(&weights, type, size_t(f->src_bytes), {k, rows, p2, p3}, w.data());
    } else {
        w.resize(plain_size(type) * size_t(k * rows * p2 * p3));
        for (size_t i = 0; i < w.size() / plain_size(type); i++) {
            const float v = gauss();
            uint32_t bits;
            std::memcpy(&bits, &v, 4);
            const uint16_t h = type == kF16 ? random_half() : uint16_t(bits >> 16);
            std::memcpy(&w[i * plain_size(type)], type == kF32 ? static_cast<const void *>(&v) : &h, plain_size(type));
        }
        shape(&weights, type, plain_size(type), {k, rows, p2, p3}, w.data());
    }
    // Every second float, so that the columns have to be gathered.
    std::vector<float> data(size_t(2 * k * n1 * n2 * n3)), out(size_t(rows * n1 * n2 * n3)), other(out.size());
    for (float &v : data) v = gauss();
    shape(&x, kF32, 4, {k, n1, n2, n3}, data.data());
    x.nb[0] = 8;
    for (int i = 1; i < kMaxDims; i++) x.nb[i] *= 2;
    Tensor op;
    const auto run = [&](std::vector<float> &to, int threads) {
        shape(&y, kF32, 4, {rows, n1, n2, n3}, to.data());
        op = y;
        op.op = kOpMulMat;
        op.src[0] = &weights;
        op.src[1] = &x;
        Activations acts;
        acts.take(Activations::describe(&op));
        acts.route();
        std::vector<uint8_t> room(acts.bytes() + 64);
        acts.data = room.data();
        const Quantize quantize{&kernels, &acts};
        Multiply multiply;
        multiply.set(&kernels, &acts, &op, threads);
        Barrier barrier;
        on_threads(threads, [&](int i) {
            quantize.run(i, threads);
            barrier.wait(threads);
            multiply.run(i, threads);
        });
    };
    run(out, 1);
    run(other, n_threads);
    CHECK(std::memcmp(out.data(), other.data(), out.size() * 4) == 0, "%s, type %d, %d threads", kernels.name, type, n_threads);
    // One column alone, at (i1, i2, i3).
    for (int i = 0; i < 6; i++) {
        const int64_t i1 = random32() % n1, i2 = random32() % n2, i3 = random32() % n3, plane = i2 / (n2 / p2);
        std::vector<float> column(static_cast<size_t>(k)), alone(static_cast<size_t>(rows));
        for (int64_t j = 0; j < k; j++) column[size_t(j)] = data[size_t(2 * (j + k * (i1 + n1 * (i2 + n2 * i3))))];
        const float *const src = column.data();
        float *const dst = alone.data();
        if (f) {
            std::vector<uint8_t> act(size_t(k / 32) * act_block_bytes(1));
            kernels.quantize(act_kind(*f), &src, 1, 0, k / 32, act.data());
            kernels.multiply[format_index(f)](w.data() + matrix_bytes(*f, k, rows) * size_t(plane), k, group_count(rows), rows,
                                              act.data(), 1, &dst);
        } else {
            const PlainFn plain = type == kF32 ? kernels.plain_f32 : type == kF16 ? kernels.plain_f16 : kernels.plain_bf16;
            plain(w.data() + weights.nb[2] * size_t(plane), weights.nb[1], k, rows, &src, 1, &dst);
            std::vector<float> exact(static_cast<size_t>(rows));
            float *const exact_dst = exact.data();
            const Kernels &ref = *kernels_reference();
            (type == kF32 ? ref.plain_f32 : type == kF16 ? ref.plain_f16 : ref.plain_bf16)(
                w.data() + weights.nb[2] * size_t(plane), weights.nb[1], k, rows, &src, 1, &exact_dst);
            for (int64_t r = 0; r < rows; r++)
                CHECK(std::fabs(exact[size_t(r)] - alone[size_t(r)]) <= 1e-4f + 1e-5f * std::fabs(exact[size_t(r)]),
                      "%s, type %d: %g for %g", kernels.name, type, alone[size_t(r)], exact[size_t(r)]);
        }
        CHECK(std::memcmp(alone.data(), &out[size_t(rows * (i1 + n1 * (i2 + n2 * i3)))], size_t(rows) * 4) == 0,
              "%s, type %d: column %" PRId64 " %" PRId64 " %" PRId64, kernels.name, type, i1, i2, i3);
    }
}

// Experts: each token's columns go to the experts its ids name; one id is out of range and must be left out.
static void check_experts(const Kernels &kernels, int type, int n_threads, bool shared_input) {
    const Format &f = *find_format(type);
    const int64_t k = f.super, rows = 20, experts = 5, used = 3, tokens = 23;
    std::vector<uint8_t> w(matrix_bytes(f, k, rows) * size_t(experts));
    for (int64_t e = 0; e < experts; e++) {
        const std::vector<uint8_t> file = random_weights(f, k, rows);
        pack_rows(f, file.data(), k, 0, rows, w.data() + matrix_bytes(f, k, rows) * size_t(e));
    }
    std::vector<float> data(size_t(k * used * tokens)), out(size_t(rows * used * tokens), -7.0f);
    for (float &v : data) v = gauss();
    std::vector<int32_t> ids(size_t(used * tokens));
    for (int32_t &id : ids) id = int32_t(random32() % experts);
    ids[4] = -1;
    Tensor weights, x, id, op;
    shape(&weights, type, size_t(f.src_bytes), {k, rows, experts, 1}, w.data());
    shape(&x, kF32, 4, {k, shared_input ? 1 : used, tokens, 1}, data.data());
    shape(&id, kI32, 4, {used, tokens, 1, 1}, ids.data());
    shape(&op, kF32, 4, {rows, used, tokens, 1}, out.data());
    op.op = kOpMulMatId;
    op.src[0] = &weights;
    op.src[1] = &x;
    op.src[2] = &id;
    Activations acts;
    acts.take(Activations::describe(&op));
    std::vector<uint8_t> room(acts.bytes() + 64);
    acts.data = room.data();
    acts.route();
    const Quantize quantize{&kernels, &acts};
    Multiply multiply;
    multiply.set(&kernels, &acts, &op, n_threads);
    Barrier barrier;
    on_threads(n_threads, [&](int i) {
        quantize.run(i, n_threads);
        barrier.wait(n_threads);
        multiply.run(i, n_threads);
    });
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t s = 0; s < used; s++) {
            const float *const y = &out[size_t(rows * (s + used * t))];
            const int32_t e = ids[size_t(s + used * t)];
            if (e < 0) {
                CHECK(y[0] == -7.0f, "a column without an expert was written");
                continue;
            }
            const float *const src = &data[size_t(k * (shared_input ? t : s + used * t))];
            std::vector<float> alone(static_cast<size_t>(rows));
            float *const dst = alone.data();
            std::vector<uint8_t> act(size_t(k / 32) * act_block_bytes(1));
            kernels.quantize(act_kind(f), &src, 1, 0, k / 32, act.data());
            kernels.multiply[format_index(&f)](w.data() + matrix_bytes(f, k, rows) * size_t(e), k, group_count(rows), rows,
                                               act.data(), 1, &dst);
            CHECK(std::memcmp(alone.data(), y, size_t(rows) * 4) == 0, "%s, type %d, token %" PRId64, kernels.name, type, t);
        }
}

// With --list only the names of what would run.
int main(int argc, char **argv) {
    std::printf("ran: reference");
    std::vector<const Kernels *> all{kernels_reference()};
    for (const char *name : {"avx512", "avxvnni", "avx2", "neon-i8mm", "neon"})
        if (const Kernels *const k = kernels_named(name)) {
            std::printf(" %s", name);
            all.push_back(k);
        }
    std::printf("\n");
    if (argc > 1 && std::strcmp(argv[1], "--list") == 0) return 0;
    for (const Format &f : kFormats) {
        check_packing(f, f.super * 3, 21);
        check_packing(f, f.super, 1);
        for (const Kernels *k : all) {
            for (int64_t rows : {1, 16, 37}) check_kernels(*k, f, f.super * (rows == 16 ? 5 : 1), rows);
            check_extremes(*k, f);
            for (int threads : {2, 3}) {
                check_operation(*k, f.type, threads);
                check_experts(*k, f.type, threads, threads == 2);
            }
        }
    }
    for (const Kernels *k : all)
        for (int type : {kF32, kF16, kBF16}) check_operation(*k, type, 2);
    std::printf("%d failures\n", failures);
    return failures > 125 ? 125 : failures;
}
