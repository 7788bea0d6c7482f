// A team of threads that computes tiles. Whoever is free takes the next one, so a thread that lost its core to another
// process delays a phase by one tile at most. Waiting threads spin for a short time, then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include <linux/futex.h>
#include <sys/resource.h>
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

    // While this exists the other threads help, if one thread would take so many nanoseconds.
    struct Together {
        Together(Team& team, double nanoseconds) : team(team) { team.begin(nanoseconds); }
        ~Together() { team.end(); }
        Team& team;
    };

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
            else std::this_thread::yield();
        }
    }

  private:
    // Waking threads costs tens of microseconds.
    void begin(double nanoseconds) {
        began_ = Clock::now();
        expected_ = nanoseconds;
        together_ = nanoseconds > WORTH_WAKING && !threads_.empty() && began_ >= alone_until_;
    }

    // While other processes want the cores, threads that wait for each other may be slower than one. Where threads lost their
    // cores, what they take together is compared with what one takes alone, which computes as long as it is faster.
    void end() {
        if (threads_.empty() || expected_ <= WORTH_WAKING) return;
        auto now = Clock::now();
        Pace& pace = together_ ? pace_together_ : pace_alone_;
        pace.took += std::chrono::duration<double, std::nano>(now - began_).count();
        pace.expected += expected_;
        if (!together_ || pace.took < WINDOW) return;
        if (lost_cores() && pace_together_.slower_than(pace_alone_)) {
            alone_until_ = now + std::chrono::nanoseconds((int64_t)pause_);
            pause_ = std::min(2 * pause_, LONGEST_PAUSE);
            pace_alone_ = {};
        } else {
            pause_ = WINDOW;
        }
        pace_together_ = {};
    }

    struct Job {
        void (*call)(const void*, int, int);
        const void* work;
        int tiles;
    };

    static constexpr double WORTH_WAKING = 150e3, WORTH_SHARING = 3e3;
    static constexpr int SPINS = 4000;  // about 100 microseconds
    static constexpr double WINDOW = 30e6, LONGEST_PAUSE = 1e9;  // nanoseconds
    static constexpr int JOBS = 4;      // a late thread may still read the job of an earlier phase

    typedef std::chrono::steady_clock Clock;

    struct Pace {
        double took = 0, expected = 0;  // nanoseconds

        // Nothing is faster than what was not measured.
        bool slower_than(const Pace& other) const { return other.expected == 0 || took * other.expected > other.took * expected; }
    };

    // Whether the system took threads of this process from their cores since the last call.
    bool lost_cores() {
        rusage found{};
        getrusage(RUSAGE_SELF, &found);
        return found.ru_nivcsw > std::exchange(switches_, found.ru_nivcsw);
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
    Clock::time_point began_{}, alone_until_{};
    Pace pace_alone_, pace_together_;
    double expected_ = 0, pause_ = WINDOW;
    long switches_ = 0;
    bool together_ = false;
    std::vector<std::thread> threads_;
};
