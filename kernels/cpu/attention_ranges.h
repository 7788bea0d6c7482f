// Attention by ranges of columns, which are merged in order. A row at position p sees whole pieces that end before
// p + 1 - RECENT, some pieces a range, and the rest as a range; where it has a window, the columns before its first whole piece
// are a range, too. So ranges depend on the row's position alone: a node of a tree has the same ones as its token has in plain
// decoding, whoever computes them. Trees are less deep than RECENT (DEEPEST_TREE of eagle_server/algorithms.py).
#pragma once

#include <vector>

#include "attention_tiles.h"

// Columns of whole pieces in a range, and the most lanes that read a range together.
constexpr int RANGE = 16 * PIECE, MOST_LANES = 4 * LANES > 64 ? 4 * LANES : 64;

// Pieces [first, end). If `first` is not 0, a window begins in the piece before it.
struct Pieces {
    int first, end;

    Pieces(const Batch& batch, const Cache& cache, int request, int row) {
        const int position = batch.position(request, row), begin = cache.window ? position + 1 - cache.window : 0;
        const int written = batch.prefix(request) + (batch.is_masked(request) ? 0 : row);
        end = std::max(0, std::min(position + 1 - RECENT, written) / PIECE);
        first = begin > 0 ? begin / PIECE + 1 : 0;
        if (first >= end) first = end = 0;
    }

    bool operator==(const Pieces& other) const { return first == other.first && end == other.end; }
    bool operator<(const Pieces& other) const { return first != other.first ? first < other.first : end < other.end; }

    bool are_cut() const { return first > 0; }
    int ranges() const { return are_cut() + (end * PIECE + RANGE - 1) / RANGE - first * PIECE / RANGE + 1; }

    // The columns of range `number`, [from, to); the last one has all others.
    struct Columns {
        int from, to;
        bool are_whole, are_last;
    };
    Columns columns(int number) const {
        if (number == ranges() - 1) return {end * PIECE, 0, false, true};
        if (are_cut() && number == 0) return {0, first * PIECE, false, false};
        const int start = (first * PIECE / RANGE + number - are_cut()) * RANGE;
        return {std::max(start, first * PIECE), std::min(start + RANGE, end * PIECE), true, false};
    }
};

// Lanes of a request that see the same pieces.
struct Task {
    int request, count;
    Pieces pieces;
    int numbers[MOST_LANES];
};

// `most`: lanes of a task.
static void find_tasks(const Batch& batch, const Cache& cache, int most, std::vector<Task>& tasks) {
    const int shared = cache.heads / cache.kv_heads;
    std::vector<std::pair<Pieces, int>> rows;
    tasks.clear();
    for (int request = 0; request < batch.requests; request++) {
        rows.clear();
        for (int row = 0; row < batch.q_len(request); row++) rows.emplace_back(Pieces(batch, cache, request, row), row);
        std::sort(rows.begin(), rows.end());
        const size_t before = tasks.size();
        for (const auto& [pieces, row] : rows)
            for (int head = 0; head < shared; head++) {
                if (tasks.size() == before || !(tasks.back().pieces == pieces) || tasks.back().count == most)
                    tasks.push_back({request, 0, pieces, {}});
                tasks.back().numbers[tasks.back().count++] = row * shared + head;
            }
    }
}

static void merge(const Mixed& to, const Mixed& more, int lanes) {
    for (int lane = 0; lane < lanes; lane += LANES) {
        const Vector a = load(to.largest + lane), b = load(more.largest + lane), larger = max(a, b);
        alignas(64) float kept[LANES], added[LANES];
        store(kept, exponential(a - larger)), store(added, exponential(b - larger));
        store(to.largest + lane, larger);
        store(to.sums + lane, fma(load(more.sums + lane), load(added), load(to.sums + lane) * load(kept)));
        for (int i = 0; i < LANES && lane + i < lanes; i++) {
            float *values = to.of(lane + i), *others = more.of(lane + i);
            for (int d = 0; d < to.dim; d += LANES) {
                const int n = std::min(LANES, to.dim - d);
                store_some(values + d, fma(load_some(others + d, n), all(added[i]), load_some(values + d, n) * kept[i]), n);
            }
        }
    }
}

// One layer's attention for the rows of a forward.
struct Attention {
    const Batch& batch;
    const Cache& cache;
    const float* q;  // [rows, heads, head_dim]
    float* out;      // the same
    const int dim = cache.head_dim, shared = cache.heads / cache.kv_heads;

    // Floats that a thread needs: what it has so far, a range more, and room to compute it.
    int64_t room() const {
        const int64_t columns = std::max(RANGE, 4 * PIECE + RECENT + LANES + batch.mask_columns);
        int64_t scratch = (columns + MOST_COLUMNS) * LANES;
#if defined(HAS_ATTENTION_TILES)
        if (attends_by_tiles(cache)) scratch = std::max(scratch, TilePieces<4>::room(dim));
#endif
        return 2 * mixed_room() + scratch;
    }

    int64_t mixed_room() const { return (Mixed::room(MOST_LANES, dim) + 15) / 16 * 16; }

    // Range `number` of a task.
    void compute(const Task& task, int kv_head, int number, const Mixed& to, float* room) const {
        const Pieces::Columns columns = task.pieces.columns(number);
        const int from = columns.from, end = columns.are_last ? (int)batch.kv_lens[task.request] : columns.to;
#if defined(HAS_ATTENTION_TILES)
        if (columns.are_whole && attends_by_tiles(cache)) {
            auto run = [&]<int blocks>() {
                TilePieces<blocks> pieces(cache, batch.slots(task.request), kv_head, room);
                pieces.set_queries([&](int lane) { return lane < task.count ? query(task, kv_head, lane) : nullptr; });
                pieces.add(from, end, task.pieces.end * PIECE);
                pieces.finish(to, task.count);
            };
            switch ((task.count + TILE - 1) / TILE) {
                case 1: return run.template operator()<1>();
                case 2: return run.template operator()<2>();
                case 3: return run.template operator()<3>();
                default: return run.template operator()<4>();
            }
        }
#endif
        for (int block = 0; block < task.count; block += LANES) {
            const Lanes lanes(batch, cache, task.request, kv_head, task.numbers + block, std::min(LANES, task.count - block), from, end);
            const Mixed part = to.from(block);
            auto run = [&]<int groups>() { attend<groups>(batch, cache, lanes, task.request, kv_head, q, part, room); };
            switch (groups_of(lanes.count)) {
                case 1: run.template operator()<1>(); break;
                case 2: run.template operator()<2>(); break;
                case 3: run.template operator()<3>(); break;
                default: run.template operator()<4>();
            }
        }
    }

    const float* query(const Task& task, int kv_head, int lane) const { return q + place(task, kv_head, lane); }

    int64_t place(const Task& task, int kv_head, int lane) const {
        const int row = task.numbers[lane] / shared, head = kv_head * shared + task.numbers[lane] % shared;
        return ((int64_t)(batch.qo_indptr[task.request] + row) * cache.heads + head) * dim;
    }

    // A sink is a score without a value.
    void finish(const Task& task, int kv_head, const Mixed& all_of_it) const {
        for (int lane = 0; lane < task.count; lane++) {
            const float* from = all_of_it.of(lane);
            float *to = out + place(task, kv_head, lane), divisor = all_of_it.sums[lane], factor = 1;
            if (cache.sinks) {
                const float sink = cache.sinks[kv_head * shared + task.numbers[lane] % shared], larger = std::max(sink, all_of_it.largest[lane]);
                factor = std::exp(all_of_it.largest[lane] - larger);
                divisor = divisor * factor + std::exp(sink - larger);
            }
            for (int d = 0; d < dim; d++) to[d] = from[d] * factor / divisor;
        }
    }
};

// About how long one thread takes.
static double attention_nanoseconds(const Batch& batch, const Cache& cache) {
    double groups = 0;
    for (int i = 0; i < batch.requests; i++) {
        int lanes = batch.q_len(i) * (cache.heads / cache.kv_heads);
        groups += (double)groups_of(lanes) * (batch.kv_lens[i] + 8);
    }
    return groups * cache.kv_heads * cache.head_dim * 0.2;
}

// Every request and KV head. `rooms(thread)` gives room for `Attention::room` floats, `shared(n)` for n floats of all threads.
template <class Rooms, class Shared>
static void attend_all(Team& team, const Attention& a, std::vector<Task>& tasks, const Rooms& rooms, const Shared& shared) {
    const int kv_heads = a.cache.kv_heads, wanted = 4 * team.size();
    int64_t blocks = 0;
    for (int i = 0; i < a.batch.requests; i++) blocks += ((int64_t)a.batch.q_len(i) * a.shared + LANES - 1) / LANES;
    // As many lanes as leave enough tasks: together they read keys and values once.
    const int together = (int)std::min<int64_t>(MOST_LANES / LANES, std::max<int64_t>(1, (blocks * kv_heads + wanted - 1) / wanted)), most = together * LANES;
    find_tasks(a.batch, a.cache, most, tasks);
    const double nanoseconds = attention_nanoseconds(a.batch, a.cache);
    const int64_t size = a.mixed_room();
    const int count = (int)tasks.size();
    int longest = 1;
    for (const Task& task : tasks) longest = std::max(longest, task.pieces.ranges());
    if (longest == 1 || count * kv_heads >= wanted / 2) {
        team.run(count * kv_heads, nanoseconds, [&](int tile, int thread) {
            const Task& task = tasks[tile / kv_heads];
            const int kv_head = tile % kv_heads;
            float* room = rooms(thread);
            const Mixed whole(room, MOST_LANES, a.dim), more(room + size, MOST_LANES, a.dim);
            a.compute(task, kv_head, 0, whole, room + 2 * size);
            for (int range = 1; range < task.pieces.ranges(); range++) {
                a.compute(task, kv_head, range, more, room + 2 * size);
                merge(whole, more, task.count);
            }
            a.finish(task, kv_head, whole);
        });
        return;
    }
    float* parts = shared(size * count * kv_heads * longest);
    auto part = [&](int tile, int range) { return Mixed(parts + size * ((int64_t)tile * longest + range), MOST_LANES, a.dim); };
    team.run(count * kv_heads * longest, nanoseconds, [&](int number, int thread) {
        const int tile = number / longest, range = number % longest;
        const Task& task = tasks[tile / kv_heads];
        if (range < task.pieces.ranges()) a.compute(task, tile % kv_heads, range, part(tile, range), rooms(thread) + 2 * size);
    });
    team.run(count * kv_heads, 0.1 * longest * count * kv_heads * most * a.dim, [&](int tile, int) {
        const Task& task = tasks[tile / kv_heads];
        for (int range = 1; range < task.pieces.ranges(); range++) merge(part(tile, 0), part(tile, range), task.count);
        a.finish(task, tile % kv_heads, part(tile, 0));
    });
}

// Store k, v [kv_heads, head_dim] of row `row` in its slot; of latents, whose keys are the values, k alone.
static void write_row(const Batch& batch, const Cache& cache, int row, const float* k, const float* v) {
    for (int head = 0; head < cache.kv_heads; head++, k += cache.head_dim, v += cache.head_dim) {
        int64_t place = cache.place(head, batch.out_cache_loc[row]);
        auto write = [&](void* pool, const float* from) {
            if (cache.is_bf16) store_bf16((uint16_t*)pool + place, from, cache.head_dim);
            else memcpy((float*)pool + place, from, 4 * cache.head_dim);
        };
        write(cache.keys, k);
        if (cache.values != cache.keys) write(cache.values, v);
    }
}
