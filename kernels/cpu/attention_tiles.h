// Attention to whole pieces by tiles: queries and chances are rounded to bfloat16, sums are float32. What a lane's numbers
// are does not depend on the other lanes.
#pragma once

#include "attention.h"
#include "tiles.h"

#if defined(HAS_TILES) && defined(__AVX512BF16__)
#define HAS_ATTENTION_TILES

constexpr int STEP = 2 * TILE;  // numbers of a head, or columns, that one instruction multiplies

static inline bool attends_by_tiles(const Cache& cache) { return cache.is_bf16 && cache.head_dim % STEP == 0 && has_tiles(); }

// Both rounded to bfloat16, one after the other, and number i of both side by side as word i.
static inline Words one_after_other(Vector first, Vector second) { return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

static inline Words side_by_side(Vector first, Vector second) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Words)_mm512_permutexvar_epi16(order, (__m512i)one_after_other(first, second));
}

// e^x of x <= 0 with a relative error below 1e-5, which rounding to bfloat16 hides; 0 below about -90.
static inline Vector chance_of(Vector x) {
    x = (Vector)_mm512_max_ps((__m512)x, _mm512_set1_ps(-120));
    const Vector n = fma(x, all(1.44269504f), all(ROUNDING)) - ROUNDING, r = fma(n, all(-0.693147181f), x);
    Vector y = all(1.0f / 120);
    for (float c : {1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, all(c));
    return (Vector)_mm512_scalef_ps((__m512)y, (__m512)n);
}

// Rows become columns.
static inline void transpose(Words (&x)[TILE]) {
    __m512i a[TILE], b[TILE];
    for (int i = 0; i < TILE; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    }
    for (int i = 0; i < TILE; i += 4) {
        for (int half = 0; half < 2; half++) {
            b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + 2 + half]);
            b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + 2 + half]);
        }
    }
    for (int i = 0; i < 4; i++) {  // b[4 j + i] has column i + 4 k of rows 4 j to 4 j + 3 in its quarter k
        const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44), high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xee);
        const __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44), high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xee);
        x[i] = (Words)_mm512_shuffle_i32x4(low, low2, 0x88), x[4 + i] = (Words)_mm512_shuffle_i32x4(low, low2, 0xdd);
        x[8 + i] = (Words)_mm512_shuffle_i32x4(high, high2, 0x88), x[12 + i] = (Words)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
}

// The columns of a range of whole pieces, for `blocks` blocks of TILE lanes. Everything is read by lines of 64 bytes.
template <int blocks> struct TilePieces {
    static constexpr int LANES_HERE = blocks * TILE, KEY_TILES = PIECE / TILE, VALUE_STEPS = PIECE / STEP;

    const Cache& cache;
    const int32_t* slots;
    const int kv_head, dim, key_steps;
    uint32_t* queries;               // [key_steps][blocks][TILE words][TILE lanes]
    uint32_t* gathered;              // [TILE keys][dim / 2]
    float* scores;                   // [PIECE][blocks][TILE lanes]
    uint32_t* chances;               // [VALUE_STEPS][blocks][TILE lanes][TILE words]
    uint32_t* values;                // [PIECE / 2][dim], two columns side by side; of 32 numbers first 0 to 3, 8 to 11, ..., then the others
    float* mixed;                    // [LANES_HERE][dim], in the order of `values`
    Vector most[blocks], sums[blocks];
    int fetched = 0, limit = 0;  // columns
    bool of_values = false;      // whether the keys of column `fetched` are fetched, and not yet its values

    static int64_t room(int dim) {
        return (int64_t)LANES_HERE * dim / 2 + TILE * dim / 2 + PIECE * LANES_HERE + PIECE / 2 * LANES_HERE + PIECE / 2 * dim + LANES_HERE * dim;
    }

    TilePieces(const Cache& cache, const int32_t* slots, int kv_head, float* room)
        : cache(cache), slots(slots), kv_head(kv_head), dim(cache.head_dim), key_steps(dim / STEP) {
        queries = (uint32_t*)room;
        gathered = queries + LANES_HERE * dim / 2;
        scores = (float*)(gathered + TILE * dim / 2);
        chances = (uint32_t*)(scores + PIECE * LANES_HERE);
        values = chances + PIECE / 2 * LANES_HERE;
        mixed = (float*)(values + PIECE / 2 * dim);
        for (int b = 0; b < blocks; b++) most[b] = all(-INFINITY), sums[b] = Vector{};
        memset(mixed, 0, sizeof(float) * LANES_HERE * dim);
    }

    // query(lane): its numbers; null beyond the last.
    template <class Query> void set_queries(const Query& query) {
        for (int b = 0; b < blocks; b++)
            for (int k = 0; k < key_steps; k++) {
                Words rows[TILE] = {};
                for (int lane = 0; lane < TILE; lane++)
                    if (const float* from = query(b * TILE + lane))
                        rows[lane] = one_after_other(cache.scale * load(from + k * STEP), cache.scale * load(from + k * STEP + LANES));
                transpose(rows);
                memcpy(queries + (k * blocks + b) * TILE * TILE, rows, sizeof rows);
            }
    }

    const uint16_t* keys_of(int column) const { return (const uint16_t*)cache.keys + cache.place(kv_head, slots[column]); }
    const uint16_t* values_of(int column) const { return (const uint16_t*)cache.values + cache.place(kv_head, slots[column]); }

    // Keys of TILE columns, rows of dim / 2 words: where they are, if their slots follow each other.
    const uint32_t* keys(int column) const {
        const Words found = (Words)_mm512_loadu_si512(slots + column), first = Words{} + (uint32_t)slots[column];
        const Words next = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        if (_mm512_cmpeq_epi32_mask((__m512i)found, (__m512i)(first + next)) == 0xffff) return (const uint32_t*)keys_of(column);
        for (int i = 0; i < TILE; i++) memcpy(gathered + i * dim / 2, keys_of(column + i), 2 * dim);
        return gathered;
    }

    // Memory is read ahead all the time, and not only while scores are computed: `parts` calls, spread evenly, fetch the next
    // piece.
    void fetch(int parts) {
        const int lines = dim / 32;
        for (int n = 2 * PIECE * lines / parts; n > 0 && fetched < limit; n -= lines) {
            const char* at = (const char*)(of_values ? values_of(fetched) : keys_of(fetched));
            for (int line = 0; line < lines; line++) __builtin_prefetch(at + 64 * line, 0, 2);
            fetched += of_values, of_values = !of_values;
        }
    }

    void find_scores(int from) {
        for (int tile = 0; tile < KEY_TILES; tile++) {
            const int column = from + tile * TILE;
            const uint32_t* key = keys(column);
            fetch(4 * KEY_TILES);
            each<blocks>([]<int b>() { tile_zero<b>(); });
            for (int k = 0; k < key_steps; k++) {
                tile_load<6>(key + k * TILE, dim / 2);
                each<blocks>([&]<int b>() {
                    tile_load<4 + b % 2>(queries + (k * blocks + b) * TILE * TILE, TILE);
                    tile_dot<PAIRS, b, 6, 4 + b % 2>();
                });
            }
            each<blocks>([&]<int b>() { tile_store<b>((uint32_t*)scores + (tile * TILE * blocks + b) * TILE, LANES_HERE); });
        }
    }

    // Scores become chances, relative to the largest so far.
    void find_chances(int b) {
        const float* own = scores + b * TILE;
        Vector larger = most[b];
        if (cache.softcap > 0)
            for (int c = 0; c < PIECE; c++) {
                const Vector score = load(own + c * LANES_HERE);
                store(scores + b * TILE + c * LANES_HERE, capped(score, cache.softcap));
            }
        for (int c = 0; c < PIECE; c++) larger = max(larger, load(own + c * LANES_HERE));
        const Vector kept = chance_of(most[b] - larger);
        Vector even{}, odd{};
        Words pairs[TILE];
        for (int step = 0; step < VALUE_STEPS; step++) {
            for (int i = 0; i < TILE; i++) {
                const float* two = own + (step * STEP + 2 * i) * LANES_HERE;
                const Vector first = chance_of(load(two) - larger), second = chance_of(load(two + LANES_HERE) - larger);
                even += first, odd += second;
                pairs[i] = side_by_side(first, second);
                if (i % 4 == 0) fetch(4 * PIECE / 8 * blocks);
            }
            transpose(pairs);
            memcpy(chances + (step * blocks + b) * TILE * TILE, pairs, sizeof pairs);
        }
        sums[b] = fma(sums[b], kept, even + odd);
        most[b] = larger;
        alignas(64) float factors[TILE];
        store(factors, kept);
        for (int lane = 0; lane < TILE; lane++) {
            if (factors[lane] == 1) continue;
            float* row = mixed + (b * TILE + lane) * dim;
            for (int d = 0; d < dim; d += LANES) store(row + d, load(row + d) * factors[lane]);
        }
    }

    void arrange_values(int from) {
        for (int pair = 0; pair < PIECE / 2; pair++) {
            const uint16_t *first = values_of(from + 2 * pair), *second = values_of(from + 2 * pair + 1);
            uint32_t* to = values + pair * dim;
            fetch(4 * PIECE / 2);
            for (int d = 0; d < dim; d += STEP) {
                const __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
                _mm512_store_si512(to + d, _mm512_unpacklo_epi16(a, b));
                _mm512_store_si512(to + d + TILE, _mm512_unpackhi_epi16(a, b));
            }
        }
    }

    // Adds the values weighed by the chances: `many` blocks from `block` on, two tiles of numbers at a time.
    template <int many> void mix(int block) {
        for (int d = 0; d < dim; d += STEP) {
            float* to = mixed + block * TILE * dim + d;
            each<2 * many>([&]<int t>() { tile_load<t>((const uint32_t*)to + t / 2 * TILE * dim + t % 2 * TILE, dim); });
            for (int step = 0; step < VALUE_STEPS; step++) {
                if (many == 2 || blocks == 1) fetch(4 * (dim / STEP) * VALUE_STEPS * std::max(1, blocks / 2));
                each<2>([&]<int half>() { tile_load<4 + half>(values + step * TILE * dim + d + half * TILE, dim); });
                each<many>([&]<int b>() {
                    tile_load<6 + b>(chances + (step * blocks + block + b) * TILE * TILE, TILE);
                    each<2>([&]<int half>() { tile_dot<PAIRS, 2 * b + half, 6 + b, 4 + half>(); });
                });
            }
            each<2 * many>([&]<int t>() { tile_store<t>((uint32_t*)to + t / 2 * TILE * dim + t % 2 * TILE, dim); });
        }
    }

    // until: where later pieces end.
    void add(int from, int to, int until) {
        limit = until, fetched = from;
        Tiles shapes;
        for (int t = 0; t < 8; t++) shapes.set(t, TILE, TILE);
        shapes.begin();
        for (int c = from; c < to; c += PIECE) {
            fetched = std::max(fetched, c + PIECE);
            find_scores(c);
            for (int b = 0; b < blocks; b++) find_chances(b);
            arrange_values(c);
            for (int b = 0; b + 1 < blocks; b += 2) mix<2>(b);
            if constexpr (blocks % 2) mix<1>(blocks - 1);
        }
    }

    void finish(const Mixed& out, int count) const {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int b = 0; b < blocks; b++) {
            const int here = std::min(TILE, count - b * TILE);
            store_some(out.largest + b * TILE, most[b], here);
            store_some(out.sums + b * TILE, sums[b], here);
        }
        for (int lane = 0; lane < count; lane++)
            for (int d = 0; d < dim; d += STEP) {
                const __m512 a = (__m512)load(mixed + lane * dim + d), b = (__m512)load(mixed + lane * dim + d + TILE);
                store(out.of(lane) + d, (Vector)_mm512_permutex2var_ps(a, low, b));
                store(out.of(lane) + d + TILE, (Vector)_mm512_permutex2var_ps(a, high, b));
            }
    }
};

#endif
