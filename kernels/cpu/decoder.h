// Forwards of Llama-like decoders. The reference is eagle_server/models/layers.py.
#pragma once

#include "session.h"

namespace {

struct Layer {
    Packed qkv, o, gate_up, down;
    const float* input_norm;  // null: the input is normed already, and the residual stream is given
    const float* post_norm;
    const float* q_norm;  // null: none
    const float* k_norm;
    Cache cache;
};

struct Decoder {
    const Layer* layers;
    const float* norm;  // null: none
    const float* cos;   // [context, head_dim], both; the first half of the sine is negated
    const float* sin;
    const int32_t* aux_boundaries;
    int32_t count, hidden, boundaries, context;
    float eps;
};

void rms_norm(const float* x, const float* weight, float eps, int size, float* to) {
    Vector squares{};
    int whole = size / LANES * LANES, left = size - whole;
    for (int i = 0; i < whole; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    if (left) {
        Vector rest = load_some(x + whole, left);
        squares = fma(rest, rest, squares);
    }
    Vector factor = all(1.0f / std::sqrt(sum(squares) / size + eps));
    for (int i = 0; i < whole; i += LANES) store(to + i, load(x + i) * factor * load(weight + i));
    if (left) store_some(to + whole, load_some(x + whole, left) * factor * load_some(weight + whole, left), left);
}

// Rotates the pairs (i, i + dim / 2) of one head.
void rotate(const float* x, const float* cos, const float* sin, int dim, float* to) {
    alignas(64) float twice[LARGEST_HEAD * 3 / 2];  // x, and its first half again
    memcpy(twice, x, 4 * dim);
    memcpy(twice + dim, x, 2 * dim);
    for (int i = 0; i < dim; i += LANES) {
        int n = std::min(LANES, dim - i);
        Vector other = load_some(twice + i + dim / 2, n);
        store_some(to + i, fma(other, load_some(sin + i, n), load_some(x + i, n) * load_some(cos + i, n)), n);
    }
}

void silu_mul(const float* gate_up, int size, float* to) {
    for (int i = 0; i < size; i += LANES) {
        int n = std::min(LANES, size - i);
        store_some(to + i, silu(load_some(gate_up + i, n)) * load_some(gate_up + size + i, n), n);
    }
}

constexpr int ROW_TILE = 8;

// `size`: floats of a row.
template <class Work> void for_rows(Team& team, int rows, int size, const Work& work) {
    team.run((rows + ROW_TILE - 1) / ROW_TILE, 0.3 * rows * size, [&](int tile, int) {
        for (int row = tile * ROW_TILE; row < std::min(rows, (tile + 1) * ROW_TILE); row++) work(row);
    });
}

const uint32_t* prepared(Session& s, const Packed& w, const float* x, int rows) {
    int64_t stride = input_stride(w);
    if (is_prepared(w)) return (const uint32_t*)x;
    uint32_t* to = Session::room(s.input, rows * stride);
    for_rows(s.team, rows, w.in, [&](int row) { prepare_row(w, x + (int64_t)row * w.in, to + row * stride); });
    return to;
}

void product(Session& s, const Packed& w, const float* x, int rows, float* y, bool add = false, int start = 0) {
    linear(s.team, w, prepared(s, w, x, rows), rows, y, add, start);
}

// `kv_only`: keys and values are written, and no output is computed.
void layer_forward(Session& s, const Decoder& d, const Layer& l, const Batch& batch, const float* x, float* stream, bool kv_only) {
    const int rows = batch.rows, hidden = d.hidden, dim = l.cache.head_dim, heads = l.cache.heads, kv = l.cache.kv_heads;
    const int64_t width = (int64_t)(heads + 2 * kv) * dim;
    float* normed = Session::room(s.normed, (int64_t)rows * std::max(hidden, l.qkv.in));
    if (l.input_norm) {
        for_rows(s.team, rows, hidden, [&](int r) {
            rms_norm(stream + (int64_t)r * hidden, l.input_norm, d.eps, hidden, normed + (int64_t)r * hidden);
        });
        x = normed;
    }
    float* qkv = Session::room(s.qkv, rows * width);
    product(s, l.qkv, x, rows, qkv, false, kv_only ? heads * dim / LANES : 0);
    float* q = Session::room(s.q, (int64_t)rows * heads * dim);
    for_rows(s.team, rows, 2 * (int)width, [&](int r) {
        float *from = qkv + r * width, *keys = from + heads * dim;
        const float *cos = d.cos + batch.positions[r] * dim, *sin = d.sin + batch.positions[r] * dim;
        alignas(64) float turned[LARGEST_HEAD];
        for (int h = kv_only ? heads : 0; h < heads + kv; h++) {
            float* head = from + h * dim;
            const float* norm = h < heads ? l.q_norm : l.k_norm;
            if (norm) rms_norm(head, norm, d.eps, dim, head);
            rotate(head, cos, sin, dim, turned);
            memcpy(h < heads ? q + ((int64_t)r * heads + h) * dim : head, turned, 4 * dim);
        }
        write_row(batch, l.cache, r, keys, keys + kv * dim);
    });
    if (kv_only) return;
    float* mixed = Session::room(s.mixed, (int64_t)rows * std::max(l.o.in, l.down.in));
    s.attend(batch, l.cache, q, mixed);
    product(s, l.o, mixed, rows, stream, true);
    for_rows(s.team, rows, hidden, [&](int r) {
        rms_norm(stream + (int64_t)r * hidden, l.post_norm, d.eps, hidden, normed + (int64_t)r * hidden);
    });
    const int inner = l.down.in;
    if (inner % LANES == 0) {
        gated(s.team, l.gate_up, prepared(s, l.gate_up, normed, rows), rows, mixed);
    } else {
        float* both = Session::room(s.qkv, (int64_t)rows * 2 * inner);
        product(s, l.gate_up, normed, rows, both);
        for_rows(s.team, rows, 8 * inner, [&](int r) { silu_mul(both + (int64_t)r * 2 * inner, inner, mixed + (int64_t)r * inner); });
    }
    product(s, l.down, mixed, rows, stream, true);
}

// Whether all positions and slots exist.
bool is_inside(const Decoder& d, const Batch& batch) {
    for (int r = 0; r < batch.rows; r++) {
        bool found = batch.positions[r] >= 0 && batch.positions[r] < d.context;
        if (!found || batch.out_cache_loc[r] < 0 || batch.out_cache_loc[r] >= d.layers->cache.slots) return false;
    }
    return true;
}

// About how long one thread takes.
double decode_nanoseconds(const Decoder& d, const Batch& batch) {
    double expected = 0;
    for (const Layer* l = d.layers; l < d.layers + d.count; l++) {
        for (const Packed* w : {&l->qkv, &l->o, &l->gate_up, &l->down}) expected += nanoseconds(*w, batch.rows);
        expected += attention_nanoseconds(batch, l->cache);
    }
    return expected;
}

// x: [rows, hidden], or the normed input of the first layer if it has no input norm. stream [rows, hidden]: the residual
// stream before the first layer, then after the last. hidden: its norm. aux [rows, boundaries * hidden]. `kv_only`: of the
// last layer, so that there is no output.
void decode(
    Session& s, const Decoder& d, const Batch& batch, const float* x, float* stream, float* hidden, float* aux,
    bool kv_only = false) {
    const int64_t size = d.hidden, rows = batch.rows;
    for (int i = 0; i <= d.count; i++) {
        for (int b = 0; b < d.boundaries; b++)
            if (d.aux_boundaries[b] == i)
                for (int64_t r = 0; r < rows; r++)
                    memcpy(aux + (r * d.boundaries + b) * size, stream + r * size, 4 * size);
        if (i < d.count) layer_forward(s, d, d.layers[i], batch, x, stream, kv_only && i == d.count - 1);
    }
    if (!d.norm || kv_only) return;
    for_rows(s.team, rows, size, [&](int r) { rms_norm(stream + r * size, d.norm, d.eps, size, hidden + r * size); });
}

}  // namespace
