#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

namespace localspec {

namespace {

constexpr int kMostThreads = 4;

// One call's tasks. Shared, so that a worker that wakes late finds an old job used up instead of gone.
struct Job {
    const std::function<void(int64_t)> & task;
    const int64_t n;
    std::atomic<int64_t> next{0}, done{0};

    Job(const std::function<void(int64_t)> & task, int64_t n) : task(task), n(n) {}

    void work() {
        for (int64_t i; (i = next.fetch_add(1)) < n;) {
            task(i);
            done.fetch_add(1);
        }
    }
};

// The CPUs that this process had when the extension was loaded. An OpenMP runtime loaded later may bind the calling
// thread to one of them; the workers must not inherit that.
struct Cpus {
#ifdef __linux__
    cpu_set_t set;
    bool known = sched_getaffinity(0, sizeof set, &set) == 0;
    int count() const { return known ? CPU_COUNT(&set) : 1; }
    void take() const {
        if (known) sched_setaffinity(0, sizeof set, &set);
    }
#else
    int count() const { return static_cast<int>(std::thread::hardware_concurrency()); }
    void take() const {}
#endif
};
const Cpus cpus{};

struct Pool {
    std::mutex mutex;
    std::condition_variable wake;
    std::shared_ptr<Job> job;
    uint64_t generation = 0;
    int n_workers = 0;
    std::mutex busy;  // held by the one caller whose job runs

    void grow(int n) {
        for (; n_workers < n; n_workers++) {
            try {
                std::thread([this] { serve(); }).detach();
            } catch (const std::system_error &) {
                return;  // no more threads to be had: those that are there do
            }
        }
    }

    void serve() {
        cpus.take();
        uint64_t seen = 0;
        for (;;) {
            std::shared_ptr<Job> mine;
            {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return generation != seen; });
                seen = generation;
                mine = job;
            }
            if (mine) mine->work();
        }
    }

    void run(const std::shared_ptr<Job> & mine) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            job = mine;
            generation++;
        }
        wake.notify_all();
        mine->work();
        while (mine->done.load() < mine->n) std::this_thread::yield();  // at most one task per worker is still under way
        std::lock_guard<std::mutex> lock(mutex);
        job.reset();
    }
};

// Never freed: workers may still look at it while the process ends.
std::atomic<Pool *> the_pool{nullptr};
std::atomic<int> n_asked{0};

Pool & pool() {
    Pool * now = the_pool.load();
    if (now != nullptr) return *now;
    static std::once_flag once;
    // A forked child has no workers and may have inherited locked mutexes: it starts over with a pool of its own.
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); }); });
    Pool * made = new Pool;
    if (!the_pool.compare_exchange_strong(now, made)) {
        delete made;
        return *now;
    }
    return *made;
}

}  // namespace

void set_threads(int n) { n_asked.store(n); }

void run_tasks(int64_t n, bool gain, const std::function<void(int64_t)> & task) {
    const int asked = n_asked.load();
    int64_t threads = 1;
    if (asked > 0) {
        threads = asked;
    } else if (gain) {
        static const int most = cpus.count() < kMostThreads ? cpus.count() : kMostThreads;
        threads = most;
    }
    if (threads > n) threads = n;
    if (threads > 1) {
        Pool & shared = pool();
        std::unique_lock<std::mutex> mine(shared.busy, std::try_to_lock);
        if (mine.owns_lock()) {
            shared.grow(static_cast<int>(threads) - 1);
            shared.run(std::make_shared<Job>(task, n));
            return;
        }
    }
    for (int64_t i = 0; i < n; i++) task(i);
}

}  // namespace localspec
