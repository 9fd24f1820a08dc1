// Turns a piece of llama.cpp's graph into one that the CPU backend can run with our multiplications inside.
//
// Every operation we have a kernel for is replaced, for the time of one computation, by copies of its tensor that are custom
// operations: the CPU backend calls our function with (thread, threads) and puts a barrier behind it. A multiplication
// becomes two of them: one that quantises the activations and one that multiplies. Multiplications of the same activations
// share the first. The tensors of the caller's graph are not changed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml_abi.h"
#include "kernels.h"
#include "multiply.h"

namespace ls {

// Whether `op` is a multiplication that the kernels here can do.
bool is_our_multiplication(const Tensor *op);

// Moves multiplications of the same activations next to each other. For before memory is allocated for the graph.
void gather_multiplications(Graph *graph);

class Rewriter {
   public:
    explicit Rewriter(const Kernels *kernels);
    ~Rewriter();
    Rewriter(const Rewriter &) = delete;
    Rewriter &operator=(const Rewriter &) = delete;

    // The graph to hand to the CPU backend in place of `graph`, for up to n_threads threads. Valid until the next call;
    // nullptr when memory ran out.
    Graph *rewrite(const Graph *graph, int n_threads);

    // Of the last call: how many operations were replaced.
    int multiplications = 0, attentions = 0;

   private:
    struct Step;
    struct Piece {
        uint8_t *data;
        size_t size;
        int until;  // the last node that needs it
    };

    Step *spare_step();
    Step *new_step(const Tensor *like, CustomFn fun);
    bool add_multiplication(const Graph *graph, int at);
    bool add_attention(const Graph *graph, int at);
    uint8_t *room(size_t bytes, int from, int until);
    void free_pieces();

    const Kernels *kernels_;
    int n_threads_ = 1;
    Graph graph_{};
    std::vector<Tensor *> nodes_;
    // Kept from call to call, so that a decode allocates nothing.
    std::vector<std::unique_ptr<Step>> steps_;
    std::vector<std::unique_ptr<Activations>> activations_;
    size_t used_steps_ = 0, used_activations_ = 0;
    Step *last_multiply_ = nullptr;  // while nothing but views came after it
    const Activations *last_acts_ = nullptr;
    std::vector<Piece> pieces_;
};

}  // namespace ls
