// Attention over the paged cache, by slots. The scores of a query are kept for all columns, and then added in the order of
// the columns, without those that its mask hides. So a node of a tree has the same result, bit for bit, as its token has
// in plain decoding, where the same columns stand in the same order.
#pragma once

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vector.h"

// The rows of one forward: AttentionBatch of eagle_server/attention/interface.py.
struct Batch {
    int32_t rows, requests;
    const int64_t* positions;          // [rows]
    const int64_t* out_cache_loc;      // [rows]
    const int32_t* qo_indptr;          // [requests + 1]
    const int64_t* req_pool_indices;   // [requests], rows of the page table
    const int64_t* kv_lens;            // [requests], slots read
    const int32_t* req_to_token;       // the page table, [max requests, table_width]
    const uint8_t* visible;            // [masked, mask_rows, mask_columns]
    const int64_t* row_depths;         // [masked, mask_rows]
    const int64_t* column_depths;      // [masked, mask_columns]
    int32_t mask_rows, mask_columns;
    int32_t masked;                    // the first requests, which have a tree mask; the others are causal
    int64_t table_width;

    const int32_t* slots(int request) const { return req_to_token + req_pool_indices[request] * table_width; }
    bool is_masked(int request) const { return request < masked; }
};

// One layer of a KV pool: [slots, kv_heads, head_dim] each.
struct Cache {
    void* keys;
    void* values;
    int32_t is_bf16, heads, kv_heads, head_dim;
    float scale, softcap;
    int32_t window;
    int64_t slots;
    const float* sinks;  // [heads], scores without a value; null: none
};

constexpr int LARGEST_HEAD = 512;
constexpr int COLUMNS = 8;  // columns whose scores are computed at once

static inline Vector load_kv(const Cache& cache, const void* pool, int64_t place, int n) {
    return cache.is_bf16 ? load_some_bf16((const uint16_t*)pool + place, n) : load_some((const float*)pool + place, n);
}

// Where a vector begins that holds number d of a head of `dim`. The last one overlaps the one before it rather than reach
// past the head; a head of fewer than LANES numbers has one vector of `dim`.
static inline int vector_with(int d, int dim) { return std::max(0, std::min(d, dim - LANES)); }

// The slots of a request may lie anywhere, which defeats the hardware's prefetcher.
static inline void fetch(const Cache& cache, const void* pool, int64_t place) {
    const char* from = (const char*)pool + place * (cache.is_bf16 ? 2 : 4);
    for (int line = 0; line < cache.head_dim * (cache.is_bf16 ? 2 : 4); line += 64) __builtin_prefetch(from + line);
}

// What the lanes of a block see. A lane is one query head of one row.
struct Lanes {
    int count, full_from, full_to, end;  // columns [full_from, full_to) are seen by all lanes, none from `end` on
    int begin;
    int row[LANES], head[LANES], position[LANES], first[LANES], last[LANES];  // last: exclusive, in the prefix
};

static bool sees(const Batch& batch, const Cache& cache, const Lanes& lanes, int lane, int request, int prefix, int column) {
    if (!batch.is_masked(request) || column < prefix) return column >= lanes.first[lane] && column < lanes.last[lane];
    int64_t place = (int64_t)request * batch.mask_rows + lanes.row[lane];
    int64_t offset = column - prefix;
    if (!batch.visible[place * batch.mask_columns + offset]) return false;
    int64_t depth = batch.column_depths[(int64_t)request * batch.mask_columns + offset];
    return !cache.window || prefix + depth > lanes.position[lane] - cache.window;
}

// One block of lanes of one request and KV head. q, out: [rows, heads, head_dim]; `scores` holds [columns][LANES] floats.
static void attend(
    const Batch& batch, const Cache& cache, int request, int kv_head, int block, const float* q, float* out, float* scores) {
    const int dim = cache.head_dim, filled = std::min(LANES, dim), shared = cache.heads / cache.kv_heads;
    const int q0 = batch.qo_indptr[request], q_len = batch.qo_indptr[request + 1] - q0;
    const int32_t* slots = batch.slots(request);
    const int kv_len = (int)batch.kv_lens[request];
    const bool masked = batch.is_masked(request);
    const int prefix = masked ? kv_len - batch.mask_columns + batch.mask_rows - q_len : kv_len - q_len;

    Lanes lanes;
    lanes.count = std::min(LANES, q_len * shared - block * LANES);
    lanes.begin = lanes.full_to = kv_len;
    lanes.full_from = lanes.end = 0;
    for (int lane = 0; lane < lanes.count; lane++) {
        int row = (block * LANES + lane) / shared;
        int depth = masked ? (int)batch.row_depths[(int64_t)request * batch.mask_rows + row] : row;
        lanes.row[lane] = row;
        lanes.head[lane] = kv_head * shared + (block * LANES + lane) % shared;
        lanes.position[lane] = prefix + depth;
        lanes.first[lane] = cache.window ? std::max(0, prefix + depth - cache.window + 1) : 0;
        lanes.last[lane] = masked ? prefix : prefix + row + 1;
        lanes.begin = std::min(lanes.begin, lanes.first[lane]);
        lanes.full_from = std::max(lanes.full_from, lanes.first[lane]);
        lanes.full_to = std::min(lanes.full_to, lanes.last[lane]);
        lanes.end = std::max(lanes.end, masked ? kv_len : lanes.last[lane]);
    }

    alignas(64) float queries[LARGEST_HEAD][LANES];  // transposed
    if (lanes.count < LANES) memset(queries, 0, sizeof(float) * LANES * dim);
    for (int lane = 0; lane < lanes.count; lane++) {
        const float* from = q + ((int64_t)(q0 + lanes.row[lane]) * cache.heads + lanes.head[lane]) * dim;
        for (int d = 0; d < dim; d++) queries[d][lane] = cache.scale * from[d];
    }

    const int64_t slot_size = (int64_t)cache.kv_heads * dim, offset = (int64_t)kv_head * dim;
    alignas(64) float sinks[LANES] = {};
    for (int lane = 0; cache.sinks && lane < lanes.count; lane++) sinks[lane] = cache.sinks[lanes.head[lane]];
    Vector most = cache.sinks ? load(sinks) : all(-INFINITY);
    alignas(64) float keys[COLUMNS][LARGEST_HEAD];
    for (int c = lanes.begin; c < lanes.end; c += COLUMNS) {
        int count = std::min(COLUMNS, lanes.end - c);
        const float* key[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) {
            int64_t place = slots[c + std::min(i, count - 1)] * slot_size + offset;
            key[i] = (const float*)cache.keys + place;
            if (cache.is_bf16) {
                for (int d = 0; d < dim; d += LANES) {
                    int at = vector_with(d, dim);
                    store(keys[i] + at, load_kv(cache, cache.keys, place + at, filled));
                }
                key[i] = keys[i];
            }
        }
        for (int i = c + COLUMNS; i < std::min(c + 2 * COLUMNS, lanes.end); i++) fetch(cache, cache.keys, slots[i] * slot_size + offset);
        Vector sums[COLUMNS] = {};
        for (int d = 0; d < dim; d++) {
            Vector query = load(queries[d]);
            for (int i = 0; i < COLUMNS; i++) sums[i] = fma(all(key[i][d]), query, sums[i]);
        }
        for (int i = 0; i < count; i++) {
            Vector score = sums[i];
            if (cache.softcap > 0)
                score = cache.softcap * (1.0f - 2.0f / (1.0f + exponential(score * (2.0f / cache.softcap))));
            if (c + i < lanes.full_from || c + i >= lanes.full_to) {
                float each[LANES];
                store(each, score);
                for (int lane = 0; lane < lanes.count; lane++)
                    if (!sees(batch, cache, lanes, lane, request, prefix, c + i)) each[lane] = -INFINITY;
                score = load(each);
            }
            store(scores + (int64_t)(c + i) * LANES, score);
            most = max(most, score);
        }
    }
    Vector total = cache.sinks ? exponential(load(sinks) - most) : Vector{};
    for (int c = lanes.begin; c < lanes.end; c++) {
        Vector chance = exponential(load(scores + (int64_t)c * LANES) - most);
        store(scores + (int64_t)c * LANES, chance);
        total = total + chance;
    }
    float totals[LANES];
    store(totals, total);
    auto mix = [&]<int wide>(int lane, int d) {  // AT_ONCE lanes, `wide` vectors of the values
        constexpr int AT_ONCE = 4;
        Vector sums[AT_ONCE][wide] = {};
        for (int c = lanes.begin; c < lanes.end; c++) {
            int64_t place = slots[c] * slot_size + offset + d;
            const float* chances = scores + (int64_t)c * LANES + lane;
            if (c + COLUMNS < lanes.end) fetch(cache, cache.values, slots[c + COLUMNS] * slot_size + offset + d);
            Vector value[wide];
            for (int i = 0; i < wide; i++) value[i] = load_kv(cache, cache.values, place + i * LANES, wide > 1 ? LANES : filled);
            bool hidden = c < lanes.full_from || c >= lanes.full_to;
            for (int l = 0; l < AT_ONCE; l++) {
                if (hidden && chances[l] == 0) continue;  // the value may be NaN
                for (int i = 0; i < wide; i++) sums[l][i] = fma(all(chances[l]), value[i], sums[l][i]);
            }
        }
        for (int l = lane; l < std::min(lane + AT_ONCE, lanes.count); l++) {
            float* to = out + ((int64_t)(q0 + lanes.row[l]) * cache.heads + lanes.head[l]) * dim + d;
            for (int i = 0; i < wide; i++) store_some(to + i * LANES, sums[l - lane][i] / totals[l], wide > 1 ? LANES : filled);
        }
        return lane + AT_ONCE;
    };
    for (int d = 0; d < dim;) {
        int wide = dim - d >= WIDE * LANES ? WIDE : 1;
        for (int lane = 0; lane < lanes.count;)
            lane = wide == WIDE ? mix.template operator()<WIDE>(lane, d) : mix.template operator()<1>(lane, vector_with(d, dim));
        d += wide * LANES;
    }
}

static int longest_kv(const Batch& batch) {
    int longest = 0;
    for (int i = 0; i < batch.requests; i++) longest = std::max(longest, (int)batch.kv_lens[i]);
    return longest;
}

// About how long one thread takes.
static double attention_nanoseconds(const Batch& batch, const Cache& cache) {
    double blocks = 0;
    for (int i = 0; i < batch.requests; i++) {
        int lanes = (batch.qo_indptr[i + 1] - batch.qo_indptr[i]) * (cache.heads / cache.kv_heads);
        blocks += (double)((lanes + LANES - 1) / LANES) * (batch.kv_lens[i] + 8);
    }
    return blocks * cache.kv_heads * cache.head_dim * 0.4;
}

// Every request, KV head and block of lanes. `scores(thread)` gives room for [longest_kv][LANES] floats.
template <class Scores>
static void attend_all(Team& team, const Batch& batch, const Cache& cache, const float* q, float* out, const Scores& scores) {
    const int shared = cache.heads / cache.kv_heads;
    int most = 0;  // blocks of a request
    for (int i = 0; i < batch.requests; i++)
        most = std::max(most, ((batch.qo_indptr[i + 1] - batch.qo_indptr[i]) * shared + LANES - 1) / LANES);
    team.run(batch.requests * cache.kv_heads * most, attention_nanoseconds(batch, cache), [&](int tile, int thread) {
        int request = tile / (cache.kv_heads * most), kv_head = tile / most % cache.kv_heads, block = tile % most;
        int rows = batch.qo_indptr[request + 1] - batch.qo_indptr[request];
        if (block * LANES < rows * shared) attend(batch, cache, request, kv_head, block, q, out, scores(thread));
    });
}

// Store k, v [rows, kv_heads, head_dim] of row `row`, `stride` floats apart, in its slot.
static void write_row(const Batch& batch, const Cache& cache, int row, const float* k, const float* v) {
    int size = cache.kv_heads * cache.head_dim;
    int64_t place = batch.out_cache_loc[row] * (int64_t)size;
    if (!cache.is_bf16) {
        memcpy((float*)cache.keys + place, k, 4 * size);
        memcpy((float*)cache.values + place, v, 4 * size);
        return;
    }
    store_bf16((uint16_t*)cache.keys + place, k, size);
    store_bf16((uint16_t*)cache.values + place, v, size);
}
