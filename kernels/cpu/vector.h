// Vectors as wide as the machine's registers, in GCC's vector extensions: one source for AVX-512, AVX2, NEON and
// any other machine.
// Every function computes its lanes independently, so results do not depend on how lanes are used.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 4;  // WIDE: vectors of a register block's row
#elif defined(__AVX2__)
constexpr int LANES = 8, WIDE = 2;
#else
constexpr int LANES = 4, WIDE = 2;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

static inline Vector load(const float* from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float* to, Vector x) { memcpy(to, &x, sizeof x); }

static inline Vector all(float x) { return x - Vector{}; }

// The first n lanes; the others are 0.
static inline Vector load_some(const float* from, int n) {
    if (n == LANES) return load(from);
    Vector x{};
    memcpy(&x, from, 4 * n);
    return x;
}

static inline void store_some(float* to, Vector x, int n) {
    if (n == LANES) store(to, x);
    else memcpy(to, &x, 4 * n);
}

// Four numbers, again and again.
static inline Vector repeated(const float* from) {
#if defined(__AVX512F__)
    return (Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif defined(__AVX2__)
    return (Vector)_mm256_broadcast_ps((const __m128*)from);
#else
    return load(from);
#endif
}

// Each four numbers of a vector are added as (0 + 2) + (1 + 3). Number 4 i + k of the result is the sum of four i of vector k.
static inline Vector sum_fours(Vector a, Vector b, Vector c, Vector d) {
#if defined(__AVX512F__)
    __m512 ab = _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b);
    __m512 cd = _mm512_unpacklo_ps((__m512)c, (__m512)d) + _mm512_unpackhi_ps((__m512)c, (__m512)d);
    return (Vector)(_mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee));
#elif defined(__AVX2__)
    __m256 ab = _mm256_unpacklo_ps((__m256)a, (__m256)b) + _mm256_unpackhi_ps((__m256)a, (__m256)b);
    __m256 cd = _mm256_unpacklo_ps((__m256)c, (__m256)d) + _mm256_unpackhi_ps((__m256)c, (__m256)d);
    return (Vector)(_mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee));
#else
    return Vector{(a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]), (c[0] + c[2]) + (c[1] + c[3]), (d[0] + d[2]) + (d[1] + d[3])};
#endif
}

// a * b + c, rounded once where the machine can. The compiler contracts nothing itself (-ffp-contract=off), so every use
// of it in this directory rounds alike.
static inline Vector fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// GCC 12 would take the bytes apart one by one.
static inline Ints widened(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtepu8_epi32((__mmask16)-1, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
#endif
}

// From float16.
static inline Vector load_f16(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    return (Vector)vcvt_f32_f16(vld1_f16((const float16_t*)from));
#else
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words), magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
    const Words small = (Words)(__builtin_convertvector((Ints)magnitude, Vector) * 0x1p-24f);
    const Words usual = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7f800000;  // infinite, or no number
    const Words is_small = (Words)(magnitude < 0x400), is_special = (Words)(magnitude >= 0x7c00);
    return (Vector)(sign | (is_small & small) | (is_special & special) | (~is_small & ~is_special & usual));
#endif
}

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
// The sum of 2 products of 16-bit numbers in each lane.
static inline Ints pairs(Words weights, uint32_t input) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(input));
#else
    return (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(input));
#endif
}
#endif

// 4 unsigned bytes of each lane of `weights` times 4 signed bytes of `input`, added to the lane.
static inline Ints dot_bytes(Ints sums, uint32_t input, Words weights) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(input));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(input));
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
    // Even and odd bytes, widened to 16 bits: a product of pairs with their sum is exact there.
    auto widened = [](uint32_t word) { return (uint16_t)(int8_t)word | (uint32_t)(int8_t)(word >> 16) << 16; };
    return sums + pairs(weights & 0x00ff00ff, widened(input)) + pairs(weights >> 8 & 0x00ff00ff, widened(input >> 8));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, vreinterpretq_s8_u32(vdupq_n_u32(input)));
#else
    for (int i = 0; i < 4; i++) sums += (Ints)((weights >> (8 * i)) & 255) * (int32_t)(int8_t)(input >> (8 * i));
    return sums;
#endif
}

// bfloat16 is the upper half of a float.
static inline Vector load_bf16(const uint16_t* from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return (Vector)(__builtin_convertvector(x, Words) << 16);
}

// The first n lanes; the others are 0.
static inline Vector load_some_bf16(const uint16_t* from, int n) {
    if (n == LANES) return load_bf16(from);
    uint16_t padded[LANES] = {};
    memcpy(padded, from, 2 * n);
    return load_bf16(padded);
}

// To the nearest, ties to even. NaN stays NaN.
static inline Halves to_bf16(Vector x) {
    Words bits = (Words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    Words is_nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector(((is_nan & (bits | 0x400000)) | (~is_nan & rounded)) >> 16, Halves);
}

static inline void store_bf16(uint16_t* to, const float* x, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        Halves halves = to_bf16(load(x + i));
        memcpy(to + i, &halves, sizeof halves);
    }
    if (i < n) {
        Halves halves = to_bf16(load_some(x + i, n - i));
        memcpy(to + i, &halves, 2 * (n - i));
    }
}

// Halves of a vector are added until one lane is left.
static inline float sum(Vector x) {
    float lanes[LANES];
    store(lanes, x);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return lanes[0];
}

static inline float largest_of(Vector x) {
    float lanes[LANES];
    store(lanes, x);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
    return lanes[0];
}

static inline float dot(const float* x, const float* y, int size) {
    Vector products{};
    for (int i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? size - i : LANES;
        products = fma(load_some(x + i, n), load_some(y + i, n), products);
    }
    return sum(products);
}

// In place, to what bfloat16 holds.
static inline void round_bf16(float* x, int n) {
    for (int i = 0; i < n; i += LANES) {
        const int some = n - i < LANES ? n - i : LANES;
        store_some(x + i, (Vector)(__builtin_convertvector(to_bf16(load_some(x + i, some)), Words) << 16), some);
    }
}

constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

static inline Vector max(Vector a, Vector b) { return a > b ? a : b; }

// e^x with a relative error below 2e-7, 0 below -87.3. Cody and Waite's reduction, Taylor's polynomial to the 7th power.
static inline Vector exponential(Vector x) {
    const Vector least = all(-87.33654f), most = all(88.37626f), magic = all(ROUNDING);
    Ints tiny = x < least;
    x = x > most ? most : (x < least ? least : x);
    Vector shifted = fma(x, all(1.44269504f), magic), n = shifted - magic;
    Vector r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x)), y = all(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, all(c));
    Vector power = (Vector)(((Ints)shifted - (Ints)magic + 127) << 23);
    return tiny ? Vector{} : y * power;
}

// cap * tanh(x / cap).
static inline Vector capped(Vector x, float cap) { return cap * (1.0f - 2.0f / (1.0f + exponential(x * (2.0f / cap)))); }
static inline Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

enum Activation { SILU, GELU_TANH, RELU2 };  // RELU2: relu(x)^2, of experts without a gate

// Of an MLP's gate. gelu(x) = x / 2 * (1 + tanh(y)) = x / (1 + e^-2y) with y = sqrt(2 / pi) * (x + 0.044715 x^3).
static inline Vector activated(int activation, Vector x) {
    if (activation == SILU) return silu(x);
    Vector twice = x * fma(x * x, all(2.0f * 0.7978845608f * 0.044715f), all(2.0f * 0.7978845608f));
    return x / (1.0f + exponential(-twice));
}
