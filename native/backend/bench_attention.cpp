// Micro-benchmark of the attention kernels: all layers of one model, one after the other, each with a cache of its own as in a real decode
// (so that keys and values come from memory), against ggml's CPU backend where its libraries are given.
//
//     bench_attention [--threads 2] [--keys 4000] [--queries 1,2,4,8,16,512] [--model NAME] [--kernel NAME] [--ggml DIRECTORY]
//                     [--clock wall|cpu]
//
// On a busy machine, `--threads 1 --clock cpu` still tells kernels apart: it counts the process's own time.
//
// Prints a table of milliseconds per pass over the layers (median of rounds, the two interleaved) and then one line of JSON.
#include "attention.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

namespace {

struct model {
    const char * name;
    int64_t      layers, DK, n_head, n_head_kv;
};
const model MODELS[] = { { "qwen2.5-1.5b", 28, 128, 12, 2 }, { "smollm2-135m", 30, 64, 9, 3 }, { "qwen2.5-0.5b", 24, 64, 14, 2 }, { "gemma3-270m", 18, 256, 4, 1 } };

struct pool {
    int                      n;
    std::atomic<int>         waiting{ 0 }, round{ 0 }, job{ 0 };
    std::vector<std::thread> threads;
    void (*work)(pool &, int) = nullptr;
    const ls_attention_args *   args   = nullptr;
    const ls_attention_kernel * kernel = nullptr;
    std::vector<char>           scratch;
    int64_t                     layers = 0;

    explicit pool(int count) : n(count) {
        for (int i = 1; i < n; i++) {
            threads.emplace_back([this, i] {
                for (int seen = 0;;) {
                    while (job.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(20)); // leaves the core to ggml's turn
                    seen = job.load();
                    if (!work) return;
                    work(*this, i);
                }
            });
        }
    }
    ~pool() {
        work = nullptr;
        job++;
        for (auto & t : threads) t.join();
    }
    static void wait(void * self) {
        auto *    b  = static_cast<pool *>(self);
        const int at = b->round.load();
        if (b->waiting.fetch_add(1) + 1 == b->n) {
            b->waiting = 0;
            b->round   = at + 1;
        } else {
            for (int spins = 0; b->round.load() == at; spins++) {
                if (spins > 2000) std::this_thread::yield();
            }
        }
    }
    void run() {
        work = [](pool & p, int ith) {
            for (int64_t i = 0; i < p.layers; i++) {
                p.kernel->run(&p.args[i], ith, p.n, p.scratch.data(), wait, &p);
                if (p.n > 1) wait(&p);
            }
        };
        job++;
        work(*this, 0);
    }
};

// The few functions of ggml (libggml-base and libggml-cpu) that a graph of one operation takes.
struct ggml {
    struct params {
        size_t size;
        void * buffer;
        bool   no_alloc;
    };
    void * (*init)(params);
    void (*free)(void *);
    void * (*new_tensor)(void *, int, int64_t, int64_t, int64_t, int64_t);
    void * (*permute)(void *, void *, int, int, int, int);
    void * (*get_data)(const void *);
    void * (*flash)(void *, void *, void *, void *, void *, float, float, float);
    void * (*new_graph)(void *);
    void (*expand)(void *, void *);
    int (*compute)(void *, void *);
    void * backend = nullptr;

    bool open(const std::string & directory, int threads) {
        void * base = dlopen((directory + "/libggml-base.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
        void * cpu  = base ? dlopen((directory + "/libggml-cpu.so").c_str(), RTLD_NOW | RTLD_GLOBAL) : nullptr;
        if (!cpu) {
            std::fprintf(stderr, "bench_attention: no ggml in %s: %s\n", directory.c_str(), dlerror());
            return false;
        }
        bool all  = true;
        auto find = [&](auto & f, const char * name) {
            void * p = dlsym(cpu, name);
            p        = p ? p : dlsym(base, name);
            all      = all && p;
            std::memcpy(&f, &p, sizeof p);
        };
        void * (*backend_init)()            = nullptr;
        void (*set_threads)(void *, int)    = nullptr;
        find(init, "ggml_init");
        find(free, "ggml_free");
        find(new_tensor, "ggml_new_tensor_4d");
        find(permute, "ggml_permute");
        find(get_data, "ggml_get_data");
        find(flash, "ggml_flash_attn_ext");
        find(new_graph, "ggml_new_graph");
        find(expand, "ggml_build_forward_expand");
        find(compute, "ggml_backend_graph_compute");
        find(backend_init, "ggml_backend_cpu_init");
        find(set_threads, "ggml_backend_cpu_set_n_threads");
        if (!all) {
            std::fprintf(stderr, "bench_attention: %s has another interface\n", directory.c_str());
            return false;
        }
        backend = backend_init();
        set_threads(backend, threads);
        return true;
    }
};

uint16_t small_half(uint32_t r) { return static_cast<uint16_t>(0x3000 + r % 0x0c00 + (r >> 16 & 1) * 0x8000); } // 0.125 to 1, either sign

bool cpu_clock = false;

double now_ms() {
    if (cpu_clock) {
        timespec t;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

struct result {
    double ours, theirs, difference;
};

result measure(const model & m, int64_t n_q, int64_t keys, int threads, const ls_attention_kernel * kernel, ggml * g) {
    const int64_t n_kv = (keys + 255) / 256 * 256; // as llama.cpp pads it
    const int64_t row = m.DK * m.n_head_kv;
    uint32_t      r = 1;
    auto          next = [&r] { return r = r * 1664525u + 1013904223u; };

    std::vector<uint16_t> cache(m.layers * 2 * n_kv * row), mask(n_q * n_kv, 0xfc00);
    std::vector<float>    q(n_q * m.n_head * m.DK), dst(q.size());
    for (auto & x : cache) x = small_half(next());
    for (auto & x : q) x = static_cast<float>(next() >> 8) * 0x1p-23f - 1;
    for (int64_t i = 0; i < n_q; i++) std::fill_n(mask.begin() + i * n_kv, std::max<int64_t>(keys - n_q + i + 1, 1), uint16_t(0));

    std::vector<ls_attention_args> layers(m.layers);
    auto put = [](ls_att_tensor & t, const void * data, int64_t n0, int64_t n1, int64_t n2, size_t b0, size_t b1, size_t b2) {
        t = { data, { n0, n1, n2, 1 }, { b0, b1, b2, b1 * static_cast<size_t>(n1) } };
    };
    for (int64_t i = 0; i < m.layers; i++) {
        auto & a = layers[i];
        a        = {};
        put(a.q, q.data(), m.DK, n_q, m.n_head, 4, 4 * m.DK * m.n_head, 4 * m.DK);
        put(a.k, cache.data() + 2 * i * n_kv * row, m.DK, n_kv, m.n_head_kv, 2, 2 * row, 2 * m.DK);
        put(a.v, cache.data() + (2 * i + 1) * n_kv * row, m.DK, n_kv, m.n_head_kv, 2, 2 * row, 2 * m.DK);
        put(a.mask, mask.data(), n_kv, n_q, 1, 2, 2 * n_kv, 2 * n_kv * n_q);
        a.dst       = dst.data();
        a.nb_dst[0] = 4;
        a.nb_dst[1] = 4 * m.DK;
        a.nb_dst[2] = a.nb_dst[1] * m.n_head;
        a.nb_dst[3] = a.nb_dst[2] * n_q;
        a.k_type = a.v_type = LS_ATT_F16;
        a.scale             = 1 / std::sqrt(static_cast<float>(m.DK));
    }
    pool p(threads);
    p.args   = layers.data();
    p.layers = m.layers;
    p.kernel = kernel;
    p.scratch.resize(ls_attention_scratch(&layers[0], threads));

    std::vector<void *> graphs;
    void *              ctx = nullptr;
    void *              out = nullptr;
    if (g) {
        ctx = g->init({ cache.size() * 2 + mask.size() * 2 + q.size() * 4 * (m.layers + 2) + (64 << 20), nullptr, false });
        void * tq = g->new_tensor(ctx, 0, m.DK, m.n_head, n_q, 1);
        void * tm = g->new_tensor(ctx, 1, n_kv, n_q, 1, 1);
        std::memcpy(g->get_data(tq), q.data(), q.size() * 4);
        std::memcpy(g->get_data(tm), mask.data(), mask.size() * 2);
        for (int64_t i = 0; i < m.layers; i++) {
            void * kv[2];
            for (int j = 0; j < 2; j++) {
                kv[j] = g->new_tensor(ctx, 1, m.DK, m.n_head_kv, n_kv, 1);
                std::memcpy(g->get_data(kv[j]), cache.data() + (2 * i + j) * n_kv * row, n_kv * row * 2);
                kv[j] = g->permute(ctx, kv[j], 0, 2, 1, 3);
            }
            out = g->flash(ctx, g->permute(ctx, tq, 0, 2, 1, 3), kv[0], kv[1], tm, layers[0].scale, 0, 0);
            graphs.push_back(g->new_graph(ctx));
            g->expand(graphs.back(), out);
        }
    }

    std::vector<double> ours, theirs;
    const double        begin = now_ms();
    for (int round = 0; round < 15 && (round < 2 || now_ms() - begin < 4000); round++) {
        // ggml's threads spin for milliseconds after their work is done; with as many threads as cores that would be our time.
        std::this_thread::sleep_for(std::chrono::milliseconds(g ? 30 : 0));
        double t = now_ms();
        p.run();
        ours.push_back(now_ms() - t);
        t = now_ms();
        for (void * graph : graphs) g->compute(g->backend, graph);
        theirs.push_back(now_ms() - t);
    }
    double difference = 0;
    if (g) {
        const float * x = static_cast<const float *>(g->get_data(out));
        for (size_t i = 0; i < dst.size(); i++) difference = std::max(difference, std::fabs(double(x[i]) - dst[i]));
        g->free(ctx);
    }
    return { median(ours), median(theirs), difference };
}

} // namespace

int main(int argc, char ** argv) {
    int         threads = 2;
    int64_t     keys    = 4000;
    std::string queries = "1,2,4,8,16,512", only, kernel, directory;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i], value = argv[i + 1];
        if (option == "--threads") threads = std::atoi(value.c_str());
        else if (option == "--keys") keys = std::atoll(value.c_str());
        else if (option == "--queries") queries = value;
        else if (option == "--model") only = value;
        else if (option == "--kernel") kernel = value;
        else if (option == "--clock") cpu_clock = value == "cpu";
        else if (option == "--ggml") directory = value;
        else return std::fprintf(stderr, "bench_attention: unknown option %s\n", argv[i]), 2;
    }
    const auto * k = kernel.empty() ? ls_attention_kernel_at(0) : ls_attention_kernel_named(kernel.c_str());
    if (!k) return std::fprintf(stderr, "bench_attention: no kernel %s here\n", kernel.c_str()), 2;
    ggml       library;
    const bool compare = !directory.empty() && library.open(directory, threads);

    std::string json;
    std::printf("%s, %d threads, %lld keys, all layers\n%-14s %5s %9s %9s %7s %7s %10s\n", k->name, threads, static_cast<long long>(keys), "model", "n",
                "ms", "GMAC/s", "ggml", "ratio", "largest");
    for (const auto & m : MODELS) {
        if (!only.empty() && only != m.name) continue;
        for (size_t at = 0; at < queries.size(); at = std::min(queries.find(',', at), queries.size() - 1) + 1) {
            const int64_t n    = std::atoll(queries.c_str() + at);
            const result  r    = measure(m, n, keys, threads, k, compare ? &library : nullptr);
            const double  seen = std::max<double>(static_cast<double>(keys - n) + (n + 1) / 2.0, 1);
            const double  rate = 2.0 * m.layers * m.n_head * m.DK * n * seen / r.ours / 1e6;
            char          line[200];
            std::printf("%-14s %5lld %9.2f %9.1f", m.name, static_cast<long long>(n), r.ours, rate);
            if (compare) std::printf(" %7.1f %7.2f %10.2g", r.theirs, r.ours / r.theirs, r.difference);
            std::printf("\n");
            std::fflush(stdout);
            std::snprintf(line, sizeof line, "%s{\"model\": \"%s\", \"n\": %lld, \"ms\": %.3f, \"ggml_ms\": %.3f}", json.empty() ? "" : ", ", m.name,
                          static_cast<long long>(n), r.ours, compare ? r.theirs : std::nan(""));
            json += line;
        }
    }
    for (size_t at; (at = json.find("nan")) != std::string::npos;) json.replace(at, 3, "null");
    std::printf("{\"kernel\": \"%s\", \"threads\": %d, \"keys\": %lld, \"results\": [%s]}\n", k->name, threads, static_cast<long long>(keys), json.c_str());
    return 0;
}
