// Tests of the attention kernels. Usage: test_attention [--quick]. Prints a line per group of checks and a hash of all outputs, which is
// the same on every machine; exits 1 at the first failure. Every kernel of the build that this CPU can run is tested.
#include "attention.h"
#include "attention_plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

namespace {

uint64_t rng_state = 1;

uint32_t rng() { // xorshift64*
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return static_cast<uint32_t>(rng_state * 0x2545F4914F6CDD1Dull >> 32);
}

float uniform() { return static_cast<float>(rng() >> 8) * 0x1p-24f; }
float bell() { return (uniform() + uniform() + uniform() + uniform() - 2) * 1.7f; } // about unit variance

uint16_t to_half(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
    const float    size = std::fabs(x);
    if (std::isnan(x)) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));
    u &= 0x7fffffff;
    return sign | static_cast<uint16_t>((u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13);
}

int64_t row_bytes(int type, int64_t n) { return type == LS_ATT_F32 ? 4 * n : type == LS_ATT_F16 ? 2 * n : 34 * (n / 32); }

void fill_row(char * row, int type, int64_t n, float spread) {
    if (type == LS_ATT_Q8_0) {
        for (int64_t b = 0; b < n / 32; b++) {
            const uint16_t d = to_half(spread * (0.5f + uniform()) / 50);
            std::memcpy(row + 34 * b, &d, 2);
            for (int i = 0; i < 32; i++) row[34 * b + 2 + i] = static_cast<char>(rng() % 255 - 127);
        }
        return;
    }
    for (int64_t d = 0; d < n; d++) {
        const float x = bell() * spread;
        if (type == LS_ATT_F32) {
            std::memcpy(row + 4 * d, &x, 4);
        } else {
            const uint16_t h = to_half(x);
            std::memcpy(row + 2 * d, &h, 2);
        }
    }
}

enum mask_kind { NO_MASK, CAUSAL, WINDOW, SEQUENCES, SCATTERED, EMPTY_ROWS };

struct shape {
    int64_t   DK, DV, n_head, n_head_k, n_head_v, n_q, n_kv, n_seq = 1;
    int       k_type = LS_ATT_F16, v_type = LS_ATT_F16;
    mask_kind mask     = CAUSAL;
    int64_t   mask_ne2 = 1, mask_ne3 = 1;
    float     max_bias = 0, softcap = 0;
    bool      sinks    = false;
    float     sharp    = 1; // spread of the logits
};

// Tensors laid out as llama.cpp does: heads of one token side by side, queries permuted. Each in a buffer of its own, so that the address
// sanitizer sees every step outside.
struct problem {
    shape                s;
    std::vector<char>    q, k, v, mask;
    std::vector<float>   sinks, dst;
    ls_attention_args    a = {};

    explicit problem(const shape & sh) : s(sh) {
        auto layout = [](ls_att_tensor & t, int64_t n, int64_t n1, int64_t n2, int64_t n3, size_t element, int64_t row, int64_t gap) {
            const int64_t ne[4] = { n, n1, n2, n3 };
            const size_t  nb[4] = { element, static_cast<size_t>(n2 * row + gap), static_cast<size_t>(row),
                                    static_cast<size_t>(n1 * (n2 * row + gap)) };
            std::memcpy(t.ne, ne, sizeof ne);
            std::memcpy(t.nb, nb, sizeof nb);
            return static_cast<size_t>(n3) * nb[3];
        };
        q.resize(layout(a.q, s.DK, s.n_q, s.n_head, s.n_seq, 4, 4 * s.DK, 8));
        k.resize(layout(a.k, s.DK, s.n_kv, s.n_head_k, s.n_seq, block(s.k_type), row_bytes(s.k_type, s.DK), 4));
        v.resize(layout(a.v, s.DV, s.n_kv, s.n_head_v, s.n_seq, block(s.v_type), row_bytes(s.v_type, s.DV), 0));
        each_row(a.q, q, LS_ATT_F32, 2 * s.sharp);
        each_row(a.k, k, s.k_type, 1);
        each_row(a.v, v, s.v_type, 1);
        dst.assign(s.DV * s.n_head * s.n_q * s.n_seq, std::nanf(""));
        a.nb_dst[0] = 4;
        a.nb_dst[1] = 4 * s.DV;
        a.nb_dst[2] = a.nb_dst[1] * s.n_head;
        a.nb_dst[3] = a.nb_dst[2] * s.n_q;
        if (s.mask != NO_MASK) make_mask();
        if (s.sinks) {
            for (int64_t h = 0; h < s.n_head; h++) sinks.push_back(bell() * 2);
        }
        a.k_type        = s.k_type;
        a.v_type        = s.v_type;
        a.scale         = 1 / std::sqrt(static_cast<float>(s.DK));
        a.max_bias      = s.max_bias;
        a.logit_softcap = s.softcap;
        point();
    }
    problem(const problem & o) : s(o.s), q(o.q), k(o.k), v(o.v), mask(o.mask), sinks(o.sinks), dst(o.dst), a(o.a) { point(); }

    static size_t block(int type) { return type == LS_ATT_F32 ? 4 : type == LS_ATT_F16 ? 2 : 34; }

    void point() {
        a.q.data    = q.data();
        a.k.data    = k.data();
        a.v.data    = v.data();
        a.mask.data = mask.empty() ? nullptr : mask.data();
        a.sinks     = sinks.empty() ? nullptr : sinks.data();
        a.dst       = dst.data();
    }

    char * row(const ls_att_tensor & t, std::vector<char> & buffer, int64_t i1, int64_t i2, int64_t i3) const {
        return buffer.data() + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
    }

    void each_row(const ls_att_tensor & t, std::vector<char> & buffer, int type, float spread) {
        for (int64_t i3 = 0; i3 < t.ne[3]; i3++)
            for (int64_t i1 = 0; i1 < t.ne[1]; i1++)
                for (int64_t i2 = 0; i2 < t.ne[2]; i2++) fill_row(row(t, buffer, i1, i2, i3), type, t.ne[0], spread);
    }

    bool visible(int64_t i, int64_t j) const {
        const int64_t here = s.n_kv - s.n_q + i; // the query's own place, when the queries are the last tokens
        switch (s.mask) {
            case CAUSAL:     return j <= (here < 0 ? i : here);
            case WINDOW:     return j <= here && j > here - 100;
            case SEQUENCES:  return j % 3 == i % 3 && j <= here;
            case SCATTERED:  return rng() % 4 == 0;
            case EMPTY_ROWS: return i % 2 == 1 && j <= here;
            default:         return true;
        }
    }

    void make_mask() {
        const int64_t ne[4] = { (s.n_kv + 31) / 32 * 32, s.n_q, s.mask_ne2, s.mask_ne3 };
        size_t        nb    = 2;
        for (int i = 0; i < 4; i++) {
            a.mask.ne[i] = ne[i];
            a.mask.nb[i] = nb;
            nb *= ne[i];
        }
        mask.resize(nb);
        for (int64_t i3 = 0; i3 < ne[3]; i3++)
            for (int64_t i2 = 0; i2 < ne[2]; i2++)
                for (int64_t i = 0; i < ne[1]; i++)
                    for (int64_t j = 0; j < ne[0]; j++) {
                        const float    bias = s.max_bias > 0 ? -std::fabs(static_cast<float>(j - (s.n_kv - s.n_q + i))) : 0;
                        const uint16_t h    = j < s.n_kv && visible(i, j) ? to_half(bias) : 0xfc00;
                        std::memcpy(row(a.mask, mask, i, i2, i3) + 2 * j, &h, 2);
                    }
    }
};

struct barrier_of {
    int              n;
    std::atomic<int> waiting{ 0 }, round{ 0 };
    explicit barrier_of(int count) : n(count) {}
    static void wait(void * self) {
        auto *    b  = static_cast<barrier_of *>(self);
        const int at = b->round.load();
        if (b->waiting.fetch_add(1) + 1 == b->n) {
            b->waiting = 0;
            b->round   = at + 1;
        } else {
            while (b->round.load() == at) std::this_thread::yield();
        }
    }
};

[[noreturn]] void fail(const char * what, const char * kernel, const shape & s) {
    std::printf("FAILED: %s, kernel %s: DK %d DV %d heads %d/%d/%d n_q %d n_kv %d n_seq %d types %d/%d mask %d bias %g cap %g sinks %d\n", what,
                kernel, int(s.DK), int(s.DV), int(s.n_head), int(s.n_head_k), int(s.n_head_v), int(s.n_q), int(s.n_kv), int(s.n_seq),
                s.k_type, s.v_type, s.mask, s.max_bias, s.softcap, s.sinks);
    std::exit(1);
}

std::vector<float> run(const ls_attention_kernel * kernel, problem & p, int nth) {
    if (!ls_attention_supported(&p.a)) fail("not supported", kernel->name, p.s);
    const size_t size = ls_attention_scratch(&p.a, nth);
    // Odd address and no useful content: neither may matter. malloc, so that the sanitizer sees its end.
    char * scratch = static_cast<char *>(std::malloc(size + 1));
    std::memset(scratch, 0xff, size + 1);
    p.dst.assign(p.dst.size(), std::nanf(""));
    barrier_of               barrier(nth);
    std::vector<std::thread> threads;
    for (int i = 1; i < nth; i++) {
        threads.emplace_back([&, i] { kernel->run(&p.a, i, nth, scratch + 1, barrier_of::wait, &barrier); });
    }
    kernel->run(&p.a, 0, nth, scratch + 1, nth > 1 ? barrier_of::wait : nullptr, &barrier);
    for (auto & t : threads) t.join();
    std::free(scratch);
    return p.dst;
}

bool same(const float * a, const float * b, size_t n) { return std::memcmp(a, b, n * 4) == 0; }

std::vector<const ls_attention_kernel *> kernels() {
    std::vector<const ls_attention_kernel *> all;
    for (int i = 0; ls_attention_kernel_at(i); i++) all.push_back(ls_attention_kernel_at(i));
    return all;
}

uint64_t hash = 14695981039346656037ull;
double   worst_nmse = 0, worst_error = 0;
int      n_cases = 0;

// Against the reference, with 1 and 3 threads, and every kernel against the first.
void check(const shape & s, bool hashed = true) {
    problem p(s);
    ls_attention_reference(&p.a);
    const std::vector<float> want = p.dst;
    std::vector<float>       first;
    for (const auto * kernel : kernels()) {
        const std::vector<float> got = run(kernel, p, 1);
        double                   error = 0, power = 0, most = 0;
        for (size_t i = 0; i < got.size(); i++) {
            if (!std::isfinite(got[i])) fail("result not finite", kernel->name, s);
            const double e = std::fabs(double(got[i]) - want[i]);
            error += e * e;
            power += double(want[i]) * want[i];
            most = e > most ? e : most;
        }
        const double nmse = power > 0 ? error / power : error;
        worst_nmse        = nmse > worst_nmse ? nmse : worst_nmse;
        worst_error       = most > worst_error ? most : worst_error;
        // rms 4e-6 relative; ggml's own, with f16 sums, gives 1e-7 to 1e-6. An f32 logit of size 100 is known to 1e-5, whoever adds it up.
        if (nmse > 2e-11 * std::fmax(1, s.sharp * s.sharp / 100)) {
            std::printf("nmse %g, largest error %g\n", nmse, most);
            fail("far from the reference", kernel->name, s);
        }
        if (first.empty()) first = got;
        if (!same(first.data(), got.data(), got.size())) fail("bits differ from the first kernel's", kernel->name, s);
        if (!same(first.data(), run(kernel, p, 3).data(), got.size())) fail("bits differ with 3 threads", kernel->name, s);
    }
    for (size_t i = 0; hashed && i < first.size(); i++) {
        uint32_t u;
        std::memcpy(&u, &first[i], 4);
        hash = (hash ^ u) * 1099511628211ull;
    }
    n_cases++;
}

// The queries i0 .. i0 + n alone.
problem slice(const problem & p, int64_t i0, int64_t n) {
    problem r(p);
    r.s.n_q       = n;
    r.a.q.ne[1]   = n;
    r.a.q.data    = static_cast<const char *>(r.a.q.data) + i0 * r.a.q.nb[1];
    r.a.mask.data = r.a.mask.data ? static_cast<const char *>(r.a.mask.data) + i0 * r.a.mask.nb[1] : nullptr;
    r.a.mask.ne[1] -= i0;
    r.a.nb_dst[3] = r.a.nb_dst[2] * n;
    r.dst.resize(r.s.DV * r.s.n_head * n * r.s.n_seq);
    r.a.dst = r.dst.data();
    return r;
}

// A row's bits, for cuts of the queries into pieces of every size in `pieces` and for several thread counts.
void check_pieces(const shape & s, const std::vector<int> & pieces, const std::vector<int> & thread_counts) {
    const problem p(s);
    const size_t  row = s.DV * s.n_head;
    for (const auto * kernel : kernels()) {
        if (std::strcmp(kernel->name, "portable") == 0 && kernels().size() > 1) continue; // the others have its bits, see check
        problem                  whole(p);
        const std::vector<float> want = run(kernel, whole, 1);
        for (int nth : thread_counts) {
            if (!same(want.data(), run(kernel, whole, nth).data(), want.size())) fail("bits hang on the threads", kernel->name, s);
        }
        for (int n : pieces) {
            for (int64_t i0 = 0; i0 < s.n_q; i0 += n) {
                problem                  part = slice(p, i0, n < s.n_q - i0 ? n : s.n_q - i0);
                const std::vector<float> got  = run(kernel, part, 1 + static_cast<int>(i0 % 2));
                if (!same(want.data() + i0 * row, got.data(), got.size())) fail("bits hang on the number of queries", kernel->name, s);
            }
        }
    }
    n_cases++;
}

// A row's bits when hidden keys follow, with anything in them, and with hidden keys in between.
void check_padding(shape s, const std::vector<int> & longer, bool poison) {
    s.n_seq = 1;
    const problem p(s);
    for (int more : longer) {
        problem big(p);
        big.s.n_kv += more;
        auto extend = [&](ls_att_tensor & t, std::vector<char> & buffer, int type) {
            t.ne[1] += more;
            t.nb[3] = t.ne[1] * t.nb[1];
            buffer.resize(t.nb[3]);
            for (int64_t j = s.n_kv; j < t.ne[1]; j++)
                for (int64_t h = 0; h < t.ne[2]; h++) {
                    char * r = big.row(t, buffer, j, h, 0);
                    fill_row(r, type, t.ne[0], 3);
                    if (poison) std::memset(r, 0xff, row_bytes(type, t.ne[0])); // NaN in every type
                }
        };
        extend(big.a.k, big.k, s.k_type);
        extend(big.a.v, big.v, s.v_type);
        const ls_att_tensor old = big.a.mask;
        std::vector<char>   old_mask = big.mask;
        big.a.mask.ne[0]             = s.n_kv + more;
        big.a.mask.nb[1]             = 2 * big.a.mask.ne[0];
        big.a.mask.nb[2]             = big.a.mask.nb[1] * old.ne[1];
        big.a.mask.nb[3]             = big.a.mask.nb[2] * old.ne[2];
        big.mask.assign(big.a.mask.nb[3] * old.ne[3], 0);
        for (int64_t i2 = 0; i2 < old.ne[2]; i2++)
            for (int64_t i = 0; i < old.ne[1]; i++) {
                char * r = big.row(big.a.mask, big.mask, i, i2, 0);
                std::memcpy(r, big.row(old, old_mask, i, i2, 0), 2 * s.n_kv);
                for (int64_t j = s.n_kv; j < s.n_kv + more; j++) std::memcpy(r + 2 * j, "\x00\xfc", 2);
            }
        big.point();
        problem small(p);
        for (const auto * kernel : kernels()) {
            const std::vector<float> want = run(kernel, small, 1), got = run(kernel, big, 2);
            if (!same(want.data(), got.data(), want.size())) fail("bits hang on hidden keys", kernel->name, big.s);
        }
    }
    n_cases++;
}

// The rows of a tree of queries behind n_prefix keys, all in one call, and each one's way as a chain of its own.
void check_tree(shape s, const std::vector<int> & parents) {
    const int nodes = static_cast<int>(parents.size()), prefix = s.n_kv - nodes;
    s.n_q = nodes;
    problem p(s);
    auto way = [&](int i) {
        std::vector<int> w;
        for (; i >= 0; i = parents[i]) w.insert(w.begin(), i);
        return w;
    };
    for (int i = 0; i < nodes; i++) {
        const std::vector<int> w = way(i);
        for (int64_t j = prefix; j < p.a.mask.ne[0]; j++) {
            const bool     sees = std::find(w.begin(), w.end(), static_cast<int>(j) - prefix) != w.end();
            const uint16_t h    = sees ? 0 : 0xfc00;
            std::memcpy(p.row(p.a.mask, p.mask, i, 0, 0) + 2 * j, &h, 2);
        }
        for (int64_t j = 0; j < prefix; j++) std::memset(p.row(p.a.mask, p.mask, i, 0, 0) + 2 * j, 0, 2);
    }
    for (const auto * kernel : kernels()) {
        const std::vector<float> whole = run(kernel, p, 2);
        for (int i = 0; i < nodes; i++) {
            // The same keys without the others between them: what a chain's cache holds.
            const std::vector<int> w = way(i);
            problem                chain(p);
            for (size_t n = 0; n < w.size(); n++)
                for (int64_t h = 0; h < p.a.k.ne[2]; h++) {
                    const size_t kb = row_bytes(s.k_type, p.a.k.ne[0]), vb = row_bytes(s.v_type, p.a.v.ne[0]);
                    const int64_t to = prefix + static_cast<int64_t>(n), from = prefix + w[n];
                    std::memcpy(chain.row(chain.a.k, chain.k, to, h, 0), p.row(p.a.k, p.k, from, h, 0), kb);
                    std::memcpy(chain.row(chain.a.v, chain.v, to, h, 0), p.row(p.a.v, p.v, from, h, 0), vb);
                }
            for (int64_t j = prefix; j < p.a.mask.ne[0]; j++) {
                const uint16_t h = j < prefix + static_cast<int64_t>(w.size()) ? 0 : 0xfc00;
                std::memcpy(chain.row(chain.a.mask, chain.mask, i, 0, 0) + 2 * j, &h, 2);
            }
            const std::vector<float> alone = run(kernel, chain, 1);
            const size_t             n     = p.a.q.ne[2] * p.a.v.ne[0]; // dst is [DV, n_head, n_q]
            if (!same(&whole[i * n], &alone[i * n], n)) fail("a tree's row is not the chain's", kernel->name, s);
        }
    }
    n_cases++;
}

// Values that aren't finite reach the rows that see them, and only those.
void check_not_finite() {
    shape s{ 64, 64, 6, 2, 2, 40, 300 };
    s.mask = CAUSAL;
    problem        p(s);
    const uint16_t infinite = 0x7c00;
    std::memcpy(p.row(p.a.v, p.v, 280, 0, 0) + 2 * 5, &infinite, 2); // key 280, heads 0 to 2, element 5; query 20 is the first to see it
    for (const auto * kernel : kernels()) {
        const std::vector<float> got = run(kernel, p, 2);
        for (int64_t i = 0; i < s.n_q; i++)
            for (int64_t h = 0; h < s.n_head; h++)
                for (int64_t d = 0; d < s.DV; d++) {
                    if (std::isfinite(got[(i * s.n_head + h) * s.DV + d]) == (i >= 20 && h < 3 && d == 5)) {
                        fail("an infinite value", kernel->name, s);
                    }
                }
    }
    check_pieces(s, { 1, 7 }, { 2 });
    // A query that isn't a number: its row is not, its neighbours' are.
    problem     n(s);
    const float nan = std::nanf("");
    std::memcpy(n.row(n.a.q, n.q, 3, 1, 0), &nan, 4);
    for (const auto * kernel : kernels()) {
        const std::vector<float> got = run(kernel, n, 1);
        for (size_t i = 0; i < got.size(); i++) {
            if (std::isnan(got[i]) != (i / s.DV == size_t(3 * s.n_head + 1))) fail("a NaN query", kernel->name, s);
        }
    }
}

void check_empty_rows() {
    for (bool sinks : { false, true }) {
        shape s{ 80, 80, 4, 4, 4, 9, 333 };
        s.mask  = EMPTY_ROWS;
        s.sinks = sinks;
        problem p(s);
        for (const auto * kernel : kernels()) {
            const std::vector<float> got = run(kernel, p, 2);
            for (size_t i = 0; i < got.size(); i++) {
                const bool empty = i / (s.DV * s.n_head) % 2 == 0;
                if ((got[i] == 0) != empty) fail("a row that sees no key must be 0", kernel->name, s);
            }
        }
    }
}

void check_unsupported() {
    const shape s{ 64, 64, 6, 2, 2, 4, 40 };
    problem     ok(s);
    if (!ls_attention_supported(&ok.a)) fail("supported", "-", s);
    problem planned(s);
    planned.a.max_bias    = 8;
    planned.a.mask.data   = nullptr; // a graph that has no memory yet
    if (!ls_attention_supported(&planned.a)) fail("supported before it has memory", "-", s);
    auto refuse = [&](const char * what, void (*change)(ls_attention_args &)) {
        problem p(s);
        change(p.a);
        if (ls_attention_supported(&p.a)) fail(what, "-", s);
    };
    refuse("a type that is not known", [](ls_attention_args & a) { a.k_type = 2; });
    refuse("keys and queries of different size", [](ls_attention_args & a) { a.k.ne[0] = 32; });
    refuse("values for other keys", [](ls_attention_args & a) { a.v.ne[1] = 39; });
    refuse("heads that don't divide", [](ls_attention_args & a) { a.k.ne[2] = 4; });
    refuse("transposed values", [](ls_attention_args & a) { a.v.nb[0] = 80; });
    refuse("a short mask", [](ls_attention_args & a) { a.mask.ne[0] = 39; });
    refuse("ALiBi without mask", [](ls_attention_args & a) { a.max_bias = 8, a.mask = {}; });
    refuse("no keys", [](ls_attention_args & a) { a.k.ne[1] = a.v.ne[1] = 0; });
    refuse("q8_0 rows of 40", [](ls_attention_args & a) { a.k_type = LS_ATT_Q8_0, a.k.nb[0] = 34, a.k.ne[0] = a.q.ne[0] = 40; });
}

void report(const char * what) {
    std::printf("ok: %s (%d cases; worst nmse %.2g, error %.2g)\n", what, n_cases, worst_nmse, worst_error);
    std::fflush(stdout);
    n_cases    = 0;
    worst_nmse = worst_error = 0;
}

} // namespace

int main(int argc, char ** argv) {
    const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
    std::printf("kernels:");
    for (const auto * k : kernels()) std::printf(" %s", k->name);
    std::printf("\n");

    const int types[] = { LS_ATT_F32, LS_ATT_F16, LS_ATT_Q8_0 };
    for (int kt : types)
        for (int vt : types) {
            shape s{ 64, 64, 6, 2, 2, 5, 170 };
            s.k_type = kt;
            s.v_type = vt;
            check(s);
            s.DK = 96;
            s.DV = 128;
            check(s);
        }
    report("types of keys and values");

    const int64_t sizes[][2] = { { 64, 64 }, { 80, 80 }, { 96, 96 }, { 128, 128 }, { 256, 256 }, { 192, 128 }, { 576, 512 }, { 72, 72 }, { 40, 24 }, { 33, 7 }, { 1, 1 } };
    for (const auto & d : sizes)
        for (int type : { LS_ATT_F16, LS_ATT_F32 }) {
            shape s{ d[0], d[1], 4, 2, 2, quick ? 3 : 7, 131 };
            s.k_type = s.v_type = type;
            check(s);
        }
    report("head sizes");

    const int64_t heads[][3] = { { 12, 2, 2 }, { 9, 3, 3 }, { 4, 1, 1 }, { 14, 2, 2 }, { 8, 8, 8 }, { 32, 1, 1 }, { 12, 6, 4 }, { 5, 5, 1 } };
    for (const auto & h : heads)
        for (int n_q : { 1, 3, quick ? 9 : 20 }) check(shape{ 64, 64, h[0], h[1], h[2], n_q, quick ? 70 : 150 });
    report("groups of heads");

    for (mask_kind m : { NO_MASK, CAUSAL, WINDOW, SEQUENCES, SCATTERED, EMPTY_ROWS }) {
        for (int n_q : { 1, 2, quick ? 17 : 30 }) {
            shape s{ 64, 64, 4, 2, 2, n_q, quick ? 310 : 700 };
            s.mask = m;
            check(s);
            s.n_seq    = 3;
            s.n_kv     = quick ? 50 : 100;
            s.mask_ne2 = m == SCATTERED ? 4 : 1;
            s.mask_ne3 = m == SCATTERED ? 3 : 1;
            check(s);
        }
    }
    report("masks, sequences");

    for (float cap : { 0.0f, 2.0f, 50.0f })
        for (float bias : { 0.0f, 8.0f })
            for (bool sinks : { false, true }) {
                shape s{ 64, 80, 6, 2, 2, 6, quick ? 270 : 400 };
                s.softcap  = cap;
                s.max_bias = bias;
                s.sinks    = sinks;
                s.sharp    = 3;
                check(s, bias == 0); // slopes come from the C library's powf, which may differ between machines
            }
    report("soft-capping, ALiBi, sinks");

    for (float sharp : { 0.0f, 1e-3f, 10.0f, 40.0f }) {
        shape s{ 128, 128, 4, 2, 2, 4, 600 };
        s.sharp = sharp;
        check(s);
    }
    report("flat and sharp weights");

    for (int n_kv : { 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 1000 }) check(shape{ 64, 64, 3, 1, 1, 1, n_kv });
    for (int n_q : { 1, 8, 40, 600 }) {
        if (!quick || n_q <= 8) check(shape{ 64, 64, 3, 1, 1, n_q, quick ? 700 : n_q == 600 ? 1200 : 4500 });
    }
    check(shape{ 64, 64, 3, 1, 1, quick ? 33 : 300, quick ? 33 : 300 });
    report("numbers of keys and queries");

    const std::vector<int> pieces = quick ? std::vector<int>{ 1, 3, 16 } : std::vector<int>{ 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64, 100, 255 };
    for (mask_kind m : { CAUSAL, WINDOW, SCATTERED, SEQUENCES }) {
        shape s{ 64, 64, 6, 2, 2, quick ? 35 : 256, quick ? 330 : 1100 };
        s.mask  = m;
        s.sinks = m == WINDOW;
        check_pieces(s, pieces, quick ? std::vector<int>{ 2, 4 } : std::vector<int>{ 2, 3, 4, 7 });
    }
    for (int type : { LS_ATT_Q8_0, LS_ATT_F32 }) {
        shape s{ 128, 128, 12, 2, 2, quick ? 9 : 70, quick ? 300 : 777 };
        s.k_type = s.v_type = type;
        s.softcap           = 30;
        s.max_bias          = 8;
        check_pieces(s, { 1, 5, 8 }, { 2, 4 });
    }
    if (!quick) {
        check_pieces(shape{ 128, 128, 12, 2, 2, 600, 4500 }, { 299, 64 }, { 2 });
        check_pieces(shape{ 256, 256, 4, 1, 1, 17, 4500 }, { 1, 2, 8 }, { 2, 3, 4 });
    }
    report("same bits for every cut and number of threads");

    for (int n_kv : quick ? std::vector<int>{ 50, 250, 300 } : std::vector<int>{ 1, 50, 64, 250, 700, 1000 })
        for (int type : { LS_ATT_F16, LS_ATT_Q8_0, LS_ATT_F32 }) {
            shape s{ 64, 96, 6, 2, 2, 5, n_kv };
            s.k_type = s.v_type = type;
            check_padding(s, quick ? std::vector<int>{ 14, 256 - n_kv % 256 } : std::vector<int>{ 1, 14, 24, 256 - n_kv % 256, 1024 }, false);
            check_padding(s, quick ? std::vector<int>{ 24 } : std::vector<int>{ 1, 24, 256 }, true);
        }
    report("same bits whatever hides behind the mask");

    for (int n_kv : { 8, 60, 70, 130, 258, 300 }) {
        for (int type : { LS_ATT_F16, LS_ATT_Q8_0 }) {
            shape s{ 64, 96, 6, 2, 2, 8, n_kv };
            s.k_type = s.v_type = type;
            check_tree(s, { -1, 0, 1, 0, 3, 3, 1, 6 });
        }
    }
    check_tree(shape{ 64, 64, 3, 1, 1, 1, 290 }, std::vector<int>{ -1, 0, 1, 2, 3, 4, 0, 6, 7, 6, 0, 10, 11, 11, 10, 2, 15, 3, 17, 17, 4, 0, 21, 22,
                                                                  23, 24, 25, 0, 27, 28, 29, 30, 1, 32, 33, 34, 6, 36, 37, 38, 39, 10, 41, 42, 43,
                                                                  44, 45, 46, 47 });
    report("a tree's rows are those of chains");

    check_not_finite();
    check_empty_rows();
    check_unsupported();
    report("infinities, rows without keys, refusals");
    std::printf("hash %016llx\n", static_cast<unsigned long long>(hash));
    return 0;
}
