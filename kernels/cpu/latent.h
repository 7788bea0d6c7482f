// Multi-head latent attention: all heads attend to one compressed key, whose first numbers are the value. The reference is
// eagle_server/models/mla.py.
#pragma once

#include "layer.h"

namespace {

// Rotates the pairs (2 i, 2 i + 1) of the first `dim` dimensions of one head, in place.
void rotate_interleaved(float* x, const float* cos, const float* sin, int dim) {
    for (int i = 0; i < dim / 2; i++) {
        const float even = x[2 * i], odd = x[2 * i + 1], c = cos[i], s = sin[dim / 2 + i];
        x[2 * i] = even * c - odd * s, x[2 * i + 1] = odd * c + even * s;
    }
}

void rotate_in_place(const Latent& m, float* x, const float* cos, const float* sin, int dim) {
    if (m.interleaved) return rotate_interleaved(x, cos, sin, dim);
    alignas(64) float turned[LARGEST_HEAD];
    rotate(x, cos, sin, dim, turned);
    memcpy(x, turned, 4 * dim);
}

void norm_and_scale(float* x, const float* norm, float eps, int size, float scale, float* to) {
    rms_norm(x, norm, eps, size, to);
    for (int i = 0; i < size && scale != 1.0f; i++) to[i] *= scale;
}

// The products of each head's outputs of `w` with its own rows, x [heads][rows][w.in]: `size` of them, from to(row, head) on. `w` has more,
// so that each head begins with a vector.
template <class To> void by_head(Session& s, const Packed& w, const float* x, int rows, int heads, int size, const To& to) {
    const int vectors = w.out / heads / LANES, chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
    const uint32_t* inputs = prepared(s, w, x, heads * rows);
    const int64_t stride = input_stride(w);
    s.team.run(heads * chunks, nanoseconds(w, rows), [&](int tile, int) {
        const int head = tile / chunks, chunk = tile % chunks;
        auto where = [&](int row, int vector) { return to(row, head) + (vector - head * vectors) * LANES; };
        auto put = [&](float* place, int vector, Vector sum) {
            const int left = size - (vector - head * vectors) * LANES;
            if (left > 0) store_some(place, sum, std::min(left, LANES));
        };
        linear_columns(w, inputs + head * rows * stride, rows * chunk / chunks, rows * (chunk + 1) / chunks, head * vectors, vectors, where, put);
    });
}

// See `attend_layer`.
float* attend_latent(Session& s, const Decoder& d, const Layer& l, const Batch& batch, const float* x, bool kv_only) {
    const Latent& m = l.latent;
    const int rows = batch.rows, heads = l.cache.heads, dim = l.cache.head_dim, rotary = l.rotary, rank = dim - rotary;
    const int width = l.qkv.out, narrow = width - dim;  // of a compressed query; 0: queries are made of x
    const int inputs = m.absorb.in, each = inputs + rotary, values = l.o.in / heads;
    float* down = Session::room(s.qkv, (int64_t)rows * width);
    float* compressed = Session::room(s.routed, (int64_t)rows * narrow);
    auto cos = [&](int r) { return l.cos + batch.positions[r] * rotary; };
    auto sin = [&](int r) { return l.sin + batch.positions[r] * rotary; };
    product(s, l.qkv, x, rows, down);
    for_rows(s.team, rows, 3 * width, [&](int r) {
        float *query = down + (int64_t)r * width, *latent = query + narrow;
        if (narrow && !kv_only) norm_and_scale(query, l.q_norm, m.eps, narrow, m.q_scale, compressed + (int64_t)r * narrow);
        norm_and_scale(latent, l.k_norm, m.eps, rank, m.kv_scale, latent);
        rotate_in_place(m, latent + rank, cos(r), sin(r), rotary);
        write_row(batch, l.cache, r, latent, latent);
    });
    if (kv_only) return nullptr;
    float* queries = Session::room(s.both, (int64_t)rows * heads * each);
    product(s, m.queries, narrow ? compressed : x, rows, queries);
    float* q = Session::room(s.q, (int64_t)rows * heads * dim);
    float* own = Session::room(s.v, (int64_t)rows * heads * std::max(inputs, rank));  // [heads][rows][..]
    for_rows(s.team, rows, 2 * heads * each, [&](int r) {
        for (int h = 0; h < heads; h++) {
            const float* from = queries + ((int64_t)r * heads + h) * each;
            float* turned = q + ((int64_t)r * heads + h) * dim + rank;
            memcpy(own + ((int64_t)h * rows + r) * inputs, from, 4 * inputs);
            memcpy(turned, from + inputs, 4 * rotary);
            rotate_in_place(m, turned, cos(r), sin(r), rotary);
        }
    });
    by_head(s, m.absorb, own, rows, heads, rank, [&](int r, int h) { return q + ((int64_t)r * heads + h) * dim; });
    float* attended = Session::room(s.activated, (int64_t)rows * heads * dim);
    s.attend(batch, l.cache, q, attended);
    for_rows(s.team, rows, heads * rank, [&](int r) {
        for (int h = 0; h < heads; h++) memcpy(own + ((int64_t)h * rows + r) * rank, attended + ((int64_t)r * heads + h) * dim, 4 * rank);
    });
    float* mixed = Session::room(s.mixed, (int64_t)rows * l.o.in);
    by_head(s, m.values, own, rows, heads, values, [&](int r, int h) { return mixed + (int64_t)r * l.o.in + h * values; });
    return mixed;
}

}  // namespace
