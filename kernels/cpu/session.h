// The threads and the scratch memory of all calls.
#pragma once

#include <mutex>

#include "attention.h"
#include "linear.h"

// Threads, and memory that grows with the forwards and is kept.
struct Session {
    explicit Session(int threads) : team(threads), scores(threads), noise(threads) {}

    // It begins at a cache line.
    template <class T> static T* room(std::vector<T>& buffer, int64_t size) {
        const int64_t line = 64 / sizeof(T);
        if ((int64_t)buffer.size() < size + line) buffer.resize(size + line);
        return (T*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);
    }

    void attend(const Batch& batch, const Cache& cache, const float* query, float* out) {
        int64_t size = (int64_t)longest_kv(batch) * LANES;
        attend_all(team, batch, cache, query, out, [&](int thread) { return room(scores[thread], size); });
    }

    std::mutex mutex;
    Team team;
    std::vector<float> qkv, q, mixed, normed;                            // of a layer
    std::vector<float> features, hidden, parts, stream, after, logits;  // of a draft head
    std::vector<uint32_t> input;
    std::vector<int> starts;
    std::vector<std::vector<float>> scores, noise;  // of each thread
};
