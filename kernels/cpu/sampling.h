// Scores logits / T + Gumbel noise: the target's draws, and the best children of a drafted node. The references are
// eagle_server/ops/sampling/gumbel.py, draw.py and topk.py.
#pragma once

#include <cmath>

#include "session.h"

namespace {

constexpr int HALF = LANES / 2;
typedef uint64_t Longs __attribute__((vector_size(8 * HALF)));
typedef int64_t SignedLongs __attribute__((vector_size(8 * HALF)));
typedef float HalfVector __attribute__((vector_size(4 * HALF)));

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

template <class Bits> inline Bits mix(Bits x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// log x of positive normal numbers, with a relative error of about 1e-7. Cephes' polynomial.
inline Vector logarithm(Vector x) {
    Ints bits = (Ints)x - 0x3f3504f3;  // sqrt(1/2): the mantissa lies in [sqrt(1/2), sqrt(2))
    Vector e = __builtin_convertvector(bits >> 23, Vector), m = (Vector)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    Vector square = m * m, y = all(7.0376836292e-2f);
    for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                    -2.4999993993e-1f, 3.3333331174e-1f})
        y = fma(y, m, all(c));
    y = fma(e, all(-2.12194440e-4f), y * m * square) - 0.5f * square;
    return fma(e, all(0.693359375f), m + y);
}

// 53 random bits of half a vector of tokens, of which `ids` gives the first `n`; null: they follow `first`.
inline HalfVector random_bits(uint64_t state, const int64_t* ids, int first, int n) {
    Longs counters;
    for (int i = 0; i < HALF; i++) counters[i] = ids ? (i < n ? ids[first + i] + 1 : 0) : (uint64_t)first + i + 1;
    return __builtin_convertvector((SignedLongs)(mix(state + counters * GAMMA) >> 11), HalfVector);
}

inline Vector joined(HalfVector low, HalfVector high) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    Vector x;
    for (int i = 0; i < HALF; i++) x[i] = low[i], x[HALF + i] = high[i];
    return x;
#endif
}

// The noise of a vector of tokens, of which `ids` gives the first `n`; null: they follow `first`.
inline Vector gumbel(uint64_t state, const int64_t* ids, int first, int n) {
    HalfVector low = random_bits(state, ids, first, n), high = random_bits(state, ids, first + HALF, n - HALF);
    Vector uniform = joined(low, high);
    const Vector least = all(0x1p-60f), most = all(1 - 0x1p-24f);
    uniform = uniform * all(0x1p-53f);
    uniform = uniform < least ? least : (uniform > most ? most : uniform);
    // -log1p(-u): the rounding of 1 - u is undone by the quotient (Kahan)
    Vector rest = 1.0f - uniform, change = 1.0f - rest;
    Vector exponential = change == 0.0f ? uniform : -logarithm(rest) * (uniform / (change == 0.0f ? all(1.0f) : change));
    return -logarithm(exponential);
}

// Rows of logits, and whose noise they get.
struct Scoring {
    const float* logits;       // [rows, vocab], `stride` floats apart
    const int64_t* keys;       // [rows]
    const int64_t* positions;  // [rows]
    const float* temperature;  // [rows], 0: no noise; null: for no row
    const int64_t* ids;        // [vocab], the tokens whose noise the columns get; null: 0, 1, ...
    int64_t stride;
    int32_t rows, vocab;

    bool is_drawn(int row) const { return temperature && temperature[row] > 0; }

    bool has_noise_of(int row, int other) const {
        return is_drawn(row) && is_drawn(other) && keys[row] == keys[other] && positions[row] == positions[other];
    }

    double nanoseconds() const { return rows * (double)vocab * (temperature ? 1.5 : 0.2); }
};

inline void fill_noise(const Scoring& s, int row, float* noise) {
    uint64_t state = mix((uint64_t)s.keys[row] ^ mix((uint64_t)s.positions[row] * GAMMA));
    for (int i = 0; i < s.vocab; i += LANES) {
        int n = std::min(LANES, s.vocab - i);
        store_some(noise + i, gumbel(state, s.ids, i, n), n);
    }
}

// Calls `work(row, score)` for every row; `score(i, n)` gives its scores i to i + n - 1. Rows with the same noise that follow
// each other share it.
template <class Work> void for_scored_rows(Session& session, const Scoring& s, const Work& work) {
    std::vector<int>& starts = session.starts;
    starts.clear();
    for (int row = 0; row < s.rows; row++)
        if (!row || !s.has_noise_of(row, row - 1)) starts.push_back(row);
    starts.push_back(s.rows);
    session.team.run((int)starts.size() - 1, s.nanoseconds(), [&](int tile, int thread) {
        int first = starts[tile];
        float* noise = nullptr;
        if (s.is_drawn(first)) fill_noise(s, first, noise = Session::room(session.noise[thread], s.vocab));
        for (int row = first; row < starts[tile + 1]; row++) {
            const float* from = s.logits + row * s.stride;
            Vector heat = all(noise ? s.temperature[row] : 1.0f);
            work(row, thread, [&](int i, int n) {
                Vector x = load_some(from + i, n);
                return noise ? x / heat + load_some(noise + i, n) : x;
            });
        }
    });
}

inline bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found;
#endif
}

// The first of the highest scores of each row. NaN is the highest.
void draw(Session& session, const Scoring& s, int64_t* tokens, float* scores) {
    for_scored_rows(session, s, [&](int row, int, const auto& score) {
        float best = -INFINITY;
        int64_t token = 0;
        for (int i = 0; i < s.vocab && best == best; i += LANES) {
            int n = std::min(LANES, s.vocab - i);
            Vector x = score(i, n);
            if (!any(~(x <= best))) continue;
            for (int lane = 0; lane < n && best == best; lane++)
                if (!(x[lane] <= best)) best = x[lane], token = i + lane;
        }
        tokens[row] = token;
        scores[row] = best;
    });
}

// The k best tokens of each row and the logarithms of their chances after a softmax. Ties go to the lower token, NaN ranks
// last and makes all logarithms NaN.
void best_tokens(Session& session, const Scoring& s, int k, float* logp, int64_t* tokens) {
    for_scored_rows(session, s, [&](int row, int thread, const auto& score) {
        float *values = logp + (int64_t)row * k, *scores = Session::room(session.scores[thread], s.vocab);
        int64_t* found = tokens + (int64_t)row * k;
        int count = 0;
        for (int i = 0; i < s.vocab; i += LANES) {
            int n = std::min(LANES, s.vocab - i);
            Vector x = score(i, n);
            store_some(scores + i, x, n);
            if (count == k && !any(x > values[k - 1])) continue;
            for (int lane = 0; lane < n; lane++) {
                if (count == k ? !(x[lane] > values[k - 1]) : x[lane] != x[lane]) continue;
                int place = count < k ? count++ : k - 1;
                for (; place > 0 && values[place - 1] < x[lane]; place--)
                    values[place] = values[place - 1], found[place] = found[place - 1];
                values[place] = x[lane], found[place] = i + lane;
            }
        }
        for (int64_t token = 0; count < k; token++)  // rows with NaN
            if (std::find(found, found + count, token) == found + count) values[count] = NAN, found[count++] = token;
        Vector total{};
        for (int i = 0; i < s.vocab; i += LANES) {
            int n = std::min(LANES, s.vocab - i);
            Vector x = load_some(scores + i, n);
            if (n < LANES)
                for (int lane = n; lane < LANES; lane++) x[lane] = -INFINITY;
            total += exponential(x - values[0]);
        }
        float whole = values[0] + std::log(sum(total));
        for (int i = 0; i < k; i++) values[i] -= whole;
    });
}

}  // namespace
