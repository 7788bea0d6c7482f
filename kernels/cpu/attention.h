// Attention over the paged cache, by slots, to a range of columns. The scores of a query are kept for all of them. Values are
// then added in the order of the columns, and chances by the positions of the columns' tokens, without those that its mask
// hides. So a node of a tree has the same result, bit for bit, as its token has in plain decoding: both see the same
// positions in order. Which ranges there are, attention_ranges.h says.
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
    int q_len(int request) const { return qo_indptr[request + 1] - qo_indptr[request]; }
    // Columns before the mask's, or before the rows' own.
    int prefix(int request) const { return (int)kv_lens[request] - q_len(request) - (is_masked(request) ? mask_columns - mask_rows : 0); }
    int position(int request, int row) const {
        return prefix(request) + (is_masked(request) ? (int)row_depths[(int64_t)request * mask_rows + row] : row);
    }
};

// One layer of a KV pool: [kv_heads, slots, head_dim] each. Heads are computed one by one, and memory that is read in its own
// order comes twice as fast as parts of it.
struct Cache {
    void* keys;
    void* values;
    int32_t is_bf16, heads, kv_heads, head_dim;
    float scale, softcap;
    int32_t window;
    int64_t slots;
    const float* sinks;  // [heads], scores without a value; null: none

    int64_t place(int kv_head, int64_t slot) const { return (kv_head * slots + slot) * head_dim; }
};

constexpr int LARGEST_HEAD = 640;  // a latent and its rotated part
// A score is the sum of CLASSES sums: number d of a key is of class d % CLASSES. A vector has the sums of a group of QUARTER
// lanes.
constexpr int CLASSES = 4, QUARTER = LANES / CLASSES;
// Columns whose scores are computed at once, for 1 to 4 groups of lanes: their sums fill the registers.
constexpr int COLUMNS[] = {8, LANES == 16 ? 8 : 4, LANES == 16 ? 8 : 3, LANES == 16 ? 6 : 2}, MOST_COLUMNS = 8;
constexpr int FETCHED = 8;  // values are fetched so many columns ahead
constexpr int COLUMN_BLOCK = 32;  // columns whose values are mixed for all lanes, while they are in the nearest cache

// Positions of a whole piece of a context, which all rows see, and the last positions, which no piece has: a tree is less deep.
constexpr int PIECE = 64, RECENT = 64;

// What a range of columns makes of each lane: the largest score, the sum of e^(score - largest), and the values weighed by
// these.
struct Mixed {
    float *largest, *sums, *values;  // [lanes], [lanes], [lanes][dim]; the number of lanes is one of whole vectors
    int dim;

    static int64_t room(int lanes, int dim) { return (int64_t)lanes * (dim + 2); }

    Mixed(float* room, int lanes, int dim) : largest(room), sums(room + lanes), values(room + 2 * lanes), dim(dim) {}

    float* of(int lane) const { return values + (int64_t)lane * dim; }
    Mixed from(int lane) const {
        Mixed rest = *this;
        rest.largest += lane, rest.sums += lane, rest.values += (int64_t)lane * dim;
        return rest;
    }
};

static inline int groups_of(int lanes) { return (lanes + QUARTER - 1) / QUARTER; }

static inline Vector load_kv(const Cache& cache, const void* pool, int64_t place, int n) {
    return cache.is_bf16 ? load_some_bf16((const uint16_t*)pool + place, n) : load_some((const float*)pool + place, n);
}

// Where a vector begins that holds number d of a head of `dim`. The last one overlaps the one before it rather than reach
// past the head; a head of fewer than LANES numbers has one vector of `dim`.
static inline int vector_with(int d, int dim) { return std::max(0, std::min(d, dim - LANES)); }

// The slots of a request may lie anywhere, which defeats the hardware's prefetcher.
static inline void fetch(const Cache& cache, const void* pool, int64_t place, int numbers) {
    const char* from = (const char*)pool + place * (cache.is_bf16 ? 2 : 4);
    for (int line = 0; line < numbers * (cache.is_bf16 ? 2 : 4); line += 64) __builtin_prefetch(from + line);
}

// What the lanes of a block see of a range of columns. A lane is one query head of one row.
struct Lanes {
    int count, full_from, full_to, begin, end;  // columns [full_from, full_to) are seen by all lanes, none outside [begin, end)
    int prefix;                                 // columns before the mask's, or before the rows' own
    bool masked;
    const int64_t* column_depths;               // [columns from `prefix` on], if masked
    const uint8_t* visible[LANES];              // [columns from `prefix` on], if masked
    int row[LANES], head[LANES], first[LANES], last[LANES];  // last: exclusive, in the prefix

    // numbers: of the lanes, by row and by head that shares the key.
    Lanes(const Batch& batch, const Cache& cache, int request, int kv_head, const int* numbers, int count, int from, int to)
        : count(count) {
        const int shared = cache.heads / cache.kv_heads, kv_len = (int)batch.kv_lens[request];
        masked = batch.is_masked(request);
        column_depths = masked ? batch.column_depths + (int64_t)request * batch.mask_columns : nullptr;
        prefix = batch.prefix(request);
        begin = full_to = kv_len;
        full_from = end = 0;
        for (int lane = 0; lane < count; lane++) {
            row[lane] = numbers[lane] / shared;
            head[lane] = kv_head * shared + numbers[lane] % shared;
            const int position = batch.position(request, row[lane]);
            first[lane] = std::max(from, cache.window ? position - cache.window + 1 : 0);
            last[lane] = std::min(to, masked ? prefix : prefix + row[lane] + 1);
            begin = std::min(begin, first[lane]);
            full_from = std::max(full_from, first[lane]);
            full_to = std::min(full_to, last[lane]);
            end = std::max(end, masked ? std::min(to, kv_len) : last[lane]);
            if (masked) visible[lane] = batch.visible + ((int64_t)request * batch.mask_rows + row[lane]) * batch.mask_columns;
        }
    }

    bool sees(int lane, int column) const {
        if (column >= end) return false;
        if (!masked || column < prefix) return column >= first[lane] && column < last[lane];
        int offset = column - prefix;
        return visible[lane][offset] && prefix + column_depths[offset] >= first[lane];
    }
};

// Where the scores of a block of lanes stand. A vector has those of PER columns, [QUARTER lanes][PER columns][groups], so that
// few lanes fill it too.
template <int groups>
struct Scores {
    static constexpr int PER = groups > 2 ? 1 : CLASSES / groups;
    static constexpr int AT_ONCE = COLUMNS[groups - 1];

    static int64_t column(int c) { return (int64_t)(c / PER) * LANES + c % PER * groups; }
    static int lane(int lane) { return lane % QUARTER * CLASSES + lane / QUARTER; }
};

// One block of lanes of one request and KV head. q: [rows, heads, head_dim]; `scores` has room for
// [columns + MOST_COLUMNS][LANES] floats, of which the first is of column `start`.
template <int groups>
static void attend(
    const Batch& batch, const Cache& cache, const Lanes& lanes, int request, int kv_head, const float* q, const Mixed& out, float* room) {
    using At = Scores<groups>;
    constexpr int PER = At::PER;
    const int dim = cache.head_dim, q0 = batch.qo_indptr[request];
    const int32_t* slots = batch.slots(request);

    alignas(64) float queries[LARGEST_HEAD / CLASSES][groups][LANES];  // [..][..][QUARTER lanes][CLASSES]
    if (lanes.count < groups * QUARTER || dim % CLASSES) memset(queries, 0, sizeof(queries[0]) * ((dim + CLASSES - 1) / CLASSES));
    for (int lane = 0; lane < lanes.count; lane++) {
        const float* from = q + ((int64_t)(q0 + lanes.row[lane]) * cache.heads + lanes.head[lane]) * dim;
        float* to = &queries[0][lane / QUARTER][lane % QUARTER * CLASSES];
        for (int d = 0; d < dim; d += CLASSES, to += groups * LANES)
            for (int i = 0; i < std::min(CLASSES, dim - d); i++) to[i] = cache.scale * from[d + i];
    }

    auto place_of = [&](int column) { return cache.place(kv_head, slots[column]); };
    const bool copied = cache.is_bf16 || dim % CLASSES;
    const int start = lanes.begin / PER * PER;
    float* scores = room - At::column(start);
    Vector most = all(-INFINITY);
    alignas(64) float keys[At::AT_ONCE][LARGEST_HEAD];
    for (int c = start; c < lanes.end; c += At::AT_ONCE) {
        const float* key[At::AT_ONCE];
        for (int i = 0; i < At::AT_ONCE; i++) {
            int64_t place = place_of(std::max(lanes.begin, std::min(c + i, lanes.end - 1)));
            key[i] = (const float*)cache.keys + place;
            if (copied) {
                for (int d = 0; d < dim; d += LANES) {
                    int at = vector_with(d, dim);
                    store(keys[i] + at, load_kv(cache, cache.keys, place + at, std::min(LANES, dim)));
                }
                for (int d = dim; d % CLASSES; d++) keys[i][d] = 0;
                key[i] = keys[i];
            }
        }
        for (int i = c + At::AT_ONCE; i < std::min(c + 2 * At::AT_ONCE, lanes.end); i++) fetch(cache, cache.keys, place_of(i), dim);
        Vector sums[At::AT_ONCE][groups] = {};
        for (int d = 0; d < dim; d += CLASSES) {
            Vector query[groups];
            for (int g = 0; g < groups; g++) query[g] = load(queries[d / CLASSES][g]);
            for (int i = 0; i < At::AT_ONCE; i++) {
                Vector quads = repeated(key[i] + d);
                for (int g = 0; g < groups; g++) sums[i][g] = fma(quads, query[g], sums[i][g]);
            }
        }
        Vector found[At::AT_ONCE / PER];
#pragma GCC unroll 8
        for (int v = 0; v < At::AT_ONCE / PER; v++) {
            Vector parts[CLASSES] = {};
#pragma GCC unroll 4
            for (int n = 0; n < PER * groups; n++) parts[n] = sums[v * PER + n / groups][n % groups];
            found[v] = sum_fours(parts[0], parts[1], parts[2], parts[3]);
        }
        for (int i = 0; i < At::AT_ONCE && c + i < lanes.end; i += PER) {
            Vector score = found[i / PER];
            if (cache.softcap > 0) score = capped(score, cache.softcap);
            if (c + i < lanes.full_from || c + i + PER > lanes.full_to) {
                alignas(64) float each[LANES];
                store(each, score);
                for (int n = 0; n < PER; n++)
                    for (int lane = 0; lane < lanes.count; lane++)
                        if (!lanes.sees(lane, c + i + n)) each[At::lane(lane) + n * groups] = -INFINITY;
                score = load(each);
            }
            store(scores + At::column(c + i), score);
            most = max(most, score);
        }
    }

    alignas(64) float largest[LANES];
    store(largest, most);
    for (int lane = 0; lane < lanes.count; lane++) {
        float* own = largest + At::lane(lane);
        for (int n = 1; n < PER; n++) own[0] = std::max(own[0], own[n * groups]);
        for (int n = 1; n < PER; n++) own[n * groups] = own[0];
    }
    most = load(largest);
    // Sums of chances by the position of their token modulo CLASSES, which is the same in a tree and in plain decoding.
    const int ordered = lanes.masked ? lanes.prefix / PER * PER : lanes.end;
    Vector sums[CLASSES / PER] = {};
    for (int c = start; c < lanes.end; c += PER) {
        Vector chance = exponential(load(scores + At::column(c)) - most);
        store(scores + At::column(c), chance);
        if (c < ordered) sums[c % CLASSES / PER] += chance;
    }
    alignas(64) float totals[CLASSES / PER][LANES];
    for (int k = 0; k < CLASSES / PER; k++) store(totals[k], sums[k]);
    auto total = [&](int lane, int position) -> float& {
        return totals[position % CLASSES / PER][At::lane(lane) + position % PER * groups];
    };
    for (int c = std::max(start, ordered); c < lanes.end; c++) {
        int position = c < lanes.prefix ? c : lanes.prefix + lanes.column_depths[c - lanes.prefix];
        if constexpr (PER == 1) {
            store(totals[position % CLASSES], load(totals[position % CLASSES]) + load(scores + At::column(c)));
        } else {
            for (int lane = 0; lane < lanes.count; lane++) total(lane, position) += scores[At::column(c) + At::lane(lane)];
        }
    }
    for (int lane = 0; lane < lanes.count; lane++) {
        out.largest[lane] = largest[At::lane(lane)];
        out.sums[lane] = (total(lane, 0) + total(lane, 2)) + (total(lane, 1) + total(lane, 3));
    }

    // The values are mixed by blocks of columns, whose values stay in the nearest cache for all lanes.
    memset(out.values, 0, sizeof(float) * ((lanes.count + 3) / 4 * 4) * dim);  // lanes are mixed by fours
    for (int c = lanes.begin; c < lanes.end; c += COLUMN_BLOCK) {
        const int end = std::min(c + COLUMN_BLOCK, lanes.end);
        auto mix = [&]<int count, int wide>(int lane, int d) {  // `count` lanes, `wide` vectors of the values
            Vector sums[count][wide];
            for (int l = 0; l < count; l++)
                for (int i = 0; i < wide; i++) sums[l][i] = load_some(out.of(lane + l) + d + i * LANES, wide > 1 ? LANES : std::min(LANES, dim - d));
            for (int from = c; from < end; from++) {
                int64_t place = place_of(from) + d;
                const float* chances = scores + At::column(from) + lane / QUARTER;
                if (lane == 0 && from + FETCHED < lanes.end)
                    fetch(cache, cache.values, place_of(from + FETCHED) + d, wide * LANES);
                Vector value[wide];
                for (int i = 0; i < wide; i++) value[i] = load_kv(cache, cache.values, place + i * LANES, wide > 1 ? LANES : std::min(LANES, dim - d));
                bool hidden = from < lanes.full_from || from >= lanes.full_to;
                for (int l = 0; l < count; l++) {
                    float chance = chances[At::lane(l)];
                    if (hidden && chance == 0) continue;  // the value may be NaN
                    for (int i = 0; i < wide; i++) sums[l][i] = fma(all(chance), value[i], sums[l][i]);
                }
            }
            for (int l = 0; l < count; l++)
                for (int i = 0; i < wide; i++) store_some(out.of(lane + l) + d + i * LANES, sums[l][i], wide > 1 ? LANES : std::min(LANES, dim - d));
        };
        for (int d = 0; d < dim;) {
            const int wide = dim - d >= WIDE * LANES ? WIDE : 1;
            for (int lane = 0; lane < lanes.count; lane += 4) {
                bool few = lanes.count - lane <= 2;
                if (wide == WIDE) few ? mix.template operator()<2, WIDE>(lane, d) : mix.template operator()<4, WIDE>(lane, d);
                else few ? mix.template operator()<2, 1>(lane, d) : mix.template operator()<4, 1>(lane, d);
            }
            d += wide * LANES;
        }
    }
}
