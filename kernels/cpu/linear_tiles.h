// Products with packed weights by tiles. As in linear.h, sums are in one order for every number of rows, but in another one.
#pragma once

#include "linear_blocks.h"

#if defined(HAS_TILES)

// A few chunks of 16 outputs in blocks, see linear_blocks.h: codes less their zeros, as a tile takes them, and the groups' numbers.
struct alignas(64) UnpackedChunks {
    static constexpr int MOST = 4;
    uint32_t codes[MOST][CHUNK / 4][TILE];
    Vector scales[MOST][2], lows[MOST];
};

template <int format> static void unpack_chunks(const uint8_t* records, int first, int count, UnpackedChunks& to) {
    constexpr BlockFormat f = FORMATS[format];
    constexpr int CHUNKS = f.record() / CHUNK, GROUPS = CHUNK / f.group, MANY = QUADS<f.bits>;
    for (int i = 0; i < count; i++) {
        const int number = first + i, inside = number % CHUNKS;
        const uint8_t* record = records + (int64_t)(number / CHUNKS) * f.record_bytes();
        const uint8_t* chunk = record + f.header_bytes() + inside * f.chunk_bytes();
        for (int line = 0; line < f.low_lines(); line++) {
            Words codes[MANY];
            codes_of_line<f.bits>(chunk, line, codes);
            __builtin_prefetch(chunk + (line + FAR_AHEAD) * LINE, 0, 2);
            for (int q = 0; q < MANY; q++) {
                const __m512i signed_codes = f.zero ? _mm512_sub_epi8((__m512i)codes[q], _mm512_set1_epi8((char)f.zero)) : (__m512i)codes[q];
                _mm512_store_si512(to.codes[i][line * MANY + q], signed_codes);
            }
        }
        for (int g = 0; g < GROUPS; g++) {
            const GroupNumbers<format> numbers(record, inside * GROUPS + g, 0);
            to.scales[i][g] = numbers.scale, to.lows[i] = numbers.low;
        }
    }
}

constexpr void (*UNPACK_CHUNKS[])(const uint8_t*, int, int, UnpackedChunks&) = {
    unpack_chunks<Q8_0>, unpack_chunks<Q4_0>, unpack_chunks<Q4_1>, unpack_chunks<Q5_0>,
    unpack_chunks<Q5_1>, unpack_chunks<Q4_K>, unpack_chunks<Q5_K>, unpack_chunks<Q6_K>,
};

// Adds the products of `chunks` chunks to the sums of a row, as `multiply_blocks` does.
template <int chunks, int groups, bool has_low> struct GroupSums {
    Vector scales[chunks][groups], lows[chunks];

    explicit GroupSums(const UnpackedChunks& unpacked) {
        for (int c = 0; c < chunks; c++) {
            for (int g = 0; g < groups; g++) scales[c][g] = unpacked.scales[c][g];
            if (has_low) lows[c] = unpacked.lows[c];
        }
    }

    // product(c, g): where those of a group are.
    template <class Product> Vector operator()(Vector sum, const InputChunk* own, const Product& product) const {
#pragma GCC unroll 4
        for (int c = 0; c < chunks; c++) {
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++)
                sum = fma(__builtin_convertvector((Ints)load_words(product(c, g)), Vector), scales[c][g] * own[c].scale, sum);
            if (has_low) sum = fma(all(own[c].sum), lows[c], sum);
        }
        return sum;
    }
};

// A pass over `wide` vectors of weights, from vector `first` on, for `rows` rows from row `m` on: `high` blocks of them.
template <int high, int wide> struct TilePass {
    static_assert(high * wide <= 4);
    static constexpr int TILES = high * wide;
    typedef uint32_t Tile[TILE][TILE];

    const Packed& w;
    const uint32_t* x;
    const int m, rows, first;
    const int parts = tile_rows_of_row(w), block = TILE / parts, last = rows - (high - 1) * block;  // rows of blocks
    const int64_t stride = input_stride(w) / parts;                                                // of tile rows
    const uint32_t* columns[wide];

    TilePass(const Packed& w, const uint32_t* x, int m, int rows, int first)
        : w(w), x(x + m * input_stride(w)), m(m), rows(rows), first(first) {
        for (int v = 0; v < wide; v++) columns[v] = column_of(w, first + v);
    }

    // The lines that the sums will be put into may be in another core's cache.
    template <class Where> void fetch(const Where& where) const {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < wide; v++) __builtin_prefetch(where(m + r, first + v), 1);
    }

    // Shapes all registers. `depth`: words of a row of inputs.
    void shape(Tiles& shapes, int depth) const {
        for (int c = 0; c < TILES; c++) shapes.set(c, c / wide == high - 1 ? parts * last : parts * block, TILE);
        shapes.set(4, depth, TILE);
        shapes.set(5, depth, TILE);
        shapes.set(6, parts * block, depth);
        shapes.set(7, parts * last, depth);
        shapes.begin();
    }

    // The same where registers of sums hold several groups of inputs, or several blocks of rows.
    void shape_of_groups(Tiles& shapes, int depth) const {
        shape(shapes, depth);
        for (int c = 0; c < 4; c++) shapes.set(c, high > 1 && (high == 2 ? c % 2 == 0 : c < high - 1) ? block : last, TILE);
        shapes.begin();
    }

    template <int h> void load_inputs(int k) const { tile_load<h == high - 1 ? 7 : 6>(x + (int64_t)h * parts * block * stride + k, stride); }

    // Adds the products of inputs from word `k` on: `load_weights.operator()<v>()` loads those of vector v to register 4 + v % 2.
    template <TileDot dot, class Load> void add_products(int k, const Load& load_weights) const {
        if constexpr (high <= 2) each<high>([&]<int h>() { load_inputs<h>(k); });
        each<wide>([&]<int v>() {
            load_weights.template operator()<v>();
            each<high>([&]<int h>() {
                if constexpr (high > 2) load_inputs<h>(k);
                tile_dot<dot, h * wide + v, h == high - 1 ? 7 : 6, 4 + v % 2>();
            });
        });
    }

    template <TileDot dot> void multiply(Tile* sums) const {
        Tiles tiles;
        shape(tiles, TILE);
        each<TILES>([]<int c>() { tile_zero<c>(); });
        const int steps = steps_of(w);
        for (int k = 0; k < steps; k += TILE) {
            add_products<dot>(k, [&]<int v>() {
                const uint32_t* from = columns[v] + (int64_t)k * GROUP;
                if constexpr (high > 1)
                    for (int i = 0; i < TILE; i++) __builtin_prefetch(from + (i + 4 * TILE) * GROUP, 0, 2);
                tile_load<4 + v % 2>(from, GROUP);
            });
        }
        each<TILES>([&]<int c>() { tile_store<c>(sums[c][0], TILE); });
    }

    // One tile of MXFP4 weights, four lines of 8 inputs, as pairs of bfloat16. `exponents`: of a power of two for each output. It is
    // added to the exponents of all numbers but zero; those beyond 2^-125 and 2^125 are cut.
    static void unpack_mxfp4(const uint32_t* from, Words exponents, Tile to) {
        // By sign, two bits of exponent and one of mantissa, twice: a lookup reads five bits.
        alignas(64) static const uint16_t numbers[32] = {
            0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
            0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        const __m512i table = _mm512_load_si512(numbers), magnitude = _mm512_set1_epi16(0x7fff);
        const __m512i cut = _mm512_min_epi32(_mm512_max_epi32((__m512i)exponents, _mm512_set1_epi32(2)), _mm512_set1_epi32(252));
        const __m512i once = _mm512_slli_epi32(_mm512_sub_epi32(cut, _mm512_set1_epi32(127)), 7);
        const __m512i powers = _mm512_mask_blend_epi16(0xaaaaaaaa, once, _mm512_slli_epi32(once, 16));
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(from + (i + AHEAD) * GROUP);
            const __m512i eight = (__m512i)load_words(from + i * GROUP);
            const auto put = [&](int pair, __m512i even, __m512i odd) {  // the nibbles are the lowest of each half
                const __m512i found = _mm512_permutexvar_epi16(_mm512_mask_blend_epi16(0xaaaaaaaa, even, odd), table);
                const __m512i scaled = _mm512_mask_add_epi16(found, _mm512_test_epi16_mask(found, magnitude), found, powers);
                _mm512_store_si512(to[4 * i + pair], scaled);
            };
            put(0, eight, _mm512_slli_epi32(eight, 8));
            put(1, _mm512_srli_epi32(eight, 16), _mm512_srli_epi32(eight, 8));
            put(2, _mm512_srli_epi32(eight, 4), _mm512_slli_epi32(eight, 4));
            put(3, _mm512_srli_epi32(eight, 20), _mm512_srli_epi32(eight, 12));
        }
    }

    // As in `int4`, the next tile is unpacked while one is multiplied.
    void multiply_mxfp4(Tile* sums) const {
        const int count = steps_of(w) / 4;
        alignas(64) Tile unpacked[2][wide];
        Tiles tiles;
        shape(tiles, TILE);
        each<TILES>([]<int c>() { tile_zero<c>(); });
        auto unpack_all = [&](int tile) {
            for (int v = 0; v < wide && tile < count; v++) {
                const Words exponents = (Words)widened(w.zeros + (int64_t)tile * padded_out(w) + (first + v) * TILE);
                unpack_mxfp4(columns[v] + (int64_t)tile * 4 * GROUP, exponents, unpacked[tile % 2][v]);
            }
        };
        unpack_all(0);
        for (int tile = 0; tile < count; tile++) {
            unpack_all(tile + 1);
            add_products<PAIRS>(tile * TILE, [&]<int v>() { tile_load<4 + v % 2>(unpacked[tile % 2][v][0], TILE); });
        }
        each<TILES>([&]<int c>() { tile_store<c>(sums[c][0], TILE); });
    }

    template <class Where, class Put> void floats_or_int8(const Where& where, const Put& put) const {
        alignas(64) Tile sums[TILES];
        if (w.kind == INT8) multiply<UNSIGNED>(sums);
        else if (w.kind == MXFP4) multiply_mxfp4(sums);
        else multiply<PAIRS>(sums);
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < wide; v++) {
                auto sum = [&](int part) { return (Vector)load_words(sums[r / block * wide + v][r % block * parts + part]); };
                float* to = where(m + r, first + v);
                if (w.kind == INT8) put(to, first + v, scaled_int8(w, x + r * stride, stride, (Ints)sum(0), first + v));
                else put(to, first + v, parts == 1 ? sum(0) : (sum(2) + sum(1)) + sum(0));
            }
        }
    }

    // The bytes of one tile of int4 weights, without their zeros.
    static void unpack(const uint32_t* from, Words zeros, int depth, Tile to) {
        auto put = [&](Words codes, uint32_t* row) {
            auto bytes = _mm512_sub_epi8((__m512i)codes, (__m512i)zeros);
            memcpy(row, &bytes, sizeof bytes);
        };
        for (int i = 0; i < depth / 2; i++) {
            __builtin_prefetch(from + (i + AHEAD) * GROUP);
            Words eight = load_words(from + i * GROUP);
            put(eight & 0x0f0f0f0f, to[2 * i]);
            put((eight >> 4) & 0x0f0f0f0f, to[2 * i + 1]);
        }
    }

    // While one tile is multiplied the next one is unpacked, because a tile cannot be loaded from where numbers were just stored
    // without a wait. The same holds for the sums of a group of inputs.
    template <class Where, class Put> void int4(const Where& where, const Put& put) const {
        const int depth = std::min(TILE, w.quant_group / 4), tiles_of_group = w.quant_group / (4 * depth);
        const int count = std::min(2 * steps_of(w) / depth, quant_groups(w) * tiles_of_group);
        alignas(64) Tile unpacked[2][wide], products[2][TILES];
        Vector sums[TILES * TILE] = {};
        Tiles tiles;
        shape(tiles, depth);
        auto unpack_all = [&](int tile) {
            for (int v = 0; v < wide && tile < count; v++) {
                Words zeros = (Words)widened(w.zeros + (int64_t)(tile / tiles_of_group) * padded_out(w) + (first + v) * TILE) * 0x01010101u;
                unpack(columns[v] + (int64_t)tile * (depth / 2) * GROUP, zeros, depth, unpacked[tile % 2][v]);
            }
        };
        auto add_group = [&](int group) {
            for (int v = 0; v < wide; v++) {
                const Vector scale = load(w.scales + (int64_t)group * padded_out(w) + (first + v) * TILE);
                for (int r = 0; r < rows; r++) {
                    const int c = r / TILE * wide + v;
                    const Ints found = (Ints)load_words(products[group % 2][c][r % TILE]);
                    sums[c * TILE + r % TILE] = fma(__builtin_convertvector(found, Vector), scale, sums[c * TILE + r % TILE]);
                }
            }
        };
        unpack_all(0);
        for (int tile = 0; tile < count; tile++) {
            unpack_all(tile + 1);
            if (tile % tiles_of_group == 0) each<TILES>([]<int c>() { tile_zero<c>(); });
            add_products<SIGNED>(tile * depth, [&]<int v>() { tile_load<4 + v % 2>(unpacked[tile % 2][v][0], TILE); });
            if ((tile + 1) % tiles_of_group && tile + 1 < count) continue;
            const int group = tile / tiles_of_group;
            each<TILES>([&]<int c>() { tile_store<c>(products[group % 2][c][0], TILE); });
            if (group > 0) add_group(group - 1);
        }
        add_group((count - 1) / tiles_of_group);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < wide; v++)
                put(where(m + r, first + v), first + v, sums[(r / TILE * wide + v) * TILE + r % TILE] * scale_of(x + r * stride, stride));
    }

    // As `int4`, with the sums of `multiply_blocks`, bit for bit, for one vector. The registers of sums hold several groups of inputs, so
    // that their products are in flight at once. A row's sums are loaded once for `CHUNKS` chunks.
    template <int groups, bool has_low> void blocks(Vector* sums) const {
        static_assert(wide == 1);
        constexpr int CHUNKS = high == 1 ? 4 : high == 2 ? 2 : 1;  // of a step
        constexpr int DEPTH = CHUNK / 4 / groups;
        const int chunks = w.in / CHUNK, steps = (chunks + CHUNKS - 1) / CHUNKS;
        const auto unpack = UNPACK_CHUNKS[w.formats[first]];
        const uint8_t* records = (const uint8_t*)w.data + w.places[first];
        UnpackedChunks unpacked[3];
        alignas(64) Tile products[2][CHUNKS][groups][high];
        const InputChunk* inputs = chunks_of(w, x);
        Tiles tiles;
        shape_of_groups(tiles, DEPTH);
        auto count = [&](int step) { return std::min(CHUNKS, chunks - step * CHUNKS); };
        auto multiply = [&]<int c, int g>(int step) {
            constexpr int sum = (c * groups + g) * high % 4 <= 4 - high ? (c * groups + g) * high % 4 : 0;
            tile_load<4 + g % 2>(unpacked[step % 3].codes[c][g * DEPTH], TILE);
            each<high>([&]<int h>() {
                load_inputs<h>((step * CHUNKS + c) * (CHUNK / 4) + g * DEPTH);
                tile_zero<sum + h>();
                tile_dot<SIGNED, sum + h, h == high - 1 ? 7 : 6, 4 + g % 2>();
                tile_store<sum + h>(products[step % 2][c][g][h][0], TILE);
            });
        };
        auto add = [&]<int many>(int step) {
            const GroupSums<many, groups, has_low> add_to(unpacked[step % 3]);
            const InputChunk* own = inputs + step * CHUNKS;
            for (int r = 0; r < rows; r++, own += stride / CHUNK_WORDS)
                sums[r] = add_to(sums[r], own, [&](int c, int g) { return products[step % 2][c][g][r / TILE][r % TILE]; });
        };
        auto add_some = [&](int step) {
            if (count(step) == CHUNKS) return add.template operator()<CHUNKS>(step);
            if constexpr (CHUNKS > 1) each<CHUNKS - 1>([&]<int c>() { if (count(step) == c + 1) add.template operator()<c + 1>(step); });
        };
        unpack(records, 0, count(0), unpacked[0]);
        for (int step = 0; step < steps; step++) {
            if (step + 1 < steps) unpack(records, (step + 1) * CHUNKS, count(step + 1), unpacked[(step + 1) % 3]);
            each<CHUNKS>([&]<int c>() {
                if (c < count(step)) each<groups>([&]<int g>() { multiply.template operator()<c, g>(step); });
            });
            if (step > 0) add_some(step - 1);
        }
        add_some(steps - 1);
    }

    template <class Where, class Put> void gguf(const Where& where, const Put& put) const {
        if constexpr (wide == 1) {
            const BlockFormat& f = FORMATS[w.formats[first]];
            Vector sums[TILES * TILE] = {};
            if (f.group < CHUNK) blocks<2, false>(sums);
            else if (f.has_low) blocks<1, true>(sums);
            else blocks<1, false>(sums);
            for (int r = 0; r < rows; r++) put(where(m + r, first), first, sums[r]);
        }
    }
};

// See linear_columns. Up to four blocks of rows read the weights once. More are bound by products, of which a block of rows with
// four vectors makes the most, but for MXFP4 and GGUF, which each pass unpacks.
template <class Where, class Put>
static void tile_columns(const Packed& w, const uint32_t* x, int m0, int m1, int first, int blocks, const Where& where, const Put& put) {
    const int block = TILE / tile_rows_of_row(w);
    const int most = m1 - m0 > 4 * block && w.kind != MXFP4 && w.kind != GGUF ? 1 : 4;
    for (int m = m0; m < m1; m += most * block) {
        const int rows = std::min(most * block, m1 - m), high = (rows + block - 1) / block;
        for (int b = 0; b < blocks;) {
            auto pass = [&]<int high, int wide>() {
                TilePass<high, wide> pass(w, x, m, rows, first + b);
                pass.fetch(where);
                if (w.kind == INT4) pass.int4(where, put);
                else if (w.kind == GGUF) pass.gguf(where, put);
                else pass.floats_or_int8(where, put);
                b += wide;
            };
            const int left = w.kind == GGUF ? 1 : blocks - b;
            if (high == 4) pass.template operator()<4, 1>();
            else if (high == 3) pass.template operator()<3, 1>();
            else if (high == 2 && left >= 2) pass.template operator()<2, 2>();
            else if (high == 2) pass.template operator()<2, 1>();
            else if (left >= 4) pass.template operator()<1, 4>();
            else if (left >= 2) pass.template operator()<1, 2>();
            else pass.template operator()<1, 1>();
        }
    }
}

#else

template <class Where, class Put>
static void tile_columns(const Packed&, const uint32_t*, int, int, int, int, const Where&, const Put&) {}

#endif
