#include "graph.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "flash_op.h"
#include "barrier.h"
#include "multiply.h"
#include "weights.h"

namespace ls {
namespace {

// How far ahead a later multiplication of the same activations is looked for: far enough for the three projections of an
// attention layer with everything between them.
constexpr int kShareAhead = 48;

// More pieces of scratch than this are given back: they are left from graphs of many sizes.
constexpr size_t kMaxPieces = 24;

bool is_host(const Tensor *t) {
    const Buffer *const b = t->view_src ? t->view_src->buffer : t->buffer;
    return !b || (b->buft->iface.is_host && b->buft->iface.is_host(b->buft));
}

bool is_view(const Tensor *t) {
    return t->op == kOpNone || t->op == kOpReshape || t->op == kOpView || t->op == kOpPermute || t->op == kOpTranspose;
}

bool readable(const Tensor *x) { return x->type == kF32 || x->type == kF16 || x->type == kBF16; }

}  // namespace

bool is_our_multiplication(const Tensor *op) {
    if (op->op != kOpMulMat && op->op != kOpMulMatId) return false;
    const Tensor *const w = op->src[0], *const x = op->src[1];
    if (op->type != kF32 || !readable(x) || op->nb[0] != sizeof(float) || !can_multiply(w)) return false;
    if (op->op == kOpMulMatId && op->src[2]->type != kI32) return false;
    if (in_weights_buffer(w)) return is_plain(w->type) || !w->view_src;
    // Plain matrices anywhere in host memory, such as the key and value products of attention. op_params[1] marks a
    // Hadamard matrix, for which the CPU backend has a transform.
    return is_plain(w->type) && is_host(w) && op->op_params[1] == 0;
}

void gather_multiplications(Graph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const Tensor *const op = graph->nodes[i];
        if (op->op != kOpMulMat || !is_our_multiplication(op) || !in_weights_buffer(op->src[0])) continue;
        int to = i + 1;
        for (int j = to; j < graph->n_nodes && j <= i + kShareAhead; j++) {
            Tensor *const later = graph->nodes[j];
            if (later->op != kOpMulMat || later->src[1] != op->src[1] || !is_our_multiplication(later) ||
                !in_weights_buffer(later->src[0]))
                continue;
            // It needs its weights and what `op` needs, nothing that is computed between the two.
            std::memmove(graph->nodes + to + 1, graph->nodes + to, size_t(j - to) * sizeof(Tensor *));
            graph->nodes[to++] = later;
        }
        i = to - 1;
    }
}

// One custom operation of the rewritten graph.
struct Rewriter::Step {
    Tensor tensor;
    Quantize quantize;
    Multiply multiply;
    Step *more;  // a multiplication to do after this one without waiting for the other threads
    AttentionOp attention;
    Barrier barrier;
};

Rewriter::Rewriter(const Kernels *kernels) : kernels_(kernels) {}

Rewriter::~Rewriter() { free_pieces(); }

// Scratch that stays untouched from node `from` to node `until`. Nothing is freed here: nodes before this one have been
// rewritten already and run later.
uint8_t *Rewriter::room(size_t bytes, int from, int until) {
    Piece *best = nullptr;
    for (Piece &p : pieces_)
        if (p.until < from && p.size >= bytes && (!best || p.size < best->size)) best = &p;
    if (!best) {
        size_t size = 4096;
        while (size < bytes) size += size / 2 / 64 * 64;
        auto *const data = static_cast<uint8_t *>(std::aligned_alloc(64, size));
        if (!data) return nullptr;
        pieces_.push_back({data, size, -1});
        best = &pieces_.back();
    }
    best->until = until;
    return best->data;
}

void Rewriter::free_pieces() {
    for (Piece &p : pieces_) std::free(p.data);
    pieces_.clear();
}

Rewriter::Step *Rewriter::spare_step() {
    if (used_steps_ == steps_.size()) steps_.push_back(std::make_unique<Step>());
    Step *const s = steps_[used_steps_++].get();
    s->more = nullptr;
    return s;
}

Rewriter::Step *Rewriter::new_step(const Tensor *like, CustomFn fun) {
    Step *const s = spare_step();
    std::memcpy(&s->tensor, like, sizeof(Tensor));
    s->tensor.op = kOpCustom;
    s->tensor.flags |= kFlagCompute;
    for (Tensor *&src : s->tensor.src) src = nullptr;
    const CustomParams params{fun, kAllThreads, s};
    std::memcpy(s->tensor.op_params, &params, sizeof params);
    nodes_.push_back(&s->tensor);
    return s;
}

namespace {
template <typename S>
void run_quantize(Tensor *, int ith, int nth, void *step) { static_cast<S *>(step)->quantize.run(ith, nth); }
template <typename S>
void run_multiply(Tensor *, int ith, int nth, void *step) {
    for (auto *s = static_cast<S *>(step); s; s = s->more) s->multiply.run(ith, nth);
}
template <typename S>
void run_route(Tensor *, int ith, int, void *step) {
    if (ith == 0) static_cast<S *>(step)->quantize.activations->route();
}
template <typename S>
void run_attention(Tensor *, int ith, int nth, void *step) {
    auto *const s = static_cast<S *>(step);
    s->attention.run(ith, nth, s->barrier);
}
}  // namespace

bool Rewriter::add_multiplication(const Graph *graph, int at) {
    const Tensor *const op = graph->nodes[at];
    const Activations wanted = Activations::describe(op);
    Activations *acts = nullptr;
    for (size_t i = 0; i < used_activations_ && !acts; i++) {
        Activations *const a = activations_[i].get();
        if (at <= a->until && a->serves(wanted)) acts = a;
    }
    if (!acts) {
        if (used_activations_ == activations_.size()) activations_.push_back(std::make_unique<Activations>());
        acts = activations_[used_activations_++].get();
        acts->take(wanted);
        acts->until = at;
        for (int i = at + 1; i < graph->n_nodes && i <= at + kShareAhead; i++) {
            const Tensor *const later = graph->nodes[i];
            if (later->op == op->op && later->src[1] == op->src[1] && is_our_multiplication(later) &&
                acts->serves(Activations::describe(later)))
                acts->until = i;
        }
        if (acts->bytes() > 0) {
            acts->data = room(acts->bytes(), at, acts->until);
            if (!acts->data) return false;
        }
        if (op->op == kOpMulMatId) new_step(op, run_route<Step>)->quantize.activations = acts;
        else acts->route();
        if (acts->needs_pass()) {
            Step *const s = new_step(op, run_quantize<Step>);
            s->quantize = Quantize{kernels_, acts};
        }
    }
    // Two in a row with the same activations need no barrier between them: neither reads what the other writes.
    Step *const s = last_multiply_ && last_acts_ == acts ? spare_step() : new_step(op, run_multiply<Step>);
    if (last_multiply_ && last_acts_ == acts) last_multiply_->more = s;
    s->multiply.set(kernels_, acts, op, n_threads_);
    last_multiply_ = s;
    last_acts_ = acts;
    return true;
}

bool Rewriter::add_attention(const Graph *graph, int at) {
    Step *const s = new_step(graph->nodes[at], run_attention<Step>);
    if (!s->attention.set(graph->nodes[at])) return false;
    const size_t bytes = s->attention.scratch_bytes(n_threads_);
    s->attention.scratch = bytes ? room(bytes, at, at) : nullptr;
    return bytes == 0 || s->attention.scratch;
}

Graph *Rewriter::rewrite(const Graph *graph, int n_threads) {
    n_threads_ = n_threads;
    nodes_.clear();
    used_steps_ = used_activations_ = 0;
    multiplications = attentions = 0;
    last_multiply_ = nullptr;
    if (pieces_.size() > kMaxPieces) free_pieces();
    for (Piece &p : pieces_) p.until = -1;
    for (int i = 0; i < graph->n_nodes; i++) {
        Tensor *const node = graph->nodes[i];
        const bool wanted = node->flags & kFlagCompute;
        if (wanted && is_our_multiplication(node)) {
            if (!add_multiplication(graph, i)) return nullptr;
            multiplications++;
        } else if (wanted && node->op == kOpFlashAttnExt && is_our_attention(node)) {
            if (!add_attention(graph, i)) return nullptr;
            attentions++;
            last_multiply_ = nullptr;
        } else {
            nodes_.push_back(node);
            if (!is_view(node)) last_multiply_ = nullptr;
        }
    }
    graph_ = *graph;
    graph_.nodes = nodes_.data();
    graph_.n_nodes = graph_.size = static_cast<int>(nodes_.size());
    return &graph_;
}

}  // namespace ls
