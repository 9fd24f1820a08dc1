// A barrier for the threads of one operation. It spins for a moment, because the others are usually a microsecond away, and
// then gives its core away: with another busy process on the machine the thread waited for may need that very core.
#pragma once

#include <atomic>
#include <thread>

namespace ls {

class Barrier {
   public:
    void wait(int nth) {
        if (nth <= 1) return;
        const unsigned phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == nth - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
            if (spins < kSpins) pause();
            else std::this_thread::yield();
        }
    }

   private:
    static constexpr int kSpins = 4000;  // tens of microseconds

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb" ::: "memory");
#endif
    }

    std::atomic<int> arrived_{0};
    std::atomic<unsigned> phase_{0};
};

}  // namespace ls
