// The threads of one draft. They sleep between calls, because the target works for milliseconds there and wants the cores,
// and meet at a barrier that spins for a moment only (../backend/barrier.h) within a call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "barrier.h"

namespace ls::draft {

// Where the share of thread `ith` of n things begins; it ends where the next one's begins.
inline int64_t share(int64_t n, int ith, int nth) { return n * ith / nth; }

class Team {
   public:
    explicit Team(int n);  // n >= 1, the caller included; makes do with fewer where no more threads can be had
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }
    // Calls work(0) here and work(1) ... on the others; returns when all have returned. `work` must not throw.
    void run(const std::function<void(int)> &work);
    void meet() { barrier_.wait(size()); }

   private:
    void serve(int index);

    Barrier barrier_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)> *work_ = nullptr;
    uint64_t generation_ = 0;
    bool ending_ = false;
    std::atomic<int> running_{0};
    std::vector<std::thread> threads_;
};

}  // namespace ls::draft
