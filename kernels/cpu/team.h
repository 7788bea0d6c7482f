// A team of threads that computes tiles. Whoever is free takes the next one, so a thread that lost its core to another
// process delays a phase by one tile at most. Waiting threads spin for a short time, then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

class Team {
  public:
    explicit Team(int threads) {
        for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { help(i); });
    }

    ~Team() {
        stop_ = true;
        publish({nullptr, nullptr, 0});
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return (int)threads_.size() + 1; }

    // Whether the other threads help in the phases that follow, which take about so long on one thread. Waking them costs
    // tens of microseconds.
    void expect(double nanoseconds) {
        together_ = nanoseconds > WORTH_WAKING && !threads_.empty() && std::chrono::steady_clock::now() >= alone_until_;
    }

    // Calls `work(tile, thread)` for every tile below `tiles`, and returns when all are done. `nanoseconds`: about how long
    // one thread takes for all.
    template <class Work> void run(int tiles, double nanoseconds, const Work& work) {
        if (tiles <= 1 || !together_ || nanoseconds < WORTH_SHARING) {
            for (int tile = 0; tile < tiles; tile++) work(tile, 0);
            return;
        }
        Job job{[](const void* work, int tile, int thread) { (*(const Work*)work)(tile, thread); }, &work, tiles};
        uint32_t phase = publish(job);
        take(job, phase, 0);
        for (int spins = 0; done_.load(std::memory_order_acquire) < tiles; spins++) {
            if (spins < SPINS) pause();
            else return wait_for_late_threads(tiles, nanoseconds / tiles);
        }
    }

  private:
    struct Job {
        void (*call)(const void*, int, int);
        const void* work;
        int tiles;
    };

    static constexpr double WORTH_WAKING = 150e3, WORTH_SHARING = 3e3;
    static constexpr int SPINS = 4000;  // about 100 microseconds
    static constexpr double LATE = 200e3;  // nanoseconds
    static constexpr int ALONE = 30;    // times as long as the others were late, one thread computes
    static constexpr int JOBS = 4;      // a late thread may still read the job of an earlier phase

    // A thread that takes much longer than a tile has lost its core. While others keep the cores busy, one thread is faster.
    void wait_for_late_threads(int tiles, double expected) {
        auto began = std::chrono::steady_clock::now();
        while (done_.load(std::memory_order_acquire) < tiles) std::this_thread::yield();
        auto now = std::chrono::steady_clock::now();
        if (std::chrono::duration<double, std::nano>(now - began).count() > 4 * expected + LATE)
            alone_until_ = now + ALONE * (now - began);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    uint32_t publish(const Job& job) {
        uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
        jobs_[phase % JOBS] = job;
        done_.store(0, std::memory_order_relaxed);
        next_.store((uint64_t)phase << 32, std::memory_order_release);
        phase_.store(phase, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, 1 << 30, 0, 0, 0);
        return phase;
    }

    // Tiles of one phase. The number of the phase is part of `next_`, so that nobody takes a tile of another one.
    void take(const Job& job, uint32_t phase, int thread) {
        uint64_t next = next_.load(std::memory_order_acquire);
        while (next >> 32 == phase && (int)(uint32_t)next < job.tiles) {
            if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
            job.call(job.work, (int)(uint32_t)next, thread);
            done_.fetch_add(1, std::memory_order_acq_rel);
            next = next_.load(std::memory_order_acquire);
        }
    }

    void help(int thread) {
        uint32_t seen = 0;
        for (;;) {
            int spins = 0;
            uint32_t phase;
            while ((phase = phase_.load(std::memory_order_acquire)) == seen) {
                if (++spins < SPINS) {
                    pause();
                    continue;
                }
                asleep_.fetch_add(1, std::memory_order_seq_cst);
                syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
                asleep_.fetch_sub(1, std::memory_order_seq_cst);
                spins = 0;
            }
            seen = phase;
            if (stop_) return;
            take(Job(jobs_[phase % JOBS]), phase, thread);
        }
    }

    Job jobs_[JOBS]{};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::chrono::steady_clock::time_point alone_until_{};
    bool together_ = false;
    std::vector<std::thread> threads_;
};
