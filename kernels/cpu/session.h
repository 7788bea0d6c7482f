// The threads and the scratch memory of all calls.
#pragma once

#include <mutex>

#include "attention_ranges.h"
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
        const Attention attention{batch, cache, query, out};
        const int64_t size = attention.room();
        attend_all(team, attention, tasks, [&](int thread) { return room(scores[thread], size); }, [&](int64_t n) { return room(ranges, n); });
    }

    std::mutex mutex;
    Team team;
    std::vector<float> qkv, q, v, mixed, normed, added, gates, rates;    // of a layer
    std::vector<float> kernels, convolved;                             // of convolutions over a block
    std::vector<float> features, hidden, parts, stream, after, logits;  // of a draft head
    std::vector<float> expert_weights, both, activated, routed, experts;  // of experts
    std::vector<float> ranges;  // of attention
    std::vector<Task> tasks;
    std::vector<uint32_t> input, gathered;
    std::vector<int> starts, chosen;
    std::vector<std::vector<float>> scores, noise;  // of each thread
};

namespace {

// limit > 0: the activated gate is at most the limit, and up in [-limit, limit] (Step).
void gate_mul(const float* gate_up, int size, int activation, float* to, float limit = 0) {
    const Vector most = all(limit);
    for (int i = 0; i < size; i += LANES) {
        int n = std::min(LANES, size - i);
        Vector gate = activated(activation, load_some(gate_up + i, n)), up = load_some(gate_up + size + i, n);
        if (limit > 0) gate = -max(-gate, -most), up = max(-max(-up, -most), -most);
        store_some(to + i, gate * up, n);
    }
}

void squared_relu(const float* up, int size, float* to) {
    for (int i = 0; i < size; i += LANES) {
        const int n = std::min(LANES, size - i);
        const Vector positive = max(load_some(up + i, n), Vector{});
        store_some(to + i, positive * positive, n);
    }
}

constexpr int ROW_TILE = 8;

// `size`: floats of a row.
template <class Work> void for_rows(Team& team, int rows, int size, const Work& work) {
    team.run((rows + ROW_TILE - 1) / ROW_TILE, 0.3 * rows * size, [&](int tile, int) {
        for (int row = tile * ROW_TILE; row < std::min(rows, (tile + 1) * ROW_TILE); row++) work(row);
    });
}

const uint32_t* prepared(Session& s, const Packed& w, const float* x, int rows) {
    int64_t stride = input_stride(w);
    if (is_prepared(w)) return (const uint32_t*)x;
    uint32_t* to = Session::room(s.input, rows * stride);
    for_rows(s.team, rows, w.in, [&](int row) { prepare_row(w, x + (int64_t)row * w.in, to + row * stride); });
    return to;
}

void product(Session& s, const Packed& w, const float* x, int rows, float* y, bool add = false, int start = 0) {
    linear(s.team, w, prepared(s, w, x, rows), rows, y, add, start);
}

}  // namespace
