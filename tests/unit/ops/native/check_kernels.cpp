// The kernels against plain loops, as a program: for processors that only an emulator has here. Inputs are whole numbers
// and scales powers of two, so that every sum is exact, and equal in any order. Prints what differs, and returns how often.
#include <cstdio>
#include <random>

#include "kernels.cpp"

static int failures = 0;
static std::mt19937 chance_source(7);

static int whole(int least, int most) { return least + (int)(chance_source() % (uint32_t)(most - least + 1)); }

static void check(bool right, const char* what, int a = 0, int b = 0, int c = 0) {
    if (!right) failures++, printf("%s differs (%d, %d, %d)\n", what, a, b, c);
}

static uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 16;  // exact for what is tested
}

static void check_vectors() {
    for (uint32_t half = 0; half < 65536; half++) {
        uint16_t halves[LANES];
        std::fill(halves, halves + LANES, half);
        const int exponent = half >> 10 & 31, mantissa = half & 1023;
        if (exponent == 31) continue;
        const float magnitude = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
        check(load_f16(halves)[LANES - 1] == (half >> 15 ? -magnitude : magnitude), "load_f16", half);
    }
    std::uniform_real_distribution<float> numbers(-2, 2);
    for (int i = 0; i < 10000; i++) {
        const float a = numbers(chance_source), b = numbers(chance_source), c = numbers(chance_source);
        const float found = fma(all(a), all(b), all(c))[0];
        check(found == std::fma(a, b, c), "fma", i);
        check(std::fabs(exponential(all(20 * a))[0] / std::exp((double)(20 * a)) - 1) < 3e-7, "exponential", i);
        const uint32_t words = chance_source(), input = chance_source();
        int sum = i;
        for (int k = 0; k < 32; k += 8) sum += (int)(uint8_t)(words >> k) * (int8_t)(input >> k);
        check(dot_bytes(Ints{} + i, input, Words{} + words)[0] == sum, "dot_bytes", i);
    }
}

static void check_product(Session& session, int kind, int in, int out, int rows) {
    static const float fours[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const int group = 32, groups = (in + group - 1) / group, padded = (out + 15) / 16 * 16;
    std::vector<float> scales((size_t)groups * padded), bias(out), dense((size_t)out * in), x((size_t)rows * in), y((size_t)rows * out);
    std::vector<uint8_t> zeros((size_t)groups * padded), bytes((size_t)out * in);
    std::vector<uint16_t> halves((size_t)out * in);
    for (float& scale : scales) scale = std::ldexp(1.0f, whole(-2, 2));
    for (uint8_t& zero : zeros) zero = kind == MXFP4 ? whole(125, 129) : whole(0, 15);
    for (float& b : bias) b = whole(-9, 9);
    for (float& number : x) number = whole(-127, 127);
    for (int r = 0; r < rows; r++) x[(size_t)r * in + whole(0, in - 1)] = 127;  // so that rounding to 8 bits is exact
    for (int n = 0; n < out; n++)
        for (int k = 0; k < in; k++) {
            const size_t i = (size_t)n * in + k, g = (size_t)(k / group) * padded + n;
            bytes[i] = kind == INT8 ? whole(1, 255) : whole(0, 15);
            if (kind == INT8) dense[i] = scales[n] * (bytes[i] - 128);
            else if (kind == INT4) dense[i] = scales[g] * (bytes[i] - zeros[g]);
            else if (kind == MXFP4) dense[i] = std::ldexp(fours[bytes[i]], zeros[g] - 127);
            else dense[i] = whole(-64, 64);
            halves[i] = bf16_of(dense[i]);
        }
    Packed w{nullptr, bias.data(), scales.data(), zeros.data(), kind, in, out, group, nullptr, nullptr};
    std::vector<uint32_t> data(packed_bytes(w) / 4 + 16);
    void* to = (void*)(((uintptr_t)data.data() + 63) & ~(uintptr_t)63);
    w.data = to;
    const void* weight = kind == FLOAT32 ? (void*)dense.data() : kind <= BFLOAT16 ? (void*)halves.data() : (void*)bytes.data();
    eagle_pack(&session, &w, weight, to);
    eagle_linear(&session, &w, x.data(), rows, y.data());
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < out; n++) {
            float sum = bias[n];
            for (int k = 0; k < in; k++) sum += x[(size_t)r * in + k] * dense[(size_t)n * in + k];
            check(y[(size_t)r * out + n] == sum, "a product", kind, r, n);
        }
    // Any numbers: a row alone, by one thread, has the bits that it has among others.
    std::normal_distribution<float> normal;
    for (float& number : x) number = normal(chance_source);
    eagle_linear(&session, &w, x.data(), rows, y.data());
    Session single(1);
    std::vector<float> alone(out);
    for (int r = 0; r < rows; r++) {
        eagle_linear(&single, &w, x.data() + (size_t)r * in, 1, alone.data());
        check(!memcmp(alone.data(), y.data() + (size_t)r * out, 4 * out), "a row alone", kind, r);
    }
}

// Two requests, one with several rows, over slots in reverse order. `length`: of the longer one.
static void check_attention(Session& session, int dim, int length) {
    const int heads = 4, kv_heads = 2, width = length + 7, slots = 2 * width, rows = 4;
    const int64_t positions[] = {length - 3, length - 2, length - 1, 4}, pool_rows[] = {1, 0}, lengths[] = {length, 5};
    const int32_t indptr[] = {0, 3, 4};
    std::vector<int32_t> table(2 * width);
    for (int i = 0; i < 2 * width; i++) table[i] = slots - 1 - i;
    int64_t places[rows];
    for (int r = 0; r < rows; r++) places[r] = table[pool_rows[r < 3 ? 0 : 1] * width + positions[r]];
    std::normal_distribution<float> normal;
    auto filled = [&](size_t size) {
        std::vector<float> numbers(size);
        for (float& number : numbers) number = normal(chance_source);
        return numbers;
    };
    auto keys = filled((size_t)kv_heads * slots * dim), values = filled(keys.size()), q = filled((size_t)rows * heads * dim);
    std::vector<float> out(q.size());
    const Batch batch{rows, 2, positions, places, indptr, pool_rows, lengths, table.data(), nullptr, nullptr, nullptr, 0, 0, 0, width};
    const Cache cache{keys.data(), values.data(), 0, heads, kv_heads, dim, 0.25f, 0, 0, slots, nullptr};
    eagle_attention(&session, &batch, &cache, q.data(), nullptr, nullptr, out.data());
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++) {
            std::vector<double> mixed(dim);
            double total = 0;
            for (int column = 0; column <= positions[r]; column++) {
                const int64_t from = ((int64_t)(h / 2) * slots + table[pool_rows[r < 3 ? 0 : 1] * width + column]) * dim;
                double score = 0;
                for (int d = 0; d < dim; d++) score += (double)q[(r * heads + h) * dim + d] * keys[from + d];
                const double chance = std::exp(score * 0.25);
                total += chance;
                for (int d = 0; d < dim; d++) mixed[d] += chance * values[from + d];
            }
            for (int d = 0; d < dim; d++) check(std::fabs(out[(r * heads + h) * dim + d] - mixed[d] / total) < 1e-5, "attention", r, h, d);
        }
}

int main() {
    check_vectors();
    Session session(2);
    for (int kind : {FLOAT32, HALVED, BFLOAT16, INT8, INT4, MXFP4})
        for (int rows : {1, 2, 5, 9}) check_product(session, kind, 96, 37, rows), check_product(session, kind, 160, 300, rows);
    for (int dim : {6, 16, 64, 80})
        for (int length : {13, 129, 1500}) check_attention(session, dim, length);
    printf("%d differences with vectors of %d\n", failures, LANES);
    return failures > 0;
}
