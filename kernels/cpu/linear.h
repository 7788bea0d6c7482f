// y = x W^T + b for packed weights. Every element is summed over the columns of W in one order, whatever the number of
// rows, the thread or the place of a row: a row has the same result, bit for bit, in every batch.
//
// A weight [out, in] is packed in groups of 64 outputs: [out / 64][steps][64] words of 4 bytes, padded. A word holds 1, 2, 4
// or 8 inputs of an output. Inputs of integer weights are rounded to 8 bits, with a scale for each row; integer sums are
// exact.
#pragma once

#include <algorithm>

#include "team.h"
#include "vector.h"

constexpr int GROUP = 64;      // outputs of a group
constexpr int BLOCKS = GROUP / LANES;  // vectors of a group
constexpr int ROWS = 6;        // of a register block
constexpr int MOST = LANES == 16 ? 24 : 12;  // sums of a register block, of 32 or 16 registers
constexpr int AHEAD = 16;      // steps that weights are fetched ahead
constexpr int ROW_CHUNK = 96;  // rows of a tile

enum Kind : int32_t {
    FLOAT32 = 0,
    HALVED = 1,    // float32 arithmetic on weights that bfloat16 holds exactly
    BFLOAT16 = 2,  // inputs are rounded to bfloat16 too; sums are float32
    INT8 = 3,      // a scale for each output; bytes hold the code + 128
    INT4 = 4,      // a scale and a zero for each output and `quant_group` inputs; nibbles hold the code
};

struct Packed {
    const void* data;
    const float* bias;     // [out], or null
    const float* scales;   // INT8: [padded out]; INT4: [in / quant_group][padded out]
    const uint8_t* zeros;  // INT4: as the scales
    int32_t kind, in, out, quant_group;
};

static inline int inputs_of_word(int kind) { return kind == FLOAT32 ? 1 : kind <= BFLOAT16 ? 2 : kind == INT8 ? 4 : 8; }
static inline int steps_of(const Packed& w) { return (w.in + inputs_of_word(w.kind) - 1) / inputs_of_word(w.kind); }
static inline int padded_out(const Packed& w) { return (w.out + GROUP - 1) / GROUP * GROUP; }
static inline int64_t packed_bytes(const Packed& w) { return (int64_t)padded_out(w) * steps_of(w) * 4; }
static inline int quant_groups(const Packed& w) { return (w.in + w.quant_group - 1) / w.quant_group; }

// One step of each kind: a 4-byte input times a vector of 4-byte weights, added to as many sums.
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

// 4 unsigned bytes of each lane of `weights` times 4 signed bytes of `input`, added to the lane.
static inline Ints dot_bytes(Ints sums, uint32_t input, Words weights) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(input));
#elif defined(__AVX2__) && defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(input));
#elif defined(__AVX2__)
    // Even and odd bytes, widened to 16 bits: a product of pairs with their sum is exact there.
    uint32_t even = (uint16_t)(int8_t)input | (uint32_t)(int8_t)(input >> 16) << 16;
    uint32_t odd = (uint16_t)(int8_t)(input >> 8) | (uint32_t)(int8_t)(input >> 24) << 16;
    Ints low = (Ints)_mm256_madd_epi16((__m256i)(weights & 0x00ff00ff), _mm256_set1_epi32(even));
    return sums + low + (Ints)_mm256_madd_epi16((__m256i)(weights >> 8 & 0x00ff00ff), _mm256_set1_epi32(odd));
#else
    for (int i = 0; i < 4; i++) sums += (Ints)((weights >> (8 * i)) & 255) * (int32_t)(int8_t)(input >> (8 * i));
    return sums;
#endif
}

// The integer sums of a row's inputs are words after its data: for INT8 of all, for INT4 of each group. The scale is last.
template <int rows, int blocks>
static inline void multiply_int8(const uint32_t* x, int64_t stride, const Packed& w, const uint32_t* weights, int first, Vector (*sums)[blocks]) {
    int steps = steps_of(w);
    Ints acc[rows][blocks] = {};
    for (int k = 0; k < steps; k++) {
        for (int b = 0; b < blocks; b++) {
            Words four = load_words(weights + (int64_t)k * GROUP + b * LANES);
            __builtin_prefetch(weights + (int64_t)(k + AHEAD) * GROUP + b * LANES);
            for (int m = 0; m < rows; m++) acc[m][b] = dot_bytes(acc[m][b], x[m * stride + k], four);
        }
    }
    for (int m = 0; m < rows; m++) {
        int32_t sum = (int32_t)x[m * stride + steps];
        float scale;
        memcpy(&scale, x + m * stride + stride - 1, 4);
        for (int b = 0; b < blocks; b++)
            sums[m][b] = __builtin_convertvector(acc[m][b] - 128 * sum, Vector) * (scale * load(w.scales + first * LANES + b * LANES));
    }
}

template <int rows, int blocks>
static inline void multiply_int4(const uint32_t* x, int64_t stride, const Packed& w, const uint32_t* weights, int first, Vector (*sums)[blocks]) {
    int steps = steps_of(w), per_group = w.quant_group / 8, groups = quant_groups(w);
    const uint32_t* totals = x + (stride - 1 - groups);
    Vector out[rows][blocks] = {};
    for (int g = 0; g < groups; g++) {
        Ints acc[rows][blocks] = {};
        for (int k = g * per_group; k < std::min(steps, (g + 1) * per_group); k++) {
            for (int b = 0; b < blocks; b++) {
                Words eight = load_words(weights + (int64_t)k * GROUP + b * LANES);
                __builtin_prefetch(weights + (int64_t)(k + AHEAD) * GROUP + b * LANES);
                Words low = eight & 0x0f0f0f0f, high = (eight >> 4) & 0x0f0f0f0f;
                for (int m = 0; m < rows; m++)
                    acc[m][b] = dot_bytes(dot_bytes(acc[m][b], x[m * stride + 2 * k], low), x[m * stride + 2 * k + 1], high);
            }
        }
        int64_t place = (int64_t)g * padded_out(w) + first * LANES;
        for (int b = 0; b < blocks; b++) {
            Vector scale = load(w.scales + place + b * LANES);
            Bytes bytes;
            memcpy(&bytes, w.zeros + place + b * LANES, sizeof bytes);
            Ints zero = __builtin_convertvector(bytes, Ints);
            for (int m = 0; m < rows; m++) {
                Ints sum = acc[m][b] - zero * (int32_t)totals[m * stride + g];
                out[m][b] = fma(__builtin_convertvector(sum, Vector), scale, out[m][b]);
            }
        }
    }
    for (int m = 0; m < rows; m++) {
        float scale;
        memcpy(&scale, x + m * stride + stride - 1, 4);
        for (int b = 0; b < blocks; b++) sums[m][b] = out[m][b] * scale;
    }
}

// The sums of `rows` rows and `blocks` vectors of a group. `x` has `stride` words between rows.
template <int kind, int rows, int blocks>
static inline void multiply_floats(const uint32_t* x, int64_t stride, const uint32_t* weights, int steps, Vector (*sums)[blocks]) {
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

template <int rows, int blocks>
static void multiply(const Packed& w, const uint32_t* x, int64_t stride, const uint32_t* data, int first, Vector (*sums)[blocks]) {
    switch (w.kind) {
        case FLOAT32: return multiply_floats<FLOAT32, rows, blocks>(x, stride, data, steps_of(w), sums);
        case HALVED: return multiply_floats<HALVED, rows, blocks>(x, stride, data, steps_of(w), sums);
        case BFLOAT16: return multiply_floats<BFLOAT16, rows, blocks>(x, stride, data, steps_of(w), sums);
        case INT8: return multiply_int8<rows, blocks>(x, stride, w, data, first, sums);
        default: return multiply_int4<rows, blocks>(x, stride, w, data, first, sums);
    }
}

// The same, for at most ROWS rows; more sums than MOST do not fit the registers.
template <int blocks, int most = ROWS>
static void multiply_rows(int rows, const Packed& w, const uint32_t* x, int64_t stride, const uint32_t* data, int first, Vector (*sums)[blocks]) {
    if constexpr (most > 1) {
        if (rows < most || most * blocks > MOST) return multiply_rows<blocks, most - 1>(rows, w, x, stride, data, first, sums);
    }
    if constexpr (most == 1 || most * blocks <= MOST) multiply<most, blocks>(w, x, stride, data, first, sums);
}

// About how long one thread takes: as long as the weights from memory, or as the sums.
static inline double nanoseconds(const Packed& w, int rows) {
    return std::max(packed_bytes(w) / 30.0, (double)rows * w.in * w.out / (w.kind <= HALVED ? 100.0 : 200.0));
}

// Words of a row as `multiply` reads it. Rows of float32 weights are used where they are.
static inline int64_t input_stride(const Packed& w) {
    switch (w.kind) {
        case FLOAT32: return w.in;
        case HALVED: return w.in + w.in % 2;
        case BFLOAT16: return steps_of(w);
        case INT8: return steps_of(w) + 2;
        default: return 2 * steps_of(w) + quant_groups(w) + 1;
    }
}

static inline bool is_prepared(const Packed& w) { return w.kind <= HALVED && input_stride(w) == w.in; }

static void prepare_row(const Packed& w, const float* x, uint32_t* to) {
    int64_t stride = input_stride(w);
    if (w.kind <= BFLOAT16) {
        to[stride - 1] = 0;
        if (w.kind == BFLOAT16) store_bf16((uint16_t*)to, x, w.in);
        else memcpy(to, x, 4 * (size_t)w.in);
        return;
    }
    auto part = [&](int k) { return k + LANES <= w.in ? load(x + k) : load_some(x + k, w.in - k); };
    Vector most{}, wrong{};  // what is no number, or infinite, makes the whole row so
    for (int k = 0; k < w.in; k += LANES) most = max(most, max(part(k), -part(k))), wrong = wrong + part(k) * 0.0f;
    float lanes[LANES], largest = 0;
    store(lanes, most);
    for (float lane : lanes) largest = std::max(largest, lane);
    float scale = largest / 127 + sum(wrong), inverse = largest > 0 ? 127 / largest : 0;
    int groups = w.kind == INT8 ? 1 : quant_groups(w), group = w.kind == INT8 ? w.in : w.quant_group;
    int64_t words = w.kind == INT8 ? steps_of(w) : 2 * steps_of(w);
    int8_t* bytes = (int8_t*)to;
    memset(bytes + w.in, 0, 4 * words - w.in);
    const Vector magic = all(ROUNDING);
    for (int k = 0; k < w.in; k += LANES) {
        Ints codes = (Ints)(part(k) * inverse + magic) - (Ints)magic;
        SignedBytes narrow = __builtin_convertvector(codes, SignedBytes);
        if (k + LANES <= w.in) memcpy(bytes + k, &narrow, LANES);
        else memcpy(bytes + k, &narrow, w.in - k);
    }
    for (int g = 0; g < groups; g++) {
        int32_t total = 0;
        for (int k = g * group; k < std::min(w.in, (g + 1) * group); k++) total += bytes[k];
        memcpy(to + words + g, &total, 4);
    }
    memcpy(to + stride - 1, &scale, 4);
}

// Vectors whose sums for so many rows fit the registers. Unpacked int4 weights take registers, too.
static inline int fitting(const Packed& w, int rows, int blocks) {
    int most = w.kind == INT4 && rows > 3 ? MOST / 2 : MOST;
    while (blocks > 1 && rows * blocks > most) blocks /= 2;
    return blocks;
}

// Sums of `blocks` vectors from vector `first` on, for rows [m0, m1): `use(row, vector, sum)` gets each.
template <class Use>
static void linear_columns(const Packed& w, const uint32_t* x, int m0, int m1, int first, int blocks, const Use& use) {
    const uint32_t* data = (const uint32_t*)w.data + (int64_t)(first / BLOCKS) * steps_of(w) * GROUP + first % BLOCKS * LANES;
    int64_t stride = input_stride(w);
    int count = (m1 - m0 + ROWS - 1) / ROWS;
    for (int i = 0, m = m0; i < count; i++) {  // register blocks of nearly equal height
        int rows = (m1 - m + count - i - 1) / (count - i);
        for (int b = 0; b < blocks;) {
            auto part = [&]<int wide>() {
                Vector sums[ROWS][wide];
                multiply_rows<wide>(rows, w, x + m * stride, stride, data + b * LANES, first + b, sums);
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < wide; v++) use(m + r, first + b + v, sums[r][v]);
                b += wide;
            };
            int wide = fitting(w, rows, BLOCKS);
            while (wide > blocks - b) wide /= 2;
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
        width = BLOCKS;
        while (width > 1 && (vectors + width - 1) / width * chunks < 3 * threads) width /= 2;
        columns = (vectors + width - 1) / width;
    }

    int tiles() const { return columns * chunks; }
    int first_row(int tile, int rows) const { return (int)((int64_t)(tile % chunks) * rows / chunks); }
    int last_row(int tile, int rows) const { return (int)((int64_t)(tile % chunks + 1) * rows / chunks); }
};

// y [rows, out]; `add`: added to what is there.
static void linear(Team& team, const Packed& w, const uint32_t* x, int rows, float* y, bool add) {
    int vectors = (w.out + LANES - 1) / LANES;
    Tiling tiling(vectors, rows, team.size());
    team.run(tiling.tiles(), nanoseconds(w, rows), [&](int tile, int) {
        int first = tile / tiling.chunks * tiling.width, m0 = tiling.first_row(tile, rows), m1 = tiling.last_row(tile, rows);
        auto put = [&](int row, int vector, Vector sum) {
            int column = vector * LANES, left = w.out - column;
            float* to = y + (int64_t)row * w.out + column;
            Vector value = with_bias(w, sum, column);
            if (left >= LANES) store(to, add ? load(to) + value : value);
            else store_some(to, add ? load_some(to, left) + value : value, left);
        };
        linear_columns(w, x, m0, m1, first, std::min(tiling.width, vectors - first), put);
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
        linear_columns(w, x, m0, m1, first, width, [&](int row, int vector, Vector sum) {
            store(y + (int64_t)row * half + vector * LANES, with_bias(w, sum, vector * LANES));
        });
        linear_columns(w, x, m0, m1, vectors + first, width, [&](int row, int vector, Vector sum) {
            float* to = y + (int64_t)row * half + (vector - vectors) * LANES;
            store(to, silu(load(to)) * with_bias(w, sum, vector * LANES));
        });
    });
}

// Calls `visit(place, index)` for every element: its place in the packed form, counted in elements, and in the plain one.
template <class Visit> static void each_element(Team& team, const Packed& w, const Visit& visit) {
    int many = inputs_of_word(w.kind), steps = steps_of(w);
    team.expect(1e9);
    team.run((w.out + GROUP - 1) / GROUP, 1e9, [&](int group, int) {
        for (int k = 0; k < w.in; k++)
            for (int n = group * GROUP; n < std::min(w.out, (group + 1) * GROUP); n++) {
                int64_t step = (int64_t)group * steps + k / many;
                visit((step * GROUP + n % GROUP) * many + k % many, (int64_t)n * w.in + k);
            }
    });
}

// Where the nibble of element `place` is: input k of 8 shares a byte with input k + 4 or k - 4.
static inline int64_t nibble_byte(int64_t place) { return place / 8 * 4 + place % 4; }
static inline int nibble_shift(int64_t place) { return place % 8 < 4 ? 0 : 4; }

// `weight` [out, in] to the packed form: floats, halves of bfloat16, or codes in bytes.
static void pack(Team& team, const Packed& w, const void* weight, void* to) {
    memset(to, 0, packed_bytes(w));
    each_element(team, w, [&](int64_t place, int64_t index) {
        if (w.kind == FLOAT32) ((float*)to)[place] = ((const float*)weight)[index];
        else if (w.kind <= BFLOAT16) ((uint16_t*)to)[place] = ((const uint16_t*)weight)[index];
        else if (w.kind == INT8) ((uint8_t*)to)[place] = ((const uint8_t*)weight)[index];
        else ((uint8_t*)to)[nibble_byte(place)] |= ((const uint8_t*)weight)[index] << nibble_shift(place);
    });
}

// The inverse of `pack`.
static void unpack(Team& team, const Packed& w, void* weight) {
    const uint8_t* bytes = (const uint8_t*)w.data;
    each_element(team, w, [&](int64_t place, int64_t index) {
        if (w.kind == FLOAT32) ((float*)weight)[index] = ((const float*)w.data)[place];
        else if (w.kind <= BFLOAT16) ((uint16_t*)weight)[index] = ((const uint16_t*)w.data)[place];
        else if (w.kind == INT8) ((uint8_t*)weight)[index] = bytes[place];
        else ((uint8_t*)weight)[index] = bytes[nibble_byte(place)] >> nibble_shift(place) & 15;
    });
}
