// y = x W^T + b for packed weights. Every element is summed over the columns of W in one order, whatever the number of
// rows, the thread or the place of a row: a row has the same result, bit for bit, in every batch.
//
// A weight [out, in] is packed in groups of 64 outputs: [out / 64][in / pair][64][pair], padded with zeros.
#pragma once

#include <algorithm>

#include "team.h"
#include "vector.h"

constexpr int GROUP = 64;      // outputs of a group
constexpr int BLOCKS = 4;      // vectors of a group
constexpr int ROWS = 6;        // of a register block: ROWS * BLOCKS sums, BLOCKS weights and an input in 32 registers
constexpr int AHEAD = 16;      // steps that weights are fetched ahead
constexpr int ROW_CHUNK = 96;  // rows of a tile

enum Kind : int32_t {
    FLOAT32 = 0,
    HALVED = 1,    // float32 arithmetic on weights that bfloat16 holds exactly
    BFLOAT16 = 2,  // inputs are rounded to bfloat16 too; sums are float32
};

struct Packed {
    const void* data;
    const float* bias;  // [out], or null
    int32_t kind, in, out;
};

static inline int pair_of(int kind) { return kind == FLOAT32 ? 1 : 2; }
static inline int steps_of(const Packed& w) { return (w.in + pair_of(w.kind) - 1) / pair_of(w.kind); }
static inline int64_t packed_bytes(const Packed& w) {
    return (int64_t)((w.out + GROUP - 1) / GROUP) * steps_of(w) * GROUP * 4;
}

// One step of each kind: a 4-byte input times 16 weights of 4 bytes, added to 16 sums.
template <int kind> static inline Vector step(Vector sums, uint32_t input, const uint32_t* weights);

template <> inline Vector step<FLOAT32>(Vector sums, uint32_t input, const uint32_t* weights) {
    float x;
    memcpy(&x, &input, 4);
    return fma(all(x), load((const float*)weights), sums);
}

static inline Vector low_half(Words pairs) { return (Vector)(pairs << 16); }
static inline Vector high_half(Words pairs) { return (Vector)(pairs & 0xffff0000u); }

static inline Words load_words(const uint32_t* from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}

template <> inline Vector step<BFLOAT16>(Vector sums, uint32_t input, const uint32_t* weights) {
#if defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(input), (__m512bh)load_words(weights));
#else
    Words pairs = load_words(weights), inputs = input - Words{};
    return fma(high_half(inputs), high_half(pairs), fma(low_half(inputs), low_half(pairs), sums));
#endif
}

// The sums of `rows` rows and `blocks` vectors of a group. `x` has `stride` words between rows.
template <int kind, int rows, int blocks>
static inline void multiply(const uint32_t* x, int64_t stride, const uint32_t* weights, int steps, Vector (*sums)[blocks]) {
    Vector acc[rows][blocks] = {};
    for (int k = 0; k < steps; k++) {
        for (int b = 0; b < blocks; b++) __builtin_prefetch(weights + (int64_t)(k + AHEAD) * GROUP + b * LANES);
        if constexpr (kind == HALVED) {
            for (int b = 0; b < blocks; b++) {
                Words pairs = load_words(weights + (int64_t)k * GROUP + b * LANES);
                Vector low = low_half(pairs), high = high_half(pairs);
                for (int m = 0; m < rows; m++) {
                    const float* input = (const float*)x + m * stride + 2 * k;
                    acc[m][b] = fma(all(input[1]), high, fma(all(input[0]), low, acc[m][b]));
                }
            }
        } else {
            for (int m = 0; m < rows; m++)
                for (int b = 0; b < blocks; b++)
                    acc[m][b] = step<kind>(acc[m][b], x[m * stride + k], weights + (int64_t)k * GROUP + b * LANES);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) sums[m][b] = acc[m][b];
}

template <int kind, int blocks>
static void multiply_rows(int rows, const uint32_t* x, int64_t stride, const uint32_t* w, int steps, Vector (*sums)[blocks]) {
    switch (rows) {
        case 1: return multiply<kind, 1, blocks>(x, stride, w, steps, sums);
        case 2: return multiply<kind, 2, blocks>(x, stride, w, steps, sums);
        case 3: return multiply<kind, 3, blocks>(x, stride, w, steps, sums);
        case 4: return multiply<kind, 4, blocks>(x, stride, w, steps, sums);
        case 5: return multiply<kind, 5, blocks>(x, stride, w, steps, sums);
        default: return multiply<kind, 6, blocks>(x, stride, w, steps, sums);
    }
}

template <int blocks>
static void multiply_kind(
    const Packed& w, int rows, const uint32_t* x, int64_t stride, const uint32_t* data, Vector (*sums)[blocks]) {
    int steps = steps_of(w);
    switch (w.kind) {
        case FLOAT32: return multiply_rows<FLOAT32, blocks>(rows, x, stride, data, steps, sums);
        case HALVED: return multiply_rows<HALVED, blocks>(rows, x, stride, data, steps, sums);
        default: return multiply_rows<BFLOAT16, blocks>(rows, x, stride, data, steps, sums);
    }
}

// About how long one thread takes: as long as the weights from memory, or as the sums.
static inline double nanoseconds(const Packed& w, int rows) {
    return std::max(packed_bytes(w) / 30.0, (double)rows * w.in * w.out / (w.kind == BFLOAT16 ? 200.0 : 100.0));
}

// Rows as `multiply` reads them: words, `stride` of them per row. Floats are used where they are, others are rounded.
static inline int64_t input_stride(const Packed& w) { return w.kind == BFLOAT16 ? steps_of(w) : w.in + (w.in & 1 & w.kind); }

static inline void prepare_row(const Packed& w, const float* x, uint32_t* to) {
    if (w.kind == BFLOAT16) {
        store_bf16((uint16_t*)to, x, w.in);
        if (w.in & 1) ((uint16_t*)to)[w.in] = 0;
    } else {
        memcpy(to, x, 4 * (size_t)w.in);
        if (input_stride(w) > w.in) to[w.in] = 0;
    }
}

// Sums of a column block of `blocks` vectors from vector `first` on, for rows [m0, m1): `use(row, sums)` gets each row's.
template <int blocks, class Use>
static void linear_columns(const Packed& w, const uint32_t* x, int m0, int m1, int first, const Use& use) {
    const uint32_t* data = (const uint32_t*)w.data + (int64_t)(first / BLOCKS) * steps_of(w) * GROUP + first % BLOCKS * LANES;
    int64_t stride = input_stride(w);
    Vector sums[ROWS][blocks];
    int count = (m1 - m0 + ROWS - 1) / ROWS;
    for (int i = 0, m = m0; i < count; i++) {  // register blocks of nearly equal height
        int rows = (m1 - m + count - i - 1) / (count - i);
        multiply_kind<blocks>(w, rows, x + m * stride, stride, data, sums);
        for (int r = 0; r < rows; r++) use(m + r, sums[r]);
        m += rows;
    }
}

static inline Vector with_bias(const Packed& w, Vector x, int column) {
    if (!w.bias) return x;
    int left = w.out - column;
    return x + (left >= LANES ? load(w.bias + column) : load_some(w.bias + column, left));
}

// How a product of `rows` rows and `vectors` column vectors is cut into tiles.
struct Tiling {
    int width, columns, chunks;  // vectors of a tile; numbers of tiles

    Tiling(int vectors, int rows, int threads) {
        chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
        width = BLOCKS;
        while (width > 1 && (vectors + width - 1) / width * chunks < 3 * threads) width /= 2;
        columns = (vectors + width - 1) / width;
    }

    int tiles() const { return columns * chunks; }
    int first_row(int tile, int rows) const { return (int)((int64_t)(tile % chunks) * rows / chunks); }
    int last_row(int tile, int rows) const { return (int)((int64_t)(tile % chunks + 1) * rows / chunks); }
};

// y [rows, out], `ld` floats between rows; `add`: added to what is there.
static void linear(Team& team, const Packed& w, const uint32_t* x, int rows, float* y, int64_t ld, bool add) {
    int vectors = (w.out + LANES - 1) / LANES;
    Tiling tiling(vectors, rows, team.size());
    team.run(tiling.tiles(), nanoseconds(w, rows), [&](int tile, int) {
        int first = tile / tiling.chunks * tiling.width, m0 = tiling.first_row(tile, rows), m1 = tiling.last_row(tile, rows);
        auto put = [&](int row, int vector, Vector sum) {
            int column = vector * LANES, left = w.out - column;
            float* to = y + row * ld + column;
            Vector value = with_bias(w, sum, column);
            if (left >= LANES) store(to, add ? load(to) + value : value);
            else store_some(to, add ? load_some(to, left) + value : value, left);
        };
        auto columns = [&]<int blocks>(int from) {
            linear_columns<blocks>(w, x, m0, m1, from, [&](int row, Vector* sums) {
                for (int b = 0; b < blocks; b++) put(row, from + b, sums[b]);
            });
        };
        int count = std::min(tiling.width, vectors - first);
        if (count == 4) return columns.template operator()<4>(first);
        if (count >= 2) columns.template operator()<2>(first);
        if (count & 1) columns.template operator()<1>(first + count - 1);
    });
}

// silu(gate) * up [rows, out / 2] of w = [gate; up]. The halves must be whole vectors.
static void gated(Team& team, const Packed& w, const uint32_t* x, int rows, float* y) {
    int half = w.out / 2, vectors = half / LANES;
    Tiling tiling(vectors, rows, team.size());
    int width = vectors % BLOCKS == 0 ? tiling.width : 1;  // a tile of `up` must start where one of `gate` does
    tiling.width = width;
    tiling.columns = vectors / width;
    team.run(tiling.tiles(), nanoseconds(w, rows), [&](int tile, int) {
        int first = tile / tiling.chunks * width, m0 = tiling.first_row(tile, rows), m1 = tiling.last_row(tile, rows);
        auto columns = [&]<int blocks>() {
            linear_columns<blocks>(w, x, m0, m1, first, [&](int row, Vector* sums) {
                for (int b = 0; b < blocks; b++)
                    store(y + (int64_t)row * half + (first + b) * LANES, with_bias(w, sums[b], (first + b) * LANES));
            });
            linear_columns<blocks>(w, x, m0, m1, vectors + first, [&](int row, Vector* sums) {
                for (int b = 0; b < blocks; b++) {
                    float* to = y + (int64_t)row * half + (first + b) * LANES;
                    store(to, silu(load(to)) * with_bias(w, sums[b], half + (first + b) * LANES));
                }
            });
        };
        if (width == 4) columns.template operator()<4>();
        else if (width == 2) columns.template operator()<2>();
        else columns.template operator()<1>();
    });
}

// Calls `visit(place, index)` for every element: its place in the packed form and in the plain one [out, in].
template <class Visit> static void each_element(const Packed& w, const Visit& visit) {
    int pair = pair_of(w.kind), steps = steps_of(w);
    for (int first = 0; first < w.out; first += GROUP)
        for (int k = 0; k < w.in; k++)
            for (int n = first; n < std::min(w.out, first + GROUP); n++) {
                int64_t step = (int64_t)(first / GROUP) * steps + k / pair;
                visit((step * GROUP + n % GROUP) * pair + k % pair, (int64_t)n * w.in + k);
            }
}

// `weight` [out, in] in float32 to the packed form.
static void pack(const Packed& w, const float* weight, void* to) {
    memset(to, 0, packed_bytes(w));
    each_element(w, [&](int64_t place, int64_t index) {
        if (w.kind == FLOAT32) ((float*)to)[place] = weight[index];
        else store_bf16((uint16_t*)to + place, weight + index, 1);
    });
}

static void unpack(const Packed& w, float* weight) {
    each_element(w, [&](int64_t place, int64_t index) {
        weight[index] = w.kind == FLOAT32 ? ((const float*)w.data)[place] : from_bf16(((const uint16_t*)w.data)[place]);
    });
}
