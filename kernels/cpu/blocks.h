// Weights as GGUF files hold them: blocks of integers of 4, 5, 6 or 8 bits. Groups of 32 or 16 inputs share a scale, and in some
// formats a number that is added: weight = (code - zero) * scale + low.
//
//                           scale and low of a group
//   Q8_0, Q4_0, Q5_0        float16; no low
//   Q4_1, Q5_1              float16, float16
//   Q4_K, Q5_K (256 inputs) float16 d times 6 bits, minus float16 dmin times 6 bits
//   Q6_K (256 inputs)       float16 d times 8 bits, groups of 16; no low
//
// Packed for products, 16 outputs are a sequence of records of 64 or 256 inputs, made of lines of 16 words:
//
//   float16 scales (or d) of 16 outputs, then lows (or dmin); in 256 inputs then bytes: factors of d, factors of dmin
//   for each 32 inputs: their lower 4 bits, four lines (of 8 bits: eight); then the bits above those, one or two lines
//
// In a word of lower bits, input k of 8 shares a byte with input k + 4. Byte j of a word of upper bits has those of inputs j, j + 4,
// j + 8, ..., the lowest first.
//
// Source of the formats: ggml's documentation and the package gguf.
#pragma once

#include <algorithm>

#include "vector.h"

constexpr int CHUNK = 32;  // inputs whose lines stand together
constexpr int LINE = 64;   // bytes of 16 words
constexpr int CHUNK_WORDS = 4;  // beside the codes of as many inputs of a row

enum Format : uint8_t { Q8_0 = 0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

struct BlockFormat {
    int bits, zero, group;  // group: inputs that share a scale
    bool has_low, is_super; // is_super: 256 inputs share d, which bytes multiply
    int block_bytes;        // in the file

    constexpr int block() const { return is_super ? 256 : 32; }                    // inputs, in the file
    constexpr int record() const { return is_super ? 256 : 64; }                   // inputs, packed
    constexpr int factor_bytes() const { return is_super ? 16 * (256 / group) : 0; }  // of d, or of dmin
    constexpr int halves_bytes() const { return has_low && !is_super ? 2 * LINE : LINE; }
    constexpr int header_bytes() const { return halves_bytes() + factor_bytes() * (has_low ? 2 : 1); }
    constexpr int low_place() const { return is_super ? 32 : LINE; }               // of dmin, or of the lows
    constexpr int low_lines() const { return bits == 8 ? 8 : 4; }
    constexpr int chunk_bytes() const { return LINE * (low_lines() + (bits == 8 ? 0 : bits - 4)); }
    constexpr int record_bytes() const { return header_bytes() + record() / CHUNK * chunk_bytes(); }
};

constexpr BlockFormat FORMATS[] = {
    {8, 128, 32, false, false, 34},  // Q8_0; codes are the file's + 128
    {4, 8, 32, false, false, 18},    // Q4_0
    {4, 0, 32, true, false, 20},     // Q4_1
    {5, 16, 32, false, false, 22},   // Q5_0
    {5, 0, 32, true, false, 24},     // Q5_1
    {4, 0, 32, true, true, 144},     // Q4_K
    {5, 0, 32, true, true, 176},     // Q5_K
    {6, 32, 16, false, true, 210},   // Q6_K
};

// Of 16 outputs.
static inline int64_t block_bytes(int format, int inputs) {
    const BlockFormat& f = FORMATS[format];
    return (int64_t)((inputs + f.record() - 1) / f.record()) * f.record_bytes();
}

static inline float half_of(const uint8_t* from) {
    uint16_t half;
    memcpy(&half, from, 2);
    alignas(64) uint16_t halves[LANES] = {half};
    float x[LANES];
    store(x, load_f16(halves));
    return x[0];
}

// Factors of the scale and of the low of group j of 8, of Q4_K and Q5_K: 6 bits each, in 12 bytes.
static inline void factors_of(const uint8_t* q, int j, uint8_t* scale, uint8_t* low) {
    *scale = j < 4 ? q[j] & 63 : (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    *low = j < 4 ? q[j + 4] & 63 : q[j + 4] >> 4 | (q[j] >> 6) << 4;
}

// The code of input k of a block in the file.
static inline int code_of(int format, const uint8_t* block, int k) {
    const auto nibble = [&](const uint8_t* pairs) { return pairs[k % 16] >> k / 16 * 4 & 15; };      // of 32 inputs
    const auto bit = [&](const uint8_t* bits) { return (bits[k / 8] >> k % 8 & 1) << 4; };           // of 32 inputs
    const auto nibble_of_64 = [&](const uint8_t* pairs) { return pairs[k / 64 * 32 + k % 32] >> k / 32 % 2 * 4 & 15; };
    switch (format) {
        case Q8_0: return (int8_t)block[2 + k] + 128;
        case Q4_0: return nibble(block + 2);
        case Q4_1: return nibble(block + 4);
        case Q5_0: return nibble(block + 6) | bit(block + 2);
        case Q5_1: return nibble(block + 8) | bit(block + 4);
        case Q4_K: return nibble_of_64(block + 16);
        case Q5_K: return nibble_of_64(block + 48) | (block[16 + k % 32] >> k / 32 & 1) << 4;
        default: {
            const int half = k / 128, quarter = k / 32 % 4;
            const int low = block[half * 64 + quarter % 2 * 32 + k % 32] >> quarter / 2 * 4 & 15;
            return low | (block[128 + half * 32 + k % 32] >> 2 * quarter & 3) << 4;
        }
    }
}

// One block of output `lane` of 16, whose first input is `first` of its record.
static void pack_block(int format, const uint8_t* block, uint8_t* record, int lane, int first) {
    const BlockFormat& f = FORMATS[format];
    const int d = format == Q6_K ? 208 : 0, place = first / f.block() * 32 + 2 * lane;  // of scales or d
    memcpy(record + place, block + d, 2);
    if (f.has_low) memcpy(record + f.low_place() + place, block + 2, 2);
    for (int g = 0; f.is_super && g < f.block() / f.group; g++) {
        uint8_t* factors = record + f.halves_bytes() + 16 * g + lane;
        if (format == Q6_K) *factors = block[192 + g];
        else factors_of(block + 4, g, factors, factors + f.factor_bytes());
    }
    for (int k = 0; k < f.block(); k++) {
        const int code = code_of(format, block, k), i = (first + k) % CHUNK, each = f.bits == 8 ? 4 : 8;
        uint8_t* chunk = record + f.header_bytes() + (first + k) / CHUNK * f.chunk_bytes() + 4 * lane + i % 4;
        if (f.bits == 8) chunk[i / each * LINE] = code;
        else chunk[i / each * LINE] |= (code & 15) << (i % 8 < 4 ? 0 : 4);
        if (f.bits == 5) chunk[4 * LINE] |= (code >> 4) << i / 4;
        if (f.bits == 6) chunk[(4 + i / 16) * LINE] |= (code >> 4) << 2 * (i % 16 / 4);
    }
}

// The weight of output `lane` at input k of a record.
static float unpacked_block(int format, const uint8_t* record, int lane, int k) {
    const BlockFormat& f = FORMATS[format];
    const int i = k % CHUNK, each = f.bits == 8 ? 4 : 8, g = k / f.group;
    const uint8_t* chunk = record + f.header_bytes() + k / CHUNK * f.chunk_bytes() + 4 * lane + i % 4;
    int code = chunk[i / each * LINE];
    if (f.bits != 8) code = code >> (i % 8 < 4 ? 0 : 4) & 15;
    if (f.bits == 5) code |= (chunk[4 * LINE] >> i / 4 & 1) << 4;
    if (f.bits == 6) code |= (chunk[(4 + i / 16) * LINE] >> 2 * (i % 16 / 4) & 3) << 4;
    const int place = (f.is_super ? 0 : 32 * g) + 2 * lane;
    float scale = half_of(record + place), low = f.has_low ? half_of(record + f.low_place() + place) : 0;
    if (f.is_super) {
        const uint8_t* factors = record + f.halves_bytes() + 16 * g + lane;
        scale *= format == Q6_K ? (int8_t)*factors : *factors;
        low *= f.has_low ? -factors[f.factor_bytes()] : 0;
    }
    return (code - f.zero) * scale + low;
}
