// y = x W^T + b for packed weights. Every element is summed over the columns of W in one order, whatever the number of
// rows, the thread or the place of a row: a row has the same result, bit for bit, in every batch.
#pragma once

#include "linear_blocks.h"
#include "linear_tiles.h"

constexpr int ROWS = 6;        // of a register block
constexpr int GGUF_ROWS = LANES == 16 ? 8 : ROWS;  // more, since each block of rows unpacks the weights again
constexpr int WIDEST = 64 / LANES;  // vectors of a register block
constexpr int MOST = LANES == 16 ? 24 : 12;  // sums of a register block, of 32 or 16 registers
constexpr int ROW_CHUNK = 128; // rows of a tile

// One step of each kind: a 4-byte input times a vector of 4-byte weights, added to as many sums.
template <int kind> static inline Vector step(Vector sums, uint32_t input, const uint32_t* weights);

template <> inline Vector step<FLOAT32>(Vector sums, uint32_t input, const uint32_t* weights) {
    float x;
    memcpy(&x, &input, 4);
    return fma(all(x), load((const float*)weights), sums);
}

template <> inline Vector step<BFLOAT16>(Vector sums, uint32_t input, const uint32_t* weights) {
#if defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(input), (__m512bh)load_words(weights));
#else
    Words pairs = load_words(weights), inputs = input - Words{};
    return fma(high_half(inputs), high_half(pairs), fma(low_half(inputs), low_half(pairs), sums));
#endif
}

// The words of a register block's vectors. Each vector is a stream of its own, which memory answers at once.
template <int blocks> struct Columns {
    const uint32_t* begin[blocks];

    Columns(const Packed& w, int first) {
        for (int b = 0; b < blocks; b++) begin[b] = column_of(w, first + b);
    }
    const uint32_t* at(int b, int step) const { return begin[b] + (int64_t)step * GROUP; }
    void fetch(int b, int step) const { __builtin_prefetch(begin[b] + (int64_t)(step + AHEAD) * GROUP); }
};

template <int rows, int blocks>
static inline void multiply_int8(const uint32_t* x, int64_t stride, const Packed& w, int first, Vector (*sums)[blocks]) {
    const Columns<blocks> columns(w, first);
    int steps = steps_of(w);
    Ints acc[rows][blocks] = {};
    for (int k = 0; k < steps; k++) {
        for (int b = 0; b < blocks; b++) {
            Words four = load_words(columns.at(b, k));
            columns.fetch(b, k);
            for (int m = 0; m < rows; m++) acc[m][b] = dot_bytes(acc[m][b], x[m * stride + k], four);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) sums[m][b] = scaled_int8(w, x + m * stride, stride, acc[m][b], first + b);
}

template <int rows, int blocks>
static inline void multiply_int4(const uint32_t* x, int64_t stride, const Packed& w, int first, Vector (*sums)[blocks]) {
    const Columns<blocks> columns(w, first);
    int steps = steps_of(w), per_group = w.quant_group / 8, groups = quant_groups(w);
    const int32_t* totals = group_totals(w, x);
    Vector out[rows][blocks] = {};
    for (int g = 0; g < groups; g++) {
        Ints acc[rows][blocks] = {};
        for (int k = g * per_group; k < std::min(steps, (g + 1) * per_group); k++) {
            for (int b = 0; b < blocks; b++) {
                Words eight = load_words(columns.at(b, k));
                columns.fetch(b, k);
                Words low = eight & 0x0f0f0f0f, high = (eight >> 4) & 0x0f0f0f0f;
                for (int m = 0; m < rows; m++)
                    acc[m][b] = dot_bytes(dot_bytes(acc[m][b], x[m * stride + 2 * k], low), x[m * stride + 2 * k + 1], high);
            }
        }
        for (int b = 0; b < blocks; b++) {
            int64_t place = (int64_t)g * padded_out(w) + (first + b) * LANES;
            Vector scale = load(w.scales + place);
            Ints zeros = widened(w.zeros + place);
            for (int m = 0; m < rows; m++) {
                Ints products = acc[m][b] - zeros * totals[m * stride + g];
                out[m][b] = fma(__builtin_convertvector(products, Vector), scale, out[m][b]);
            }
        }
    }
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) sums[m][b] = out[m][b] * scale_of(x + m * stride, stride);
}

// The numbers of the lowest 4 bits of each lane: sign, two bits of exponent, one of mantissa.
static inline Vector decoded(Words codes) {
    alignas(64) static const float numbers[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
#if defined(__AVX512F__)
    return (Vector)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(numbers));
#elif defined(__AVX2__)
    return (Vector)(((Words)_mm256_permutevar8x32_ps(_mm256_load_ps(numbers), (__m256i)codes)) | (codes & 8) << 28);
#else
    Vector x;
    for (int i = 0; i < LANES; i++) x[i] = numbers[codes[i] & 15];
    return x;
#endif
}

template <int rows, int blocks>
static inline void multiply_mxfp4(const uint32_t* x, int64_t stride, const Packed& w, int first, Vector (*sums)[blocks]) {
    const Columns<blocks> columns(w, first);
    const int steps = steps_of(w), per_group = w.quant_group / 8, groups = quant_groups(w);
    Vector out[rows][blocks] = {};
    for (int g = 0; g < groups; g++) {
        Vector acc[rows][blocks] = {};
        for (int k = g * per_group; k < std::min(steps, (g + 1) * per_group); k++) {
            const float* inputs = (const float*)x + 8 * k;
            for (int b = 0; b < blocks; b++) {
                const Words eight = load_words(columns.at(b, k));
                columns.fetch(b, k);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const Vector numbers = decoded(eight >> (8 * (i % 4) + 4 * (i / 4)));
                    for (int m = 0; m < rows; m++) acc[m][b] = fma(all(inputs[m * stride + i]), numbers, acc[m][b]);
                }
            }
        }
        for (int b = 0; b < blocks; b++) {
            const Vector scale = (Vector)(widened(w.zeros + (int64_t)g * padded_out(w) + (first + b) * LANES) << 23);
            for (int m = 0; m < rows; m++) out[m][b] = fma(acc[m][b], scale, out[m][b]);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) sums[m][b] = out[m][b];
}

// The sums of `rows` rows and `blocks` vectors of a group. `x` has `stride` words between rows.
template <int kind, int rows, int blocks>
static inline void multiply_floats(const uint32_t* x, int64_t stride, const Packed& w, int first, Vector (*sums)[blocks]) {
    const Columns<blocks> columns(w, first);
    const int steps = steps_of(w);
    Vector acc[rows][blocks] = {};
    for (int k = 0; k < steps; k++) {
        for (int b = 0; b < blocks; b++) columns.fetch(b, k);
        if constexpr (kind == HALVED) {
            for (int b = 0; b < blocks; b++) {
                Words pairs = load_words(columns.at(b, k));
                Vector low = low_half(pairs), high = high_half(pairs);
                for (int m = 0; m < rows; m++) {
                    const float* input = (const float*)x + m * stride + 2 * k;
                    acc[m][b] = fma(all(input[1]), high, fma(all(input[0]), low, acc[m][b]));
                }
            }
        } else {
            for (int m = 0; m < rows; m++)
                for (int b = 0; b < blocks; b++)
                    acc[m][b] = step<kind>(acc[m][b], x[m * stride + k], columns.at(b, k));
        }
    }
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) sums[m][b] = acc[m][b];
}

template <int rows, int blocks>
static void multiply(const Packed& w, const uint32_t* x, int64_t stride, int first, Vector (*sums)[blocks]) {
    if (w.kind == GGUF) {
        if constexpr (2 * rows * blocks <= MOST && blocks <= WIDEST) multiply_gguf<rows, blocks>(x, stride, w, first, sums);
        return;
    }
    if constexpr (rows > ROWS) return;
    else switch (w.kind) {
        case FLOAT32: return multiply_floats<FLOAT32, rows, blocks>(x, stride, w, first, sums);
        case HALVED: return multiply_floats<HALVED, rows, blocks>(x, stride, w, first, sums);
        case BFLOAT16: return multiply_floats<BFLOAT16, rows, blocks>(x, stride, w, first, sums);
        case INT8: return multiply_int8<rows, blocks>(x, stride, w, first, sums);
        case MXFP4: return multiply_mxfp4<rows, blocks>(x, stride, w, first, sums);
        default: return multiply_int4<rows, blocks>(x, stride, w, first, sums);
    }
}

// The same, for at most GGUF_ROWS rows; more sums than MOST do not fit the registers.
template <int blocks, int most = GGUF_ROWS>
static void multiply_rows(int rows, const Packed& w, const uint32_t* x, int64_t stride, int first, Vector (*sums)[blocks]) {
    if constexpr (most > 1) {
        if (rows < most || most * blocks > MOST) return multiply_rows<blocks, most - 1>(rows, w, x, stride, first, sums);
    }
    if constexpr (most == 1 || most * blocks <= MOST) multiply<most, blocks>(w, x, stride, first, sums);
}

// Vectors from vector `first` on whose sums for so many rows fit the registers. Unpacked int4 weights take registers, too; MXFP4 and
// GGUF have two sums of each.
static inline int fitting(const Packed& w, int rows, int first, int blocks) {
    int most = w.kind == MXFP4 || w.kind == GGUF || (w.kind == INT4 && rows > 3) ? MOST / 2 : MOST;
    while (blocks > 1 && (rows * blocks > most || !are_alike(w, first, blocks))) blocks /= 2;
    return blocks;
}

// Sums of `blocks` vectors from vector `first` on, for rows [m0, m1): put(to, vector, sum) gets each, and where(row, vector).
template <class Where, class Put>
static void linear_columns(
    const Packed& w, const uint32_t* x, int m0, int m1, int first, int blocks, const Where& where, const Put& put) {
    const bool exact = w.kind == INT8 || w.kind == INT4 || w.kind == GGUF;  // sums of integers, by tiles or not
    const int most = w.kind == GGUF ? GGUF_ROWS : ROWS;
    if (uses_tiles(w) && !(exact && m1 - m0 <= most)) return tile_columns(w, x, m0, m1, first, blocks, where, put);
    int64_t stride = input_stride(w);
    int count = (m1 - m0 + most - 1) / most;
    for (int i = 0, m = m0; i < count; i++) {  // register blocks of nearly equal height
        int rows = (m1 - m + count - i - 1) / (count - i);
        for (int b = 0; b < blocks;) {
            auto part = [&]<int wide>() {
                Vector sums[GGUF_ROWS][wide];
                multiply_rows<wide>(rows, w, x + m * stride, stride, first + b, sums);
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < wide; v++) put(where(m + r, first + b + v), first + b + v, sums[r][v]);
                b += wide;
            };
            int wide = WIDEST;
            while (wide > blocks - b) wide /= 2;
            wide = fitting(w, rows, first + b, wide);
            if (wide >= 8) part.template operator()<8>();
            else if (wide >= 4) part.template operator()<4>();
            else if (wide >= 2) part.template operator()<2>();
            else part.template operator()<1>();
        }
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
        width = WIDEST;
        while (width > 1 && (vectors + width - 1) / width * chunks < 3 * threads) width /= 2;
        columns = (vectors + width - 1) / width;
    }

    int tiles() const { return columns * chunks; }
    int first_row(int tile, int rows) const { return (int)((int64_t)(tile % chunks) * rows / chunks); }
    int last_row(int tile, int rows) const { return (int)((int64_t)(tile % chunks + 1) * rows / chunks); }
};

// y [rows, out]; `add`: added to what is there. Outputs before vector `start` are left out.
static void linear(Team& team, const Packed& w, const uint32_t* x, int rows, float* y, bool add, int start = 0) {
    int vectors = (w.out + LANES - 1) / LANES;
    Tiling tiling(vectors - start, rows, team.size());
    team.run(tiling.tiles(), nanoseconds(w, rows), [&](int tile, int) {
        int first = start + tile / tiling.chunks * tiling.width, m0 = tiling.first_row(tile, rows), m1 = tiling.last_row(tile, rows);
        auto where = [&](int row, int vector) { return y + (int64_t)row * w.out + vector * LANES; };
        auto put = [&](float* to, int vector, Vector sum) {
            int column = vector * LANES, left = w.out - column;
            Vector value = with_bias(w, sum, column);
            if (left >= LANES) store(to, add ? load(to) + value : value);
            else store_some(to, add ? load_some(to, left) + value : value, left);
        };
        linear_columns(w, x, m0, m1, first, std::min(tiling.width, vectors - first), where, put);
    });
}

// activated(gate) * up [rows, out / 2] of w = [gate; up]. The halves must be whole vectors.
static void gated(Team& team, const Packed& w, const uint32_t* x, int rows, float* y, int activation) {
    int half = w.out / 2, vectors = half / LANES;
    Tiling tiling(vectors, rows, team.size());
    int width = vectors % WIDEST == 0 ? tiling.width : 1;  // a tile of `up` must start where one of `gate` does
    tiling.width = width;
    tiling.columns = vectors / width;
    team.run(tiling.tiles(), nanoseconds(w, rows), [&](int tile, int) {
        int first = tile / tiling.chunks * width, m0 = tiling.first_row(tile, rows), m1 = tiling.last_row(tile, rows);
        auto where = [&](int row, int vector) { return y + (int64_t)row * half + vector % vectors * LANES; };
        auto put_gate = [&](float* to, int vector, Vector sum) { store(to, with_bias(w, sum, vector * LANES)); };
        auto put_both = [&](float* to, int vector, Vector sum) { store(to, activated(activation, load(to)) * with_bias(w, sum, vector * LANES)); };
        linear_columns(w, x, m0, m1, first, width, where, put_gate);
        linear_columns(w, x, m0, m1, vectors + first, width, where, put_both);
    });
}

