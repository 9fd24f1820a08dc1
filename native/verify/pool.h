// A small thread pool: made on first use, left alone in a forked child, never joined.
#pragma once

#include <cstdint>
#include <functional>

namespace localspec {

// Calls task(0) ... task(n - 1), some of them on other threads when `gain` says that it is worth waking them. Returns when
// all are done. May be called from several threads at once (one gets the pool, the others work alone). Tasks must not throw.
void run_tasks(int64_t n, bool gain, const std::function<void(int64_t)> & task);

// Threads that work on one call, the caller included. 0: as many as this process may use, at most 4, and only when there is
// something to gain; any other number is used for every call with more than one task.
void set_threads(int n);

}  // namespace localspec
