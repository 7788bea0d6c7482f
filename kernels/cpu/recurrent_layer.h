// A recurrent layer of each rule, from its products to the input of the last one.
//
// rule          a row of qkv                      a row of gates  the state's output o becomes
// delta         q, k, v, z                        b, a            norm(o) * silu(z), by head
// kda           q, k, v, b, low f, low g          a, made of f    norm(o) * sigmoid(g), by head; g is made of low g
// ssd           z, values, keys, queries, steps   none            norm(o * silu(z)), by group of heads
// convolution   before, after, inputs             none            after * o, whose inputs are before * inputs
//
// The references are eagle_server/models/gated_delta.py, kimi_delta.py, mamba2.py and short_convolution.py.
#pragma once

#include "layer.h"

namespace {

// Where q, k, v (parts 0 to 2), z (3), b (4) and a (5) of a head begin in a row of the delta rule's products; q, k by key head.
int delta_part(const Layer& l, int part, int h) {
    const Recurrent& r = *l.recurrent;
    const int heads = r.value_heads, keys = r.key_heads, shared = heads / keys, kd = r.key_dim, vd = r.value_dim;
    const int values = heads * vd, group = h / shared, place = h % shared;
    if (!l.by_key_head) return part < 2 ? (part * keys + h) * kd : part < 4 ? 2 * keys * kd + (part - 2) * values + h * vd : (part - 4) * heads + h;
    if (part < 2) return h * (2 * kd + 2 * shared * vd) + part * kd;
    if (part < 4) return group * (2 * kd + 2 * shared * vd) + 2 * kd + (part - 2) * shared * vd + place * vd;
    return group * 2 * shared + (part - 4) * shared + place;
}

// A row of the products: what the convolution reads [channels], and the raw gates [gates].
void split_row(const Layer& l, const float* from, const float* raw, float* inputs, float* gates) {
    const Recurrent& r = *l.recurrent;
    const int heads = r.value_heads, keys = r.key_heads, kd = r.key_dim, vd = r.value_dim, values = heads * vd;
    if (r.rule == CONVOLUTION) {
        for (int i = 0; i < values; i += LANES) {
            const int n = std::min(LANES, values - i);
            store_some(inputs + i, load_some(from + i, n) * load_some(from + 2 * values + i, n), n);
        }
    } else if (r.rule == SSD) {
        memcpy(inputs, from + values, sizeof(float) * r.channels());
        memcpy(gates, from + values + r.channels(), sizeof(float) * heads);
    } else if (r.rule == KDA) {
        memcpy(inputs, from, sizeof(float) * r.channels());
        memcpy(gates, from + r.channels(), sizeof(float) * heads);
        memcpy(gates + heads, raw, sizeof(float) * r.decay_count());
    } else {
        for (int h = 0; h < keys; h++)
            for (int part = 0; part < 2; part++) memcpy(inputs + (part * keys + h) * kd, from + delta_part(l, part, h), 4 * kd);
        for (int h = 0; h < heads; h++) {
            memcpy(inputs + 2 * keys * kd + h * vd, from + delta_part(l, 2, h), 4 * vd);
            gates[h] = raw[delta_part(l, 4, h)], gates[heads + h] = raw[delta_part(l, 5, h)];
        }
    }
    if (r.is_bf16) round_bf16(inputs, r.channels());
}

enum Factor { AS_IT_IS, SILU, LOGISTIC };

// to[i] *= gate[i], or what `factor` makes of it.
void multiply(const float* gate, int size, Factor factor, float* to) {
    for (int i = 0; i < size; i += LANES) {
        const int n = std::min(LANES, size - i);
        const Vector raw = load_some(gate + i, n), old = load_some(to + i, n);
        store_some(to + i, factor == LOGISTIC ? old / (1.0f + exponential(-raw)) : old * (factor == SILU ? silu(raw) : raw), n);
    }
}

// A row of outputs [value_heads * value_dim], gated by parts of its row of the products, of kda by its gates, and normed, in place.
void gate_outputs(const Layer& l, float eps, const float* from, float* to) {
    const Recurrent& r = *l.recurrent;
    const int values = r.value_heads * r.value_dim;
    if (r.rule == CONVOLUTION) return multiply(from + values, values, AS_IT_IS, to);
    if (r.rule == SSD) {
        const int size = values / r.key_heads;
        multiply(from, values, SILU, to);
        for (int i = 0; i < values; i += size) rms_norm(to + i, l.state_norm + i, eps, size, to + i);
        return;
    }
    for (int h = 0; h < r.value_heads; h++) {
        float* head = to + h * r.value_dim;
        rms_norm(head, l.state_norm, eps, r.value_dim, head);
        if (r.rule == KDA) multiply(from + h * r.value_dim, r.value_dim, LOGISTIC, head);
        else multiply(from + delta_part(l, 3, h), r.value_dim, SILU, head);
    }
}

// x [rows, qkv.in] -> mixed [rows, o.in], what a recurrent layer makes of it before its last product.
float* recur_layer(Session& s, const Decoder& d, const Layer& l, int rows, const float* x) {
    const Recurrent& r = *l.recurrent;
    const int values = r.value_heads * r.value_dim;
    const int64_t channels = r.channels(), width = l.qkv.out, raw_width = l.gates.data ? l.gates.out : 0;
    float *projected = Session::room(s.both, rows * width), *raw = Session::room(s.q, rows * raw_width);
    float *inputs = Session::room(s.v, rows * channels), *gates = Session::room(s.gates, (int64_t)rows * r.gates());
    product(s, l.qkv, x, rows, projected);
    const bool is_kda = r.rule == KDA;
    // Low f (0) or low g (1) of all rows.
    auto low = [&](int part) {
        float* to = Session::room(s.routed, (int64_t)rows * r.key_dim);
        for (int row = 0; row < rows; row++)
            memcpy(to + (int64_t)row * r.key_dim, projected + row * width + channels + r.value_heads + part * r.key_dim, 4 * r.key_dim);
        return to;
    };
    if (raw_width) product(s, l.gates, is_kda ? low(0) : x, rows, raw);
    for_rows(s.team, rows, (int)width, [&](int row) {
        split_row(l, projected + row * width, raw + row * raw_width, inputs + row * channels, gates + (int64_t)row * r.gates());
    });
    float* mixed = Session::room(s.mixed, (int64_t)rows * values);
    recur(s, r, d.sequences, d.groups, inputs, gates, mixed);
    float* own = is_kda ? Session::room(s.activated, (int64_t)rows * values) : projected;
    if (is_kda) product(s, l.state_gate, low(1), rows, own);
    for_rows(s.team, rows, 4 * values, [&](int row) { gate_outputs(l, d.eps, own + row * (is_kda ? values : width), mixed + (int64_t)row * values); });
    return mixed;
}

}  // namespace
