// Products with blocks of GGUF files, which are multiplied as they are: integer sums of each group of inputs, times its scale and the
// inputs' scale, are added in float32, one group after the other. See blocks.h.
#pragma once

#include "packed.h"

template <int bits> constexpr int QUADS = bits == 8 ? 1 : 2;  // of 4 inputs, in a line

// The codes in line `line` of a chunk: bytes of 4 inputs of each output.
template <int bits> static inline void codes_of_line(const uint8_t* chunk, int line, Words* codes) {
    const Words word = load_words((const uint32_t*)(chunk + line * LINE));
    if constexpr (bits == 8) {
        codes[0] = word;
    } else {
        codes[0] = word & 0x0f0f0f0f, codes[1] = (word >> 4) & 0x0f0f0f0f;
        if constexpr (bits == 5) {
            const Words upper = load_words((const uint32_t*)(chunk + 4 * LINE));
            for (int q = 0; q < 2; q++) codes[q] |= ((upper >> (2 * line + q)) & 0x01010101) << 4;
        }
        if constexpr (bits == 6) {
            const Words upper = load_words((const uint32_t*)(chunk + (4 + line / 2) * LINE));
            for (int q = 0; q < 2; q++) codes[q] |= ((upper >> (2 * (line % 2 * 2 + q))) & 0x03030303) << 4;
        }
    }
}

// The scale of a group of a record, and what is added to each of its weights. `lane`: the first of the vector's outputs.
template <int format> struct GroupNumbers {
    static constexpr BlockFormat f = FORMATS[format];
    Vector scale, low{};

    GroupNumbers(const uint8_t* record, int group, int lane) {
        const uint8_t* halves = record + (f.is_super ? 0 : 32 * group) + 2 * lane;
        scale = load_f16((const uint16_t*)halves);
        if (f.has_low) low = load_f16((const uint16_t*)(halves + f.low_place()));
        if constexpr (f.is_super) {
            const uint8_t* factors = record + f.halves_bytes() + 16 * group + lane;
            const Ints factor = format == Q6_K ? (widened(factors) ^ 128) - 128 : widened(factors);  // signed, or not
            scale = scale * __builtin_convertvector(factor, Vector);
            if (f.has_low) low = low * -__builtin_convertvector(widened(factors + f.factor_bytes()), Vector);
        }
    }
};

// Lines that a stream of weights is fetched ahead where no other is read beside it: AHEAD lines of one are multiplied before memory
// answers, even by eight rows.
constexpr int FAR_AHEAD = 64;

template <int format, int rows, int blocks>
static inline void multiply_blocks(const uint32_t* x, int64_t stride, const Packed& w, int first, Vector (*sums)[blocks]) {
    constexpr BlockFormat f = FORMATS[format];
    constexpr int CHUNKS = f.record() / CHUNK, GROUPS = CHUNK / f.group, LINES = f.low_lines() / GROUPS, MANY = QUADS<f.bits>;
    const InputChunk* chunks = chunks_of(w, x);  // those of the next row are `stride` words further
    const uint8_t* records[blocks];
    int lanes[blocks];
    for (int b = 0; b < blocks; b++) {
        records[b] = (const uint8_t*)w.data + w.places[(first + b) / BLOCKS];
        lanes[b] = (first + b) % BLOCKS * LANES;
    }
    const uint32_t* inputs[rows];  // one pointer a row, so that no address is computed beside a product
    for (int m = 0; m < rows; m++) inputs[m] = x + m * stride;
    Vector out[rows][blocks] = {};
    for (int c = 0; c < w.in / CHUNK; c++) {
        const int inside = c % CHUNKS;
        for (int b = 0; b < blocks && inside == 0 && c > 0; b++) records[b] += f.record_bytes();
        for (int g = 0; g < GROUPS; g++) {
            Ints acc[rows][blocks];
            for (int m = 0; m < rows; m++) {
                const int32_t* totals = chunks[m * stride / CHUNK_WORDS + c].totals;
                for (int b = 0; b < blocks; b++) acc[m][b] = Ints{} - f.zero * (GROUPS == 2 ? totals[g] : totals[0] + totals[1]);
            }
#pragma GCC unroll 8
            for (int line = 0; line < LINES; line++)
                for (int b = 0; b < blocks; b++) {
                    const uint8_t* chunk = records[b] + f.header_bytes() + inside * f.chunk_bytes() + 4 * lanes[b];
                    Words codes[MANY];
                    codes_of_line<f.bits>(chunk, g * LINES + line, codes);
                    __builtin_prefetch(chunk + (g * LINES + line + (blocks == 1 ? FAR_AHEAD : AHEAD)) * LINE, 0, blocks == 1 ? 2 : 3);
                    for (int q = 0; q < MANY; q++)
                        for (int m = 0; m < rows; m++) acc[m][b] = dot_bytes(acc[m][b], inputs[m][(g * LINES + line) * MANY + q], codes[q]);
                }
            for (int b = 0; b < blocks; b++) {
                const GroupNumbers<format> numbers(records[b], inside * GROUPS + g, lanes[b]);
                for (int m = 0; m < rows; m++) {
                    const InputChunk& chunk = chunks[m * stride / CHUNK_WORDS + c];
                    out[m][b] = fma(__builtin_convertvector(acc[m][b], Vector), numbers.scale * chunk.scale, out[m][b]);
                    if (f.has_low) out[m][b] = fma(all(chunk.sum), numbers.low, out[m][b]);
                }
            }
        }
        for (int m = 0; m < rows; m++) inputs[m] += CHUNK / 4;
    }
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) sums[m][b] = out[m][b];
}

// Vectors are of one format.
template <int rows, int blocks>
static void multiply_gguf(const uint32_t* x, int64_t stride, const Packed& w, int first, Vector (*sums)[blocks]) {
    switch (w.formats[first / BLOCKS]) {
        case Q8_0: return multiply_blocks<Q8_0, rows, blocks>(x, stride, w, first, sums);
        case Q4_0: return multiply_blocks<Q4_0, rows, blocks>(x, stride, w, first, sums);
        case Q4_1: return multiply_blocks<Q4_1, rows, blocks>(x, stride, w, first, sums);
        case Q5_0: return multiply_blocks<Q5_0, rows, blocks>(x, stride, w, first, sums);
        case Q5_1: return multiply_blocks<Q5_1, rows, blocks>(x, stride, w, first, sums);
        case Q4_K: return multiply_blocks<Q4_K, rows, blocks>(x, stride, w, first, sums);
        case Q5_K: return multiply_blocks<Q5_K, rows, blocks>(x, stride, w, first, sums);
        default: return multiply_blocks<Q6_K, rows, blocks>(x, stride, w, first, sums);
    }
}
