// Packed weights, and rows prepared for products with them.
//
// A weight [out, in] is packed in groups of 16 outputs: [out / 16][steps][16] words of 4 bytes, padded. A word holds 1, 2, 4
// or 8 inputs of an output. Inputs of integer weights are rounded to 8 bits, with a scale for each row; integer sums are
// exact. MXFP4 weights are floats, which a product decodes. GGUF weights are records instead of words, see blocks.h, whose inputs
// have a scale for each 32. With tiles, a row of floats for HALVED or MXFP4 weights becomes three of bfloat16, whose sum it is.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "team.h"
#include "tiles.h"
#include "vector.h"

constexpr int GROUP = 16;  // outputs of a group: a cache line
constexpr int BLOCKS = GROUP / LANES;  // vectors of a group
constexpr int AHEAD = 16;  // steps that weights are fetched ahead

enum Kind : int32_t {
    FLOAT32 = 0,
    HALVED = 1,    // float32 arithmetic on weights that bfloat16 holds exactly
    BFLOAT16 = 2,  // inputs are rounded to bfloat16 too; sums are float32
    INT8 = 3,      // a scale for each output; bytes hold the code + 128
    INT4 = 4,      // a scale and a zero for each output and `quant_group` inputs; nibbles hold the code
    MXFP4 = 5,     // nibbles hold floats of 4 bits (e2m1), zeros a power of two for `quant_group` inputs, as its exponent + 127
    GGUF = 6,      // blocks of GGUF files: each 16 outputs have a format. quant_group is 32
};

struct Packed {
    const void* data;
    const float* bias;     // [out], or null
    const float* scales;   // INT8: [padded out]; INT4: [in / quant_group][padded out]
    const uint8_t* zeros;  // INT4: as the scales; MXFP4: [in / quant_group][padded out]
    int32_t kind, in, out, quant_group;
    const int64_t* places;   // GGUF: [groups + 1], where in `data` the records of each 16 outputs begin, and end
    const uint8_t* formats;  // GGUF: [groups]
    const int32_t* order;    // GGUF: [in / 32], which inputs of a row the records' 32 multiply; null: those at their place
};

static inline int inputs_of_word(int kind) { return kind == FLOAT32 ? 1 : kind <= BFLOAT16 ? 2 : kind == INT8 ? 4 : 8; }
static inline int rounded_up(int n, int power_of_two) { return (n + power_of_two - 1) & -power_of_two; }

// Whole tiles of inputs, but for FLOAT32.
static inline int steps_of(const Packed& w) {
    switch (w.kind) {
        case FLOAT32: return w.in;
        case INT8: return rounded_up(w.in, 4 * TILE) / 4;
        case INT4:
        case GGUF: return rounded_up(w.in, 4 * TILE) / 8;
        case MXFP4: return rounded_up(w.in, 2 * TILE) / 8;
        default: return rounded_up(w.in, 2 * TILE) / 2;
    }
}

static inline int padded_out(const Packed& w) { return rounded_up(w.out, GROUP); }

// Where the words of a vector of outputs begin. Those of the next step are GROUP words further.
static inline const uint32_t* column_of(const Packed& w, int vector) {
    return (const uint32_t*)w.data + (int64_t)(vector / BLOCKS) * steps_of(w) * GROUP + vector % BLOCKS * LANES;
}

static inline int64_t packed_bytes(const Packed& w) {
    if (w.kind == GGUF) return w.places[padded_out(w) / GROUP] - w.places[0];
    return (int64_t)padded_out(w) * steps_of(w) * 4;
}

// Whether vectors are of one format.
static inline bool are_alike(const Packed& w, int first, int count) {
    for (int v = first; w.kind == GGUF && v < first + count; v++)
        if (w.formats[v / BLOCKS] != w.formats[first / BLOCKS]) return false;
    return true;
}

static inline int quant_groups(const Packed& w) { return (w.in + w.quant_group - 1) / w.quant_group; }

static inline Vector low_half(Words pairs) { return (Vector)(pairs << 16); }
static inline Vector high_half(Words pairs) { return (Vector)(pairs & 0xffff0000u); }

static inline Words load_words(const uint32_t* from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}

// Whether products with it are made of tiles. Setting them up costs narrow rows more than it brings.
static inline bool uses_tiles(const Packed& w) {
    if (!has_tiles() || w.kind == FLOAT32 || (w.kind == HALVED && w.in < 1024)) return false;
    if (w.kind == GGUF) return true;
    if (w.kind == MXFP4) return w.quant_group == 2 * TILE;
    return w.kind != INT4 || w.quant_group == 2 * TILE || w.quant_group % (4 * TILE) == 0;
}

static inline int tile_rows_of_row(const Packed& w) { return (w.kind == HALVED || w.kind == MXFP4) && uses_tiles(w) ? 3 : 1; }

// About how long one thread takes: as long as the weights from memory, or as the sums.
static inline double nanoseconds(const Packed& w, int rows) {
    double products = uses_tiles(w) ? 1000.0 / tile_rows_of_row(w) : w.kind <= HALVED || w.kind == MXFP4 ? 100.0 : 200.0;  // in a nanosecond
    return std::max(packed_bytes(w) / 30.0, (double)rows * w.in * w.out / products);
}

// Words of a row as products read it. Rows for FLOAT32 are used where they are. The others begin at cache lines.
static inline int64_t input_stride(const Packed& w) {
    switch (w.kind) {
        case FLOAT32: return w.in;
        case HALVED: return uses_tiles(w) ? 3 * steps_of(w) : 2 * steps_of(w);
        case BFLOAT16: return steps_of(w);
        case INT8: return rounded_up(steps_of(w) + 2, TILE);
        case MXFP4: return (uses_tiles(w) ? 12 : 8) * steps_of(w);
        case GGUF: return rounded_up(2 * steps_of(w) + CHUNK_WORDS * quant_groups(w), TILE);
        default: return rounded_up(2 * steps_of(w) + quant_groups(w) + 1, TILE);
    }
}

static inline bool is_prepared(const Packed& w) {
    return w.kind == FLOAT32 || ((w.kind == HALVED || w.kind == MXFP4) && input_stride(w) == w.in);
}

// x as the sum of three rows of bfloat16, exactly: 8 bits of its 24 each.
static void split_row(const Packed& w, const float* x, uint16_t* to) {
    const int padded = inputs_of_word(w.kind) * steps_of(w);
    for (int k = 0; k < padded; k += LANES) {
        int left = std::min(LANES, w.in - k);
        Vector rest = left <= 0 ? Vector{} : load_some(x + k, left);
        for (int part = 0; part < 3; part++) {
            Words bits = (Words)rest;
            Halves high = __builtin_convertvector(bits >> 16, Halves);
            memcpy(to + part * padded + k, &high, sizeof high);
            rest = rest - (Vector)(bits & 0xffff0000u);
        }
    }
}

// A row for GGUF weights: the codes of all inputs, then CHUNK_WORDS for each 32 of them.
struct InputChunk {
    int32_t totals[2];  // of codes, 16 and 16
    float scale, sum;   // sum: totals times scale
};
static_assert(sizeof(InputChunk) == 4 * CHUNK_WORDS);

static inline const InputChunk* chunks_of(const Packed& w, const uint32_t* row) { return (const InputChunk*)(row + 2 * steps_of(w)); }

static void prepare_blocks(const Packed& w, const float* x, uint32_t* to) {
    InputChunk* chunks = (InputChunk*)(to + 2 * steps_of(w));
    const Vector magic = all(ROUNDING);
    for (int c = 0; c < w.in / CHUNK; c++) {
        const float* own = x + CHUNK * (w.order ? w.order[c] : c);
        Vector most{}, wrong{};  // NaN or infinity makes the scale NaN or infinite
        for (int k = 0; k < CHUNK; k += LANES) {
            const Vector part = load(own + k);
            most = max(most, max(part, -part)), wrong = wrong + part * 0.0f;
        }
        const float largest = largest_of(most), inverse = largest > 0 ? 127 / largest : 0;
        int8_t codes[CHUNK];
        for (int k = 0; k < CHUNK; k += LANES) {
            const Ints rounded = (Ints)(load(own + k) * inverse + magic) - (Ints)magic;
            const SignedBytes narrow = __builtin_convertvector(rounded, SignedBytes);
            memcpy(codes + k, &narrow, LANES);
        }
        memcpy((int8_t*)to + CHUNK * c, codes, CHUNK);
        InputChunk& chunk = chunks[c];
        for (int half = 0; half < 2; half++) {
            chunk.totals[half] = 0;
            for (int k = 0; k < CHUNK / 2; k++) chunk.totals[half] += codes[CHUNK / 2 * half + k];
        }
        chunk.scale = largest / 127 + sum(wrong);
        chunk.sum = (float)(chunk.totals[0] + chunk.totals[1]) * chunk.scale;
    }
}

static void prepare_row(const Packed& w, const float* x, uint32_t* to) {
    int64_t stride = input_stride(w);
    if (tile_rows_of_row(w) == 3) return split_row(w, x, (uint16_t*)to);
    if (w.kind == GGUF) return prepare_blocks(w, x, to);
    if (w.kind <= BFLOAT16 || w.kind == MXFP4) {
        int size = w.kind == BFLOAT16 ? 2 : 4;
        memset((char*)to + (size_t)size * w.in, 0, 4 * stride - (size_t)size * w.in);
        if (w.kind == BFLOAT16) store_bf16((uint16_t*)to, x, w.in);
        else memcpy(to, x, 4 * (size_t)w.in);
        return;
    }
    auto part = [&](int k) { return k + LANES <= w.in ? load(x + k) : load_some(x + k, w.in - k); };
    Vector most{}, wrong{};  // NaN or infinity makes the scale, and with it the whole row, NaN or infinite
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

// The integer sums of a row's inputs are words after its data: for INT8 of all, for INT4 of each group. The scale is last.
static inline float scale_of(const uint32_t* row, int64_t stride) {
    float scale;
    memcpy(&scale, row + stride - 1, 4);
    return scale;
}

// From sums of products of codes to sums of products.
static inline Vector scaled_int8(const Packed& w, const uint32_t* row, int64_t stride, Ints sums, int vector) {
    int32_t total = (int32_t)row[steps_of(w)];
    return __builtin_convertvector(sums - 128 * total, Vector) * (scale_of(row, stride) * load(w.scales + vector * LANES));
}

static inline const int32_t* group_totals(const Packed& w, const uint32_t* row) { return (const int32_t*)row + 2 * steps_of(w); }

// Calls `visit(place, index)` for every element: its place in the packed form, counted in elements, and in the plain one.
template <class Visit> static void each_element(Team& team, const Packed& w, const Visit& visit) {
    int many = inputs_of_word(w.kind), steps = steps_of(w);
    const double nanoseconds = 4.0 * w.in * w.out;
    Team::Together together(team, nanoseconds);
    team.run((w.out + GROUP - 1) / GROUP, nanoseconds, [&](int group, int) {
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

// The same for blocks as a file has them, all of one format. `to`: where places[0] is.
static void pack_blocks(Team& team, const Packed& w, const uint8_t* weight, uint8_t* to) {
    const int format = w.formats[0];
    const BlockFormat& f = FORMATS[format];
    const int blocks = w.in / f.block();
    const double nanoseconds = 4.0 * w.in * w.out;
    Team::Together together(team, nanoseconds);
    team.run(padded_out(w) / GROUP, nanoseconds, [&](int group, int) {
        uint8_t* record = to + group * block_bytes(format, w.in);
        for (int b = 0; b < blocks; b++) {
            const int first = b * f.block();
            for (int n = group * GROUP; n < std::min(w.out, (group + 1) * GROUP); n++)
                pack_block(
                    format, weight + ((int64_t)n * blocks + b) * f.block_bytes, record + first / f.record() * f.record_bytes(), n % GROUP,
                    first % f.record());
        }
    });
}

// `weight` [out, in] to the packed form: floats, halves of bfloat16, codes in bytes, or blocks.
static void pack(Team& team, const Packed& w, const void* weight, void* to) {
    memset(to, 0, packed_bytes(w));
    if (w.kind == GGUF) return pack_blocks(team, w, (const uint8_t*)weight, (uint8_t*)to);
    each_element(team, w, [&](int64_t place, int64_t index) {
        if (w.kind == FLOAT32) ((float*)to)[place] = ((const float*)weight)[index];
        else if (w.kind <= BFLOAT16) ((uint16_t*)to)[place] = ((const uint16_t*)weight)[index];
        else if (w.kind == INT8) ((uint8_t*)to)[place] = ((const uint8_t*)weight)[index];
        else ((uint8_t*)to)[nibble_byte(place)] |= ((const uint8_t*)weight)[index] << nibble_shift(place);
    });
}

// The weights, float32 [out, in].
static void unpack_blocks(Team& team, const Packed& w, float* weight) {
    const double nanoseconds = 8.0 * w.in * w.out;
    Team::Together together(team, nanoseconds);
    team.run(padded_out(w) / GROUP, nanoseconds, [&](int group, int) {
        const BlockFormat& f = FORMATS[w.formats[group]];
        for (int n = group * GROUP; n < std::min(w.out, (group + 1) * GROUP); n++)
            for (int k = 0; k < w.in; k++) {
                const uint8_t* record = (const uint8_t*)w.data + w.places[group] + (int64_t)(k / f.record()) * f.record_bytes();
                weight[(int64_t)n * w.in + k] = unpacked_block(w.formats[group], record, n % GROUP, k % f.record());
            }
    });
}

// The inverse of `pack`; of blocks float32.
static void unpack(Team& team, const Packed& w, void* weight) {
    if (w.kind == GGUF) return unpack_blocks(team, w, (float*)weight);
    const uint8_t* bytes = (const uint8_t*)w.data;
    each_element(team, w, [&](int64_t place, int64_t index) {
        if (w.kind == FLOAT32) ((float*)weight)[index] = ((const float*)w.data)[place];
        else if (w.kind <= BFLOAT16) ((uint16_t*)weight)[index] = ((const uint16_t*)w.data)[place];
        else if (w.kind == INT8) ((uint8_t*)weight)[index] = bytes[place];
        else ((uint8_t*)weight)[index] = bytes[nibble_byte(place)] >> nibble_shift(place) & 15;
    });
}
