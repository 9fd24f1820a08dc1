#include "team.h"

#include <system_error>

#ifdef __linux__
#include <sched.h>
#endif

namespace ls::draft {
namespace {

// The CPUs that this process had when the extension was loaded: OpenMP, loaded later, may bind the calling thread to one of
// them, and the others must not inherit that.
#ifdef __linux__
struct Cpus {
    cpu_set_t set;
    bool known = sched_getaffinity(0, sizeof set, &set) == 0;
};
const Cpus cpus{};
#endif

}  // namespace

Team::Team(int n) {
    for (int i = 1; i < n; i++) {
        try {
            threads_.emplace_back([this, i] { serve(i); });
        } catch (const std::system_error &) {
            break;
        }
    }
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
        generation_++;
    }
    wake_.notify_all();
    for (std::thread &t : threads_) t.join();
}

void Team::run(const std::function<void(int)> &work) {
    if (threads_.empty()) return work(0);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        running_.store(static_cast<int>(threads_.size()));
        generation_++;
    }
    wake_.notify_all();
    work(0);
    while (running_.load() > 0) std::this_thread::yield();
}

void Team::serve(int index) {
#ifdef __linux__
    if (cpus.known) sched_setaffinity(0, sizeof cpus.set, &cpus.set);
#endif
    uint64_t seen = 0;
    for (;;) {
        const std::function<void(int)> *work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (ending_) return;
            work = work_;
        }
        (*work)(index);
        running_.fetch_sub(1);
    }
}

}  // namespace ls::draft
