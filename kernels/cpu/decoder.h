// Forwards of Llama-like decoders. The reference is eagle_server/models/layers.py.
#pragma once

#include "experts.h"
#include "recurrent.h"

namespace {

struct Layer {
    Packed qkv, o;         // qkv may lack values, which are the keys then, or both: another layer writes the cache
    Packed gates;          // of a recurrent layer, b and a; of attention, one number per head; data null: none
    Packed gate_up, down;  // of an MLP, or of shared experts; data null: none
    Experts experts;       // added to it; data null: none
    Packed tail_gate, tail_projection;  // data null: none
    const float* input_norm;  // null: the input is normed already, and the residual stream is given
    const float* post_norm;
    const float* q_norm;  // null: none
    const float* k_norm;
    const float* attention_norm;  // of what attention and MLP add to the stream; null: none
    const float* mlp_norm;
    const float* v_norm;
    const float* tail_norm;
    const float* state_norm;   // of a recurrent layer, [value_dim]
    const float* shared_gate;  // [hidden], of shared experts; null: none
    const float* router_norm;  // Gemma 4: router and experts read the stream, each through a norm, and MLP and experts are
    const float* experts_norm;      // normed before they are added; null: experts read what the MLP reads
    const float* dense_out_norm;
    const float* experts_out_norm;
    const float* cos;  // [context, rotary], both; the first half of the sine is negated
    const float* sin;
    int32_t rotary;  // dimensions of a head that are rotated, its first
    int32_t activation;
    int32_t gated;        // whether attention has a gate: then a head's query in qkv is followed by its gate
    int32_t by_key_head;  // whether qkv and gates have the outputs of one key head after the other
    float factor;  // of the stream after the layer
    float limit;   // of the MLP, see gate_mul; 0: none
    Cache cache;
    const Recurrent* recurrent;  // whose qkv has z behind q, k and v; null: the layer attends
};

struct Decoder {
    const Layer* layers;
    const float* norm;  // null: none
    const int32_t* aux_boundaries;
    const float* layer_inputs;  // [rows, count, layer_input_size], of the layers' tails
    const Sequences* sequences;  // of recurrent layers, whose rows are in these groups, one after the other
    int32_t count, hidden, boundaries, context, layer_input_size, groups;
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

// Rotates the pairs (i, i + dim / 2) of the first `dim` dimensions of one head.
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

// Lets `add(to)` add to the stream; `norm`: what it adds is normed before.
template <class Add> void add_normed(Session& s, const Decoder& d, int rows, const float* norm, float* stream, const Add& add) {
    if (!norm) return add(stream);
    const int size = d.hidden;
    float* y = Session::room(s.added, (int64_t)rows * size);
    memset(y, 0, (size_t)4 * rows * size);
    add(y);
    for_rows(s.team, rows, 2 * size, [&](int r) {
        float *from = y + (int64_t)r * size, *to = stream + (int64_t)r * size;
        rms_norm(from, norm, d.eps, size, from);
        for (int i = 0; i < size; i += LANES) {
            int n = std::min(LANES, size - i);
            store_some(to + i, load_some(to + i, n) + load_some(from + i, n), n);
        }
    });
}

// Adds to y [rows, hidden] what the MLP makes of x [rows, hidden].
void add_mlp(Session& s, const Layer& l, const float* x, int rows, float* y) {
    const int inner = l.down.in;
    float* mixed = Session::room(s.mixed, (int64_t)rows * inner);
    if (inner % LANES == 0 && l.limit <= 0) {
        gated(s.team, l.gate_up, prepared(s, l.gate_up, x, rows), rows, mixed, l.activation);
    } else {
        float* both = Session::room(s.qkv, (int64_t)rows * 2 * inner);
        product(s, l.gate_up, x, rows, both);
        for_rows(s.team, rows, 8 * inner, [&](int r) { gate_mul(both + (int64_t)r * 2 * inner, inner, l.activation, mixed + (int64_t)r * inner, l.limit); });
    }
    if (l.shared_gate)
        for_rows(s.team, rows, 2 * inner, [&](int r) {
            float* row = mixed + (int64_t)r * inner;
            const Vector factor = all(1.0f / (1.0f + std::exp(-dot(x + (int64_t)r * l.gate_up.in, l.shared_gate, l.gate_up.in))));
            for (int i = 0; i < inner; i += LANES) {
                const int n = std::min(LANES, inner - i);
                store_some(row + i, load_some(row + i, n) * factor, n);
            }
        });
    product(s, l.down, mixed, rows, y, true);
}

// y [rows, hidden], what the MLP makes: its norm, and that of what the experts make of the stream.
void add_normed_experts(Session& s, const Decoder& d, const Layer& l, const float* stream, int rows, float* y) {
    const int64_t size = d.hidden, count = rows * size;
    float* read = Session::room(s.normed, count);
    float* routed = Session::room(s.routed, count);
    float* made = Session::room(s.experts, count);
    memset(made, 0, 4 * count);
    for_rows(s.team, rows, 3 * (int)size, [&](int r) {
        rms_norm(y + r * size, l.dense_out_norm, d.eps, (int)size, y + r * size);
        rms_norm(stream + r * size, l.router_norm, d.eps, (int)size, routed + r * size);
        rms_norm(stream + r * size, l.experts_norm, d.eps, (int)size, read + r * size);
    });
    add_experts(s, l.experts, read, routed, rows, made);
    for_rows(s.team, rows, 2 * (int)size, [&](int r) {
        float *from = made + r * size, *to = y + r * size;
        rms_norm(from, l.experts_out_norm, d.eps, (int)size, from);
        for (int i = 0; i < size; i += LANES) {
            int n = std::min(LANES, (int)size - i);
            store_some(to + i, load_some(to + i, n) + load_some(from + i, n), n);
        }
    });
}

// x [rows, qkv.in] -> mixed [rows, o.in], what a recurrent layer makes of it before its last product.
float* recur_layer(Session& s, const Decoder& d, const Layer& l, int rows, const float* x) {
    const Recurrent& r = *l.recurrent;
    const int heads = r.value_heads, keys = r.key_heads, shared = heads / keys, values = heads * r.value_dim;
    const int64_t channels = r.channels(), width = l.qkv.out;
    float *projected = Session::room(s.both, rows * width), *raw = Session::room(s.q, (int64_t)rows * 2 * heads);
    float *inputs = Session::room(s.v, rows * channels), *gates = Session::room(s.gates, (int64_t)rows * 2 * heads);
    product(s, l.qkv, x, rows, projected);
    product(s, l.gates, x, rows, raw);
    // Where q, k, v (parts 0 to 2), z (3), b (4) and a (5) of a head are in its row of the products; q, k by key head.
    const int kd = r.key_dim, vd = r.value_dim;
    const auto begin = [&](int part, int h) {
        const int group = h / shared, place = h % shared;
        if (!l.by_key_head) return part < 2 ? (part * keys + h) * kd : part < 4 ? 2 * keys * kd + (part - 2) * values + h * vd : (part - 4) * heads + h;
        if (part < 2) return h * (2 * kd + 2 * shared * vd) + part * kd;
        if (part < 4) return group * (2 * kd + 2 * shared * vd) + 2 * kd + (part - 2) * shared * vd + place * vd;
        return group * 2 * shared + (part - 4) * shared + place;
    };
    for_rows(s.team, rows, (int)width, [&](int row) {
        const float *from = projected + row * width, *own = raw + (int64_t)row * 2 * heads;
        float *to = inputs + row * channels, *gate = gates + (int64_t)row * 2 * heads;
        for (int h = 0; h < keys; h++)
            for (int part = 0; part < 2; part++) memcpy(to + (part * keys + h) * kd, from + begin(part, h), 4 * kd);
        for (int h = 0; h < heads; h++) {
            memcpy(to + 2 * keys * kd + h * vd, from + begin(2, h), 4 * vd);
            gate[h] = own[begin(4, h)], gate[heads + h] = own[begin(5, h)];
        }
        if (r.is_bf16) round_bf16(to, (int)channels);
    });
    float* mixed = Session::room(s.mixed, (int64_t)rows * values);
    recur(s, r, d.sequences, d.groups, inputs, gates, mixed);
    for_rows(s.team, rows, 4 * values, [&](int row) {
        for (int h = 0; h < heads; h++) {
            float* to = mixed + (int64_t)row * values + h * vd;
            const float* z = projected + row * width + begin(3, h);
            rms_norm(to, l.state_norm, d.eps, vd, to);
            for (int i = 0; i < vd; i += LANES) {
                const int n = std::min(LANES, vd - i);
                store_some(to + i, load_some(to + i, n) * silu(load_some(z + i, n)), n);
            }
        }
    });
    return mixed;
}

// x [rows, qkv.in] -> mixed [rows, o.in], what attention makes of it before its last product; null if `kv_only`: keys and
// values are written, and no output is computed.
float* attend_layer(Session& s, const Decoder& d, const Layer& l, const Batch& batch, const float* x, bool kv_only) {
    const int rows = batch.rows, dim = l.cache.head_dim, heads = l.cache.heads, kv = l.cache.kv_heads;
    const int each = l.gated ? 2 * dim : dim, queries = heads * each;  // outputs of a head's query, and of all
    const int64_t width = l.qkv.out;
    const bool writes = width > queries, keys_are_values = width == queries + (int64_t)kv * dim;
    if (kv_only && !writes) return nullptr;
    float* qkv = Session::room(s.qkv, rows * width);
    product(s, l.qkv, x, rows, qkv, false, kv_only ? queries / LANES : 0);
    float* gates = l.gates.data && !kv_only ? Session::room(s.gates, (int64_t)rows * heads) : nullptr;
    if (gates) product(s, l.gates, x, rows, gates);
    float* q = Session::room(s.q, (int64_t)rows * heads * dim);
    float* v = keys_are_values ? Session::room(s.v, (int64_t)rows * kv * dim) : nullptr;
    for_rows(s.team, rows, 2 * (int)width, [&](int r) {
        float *from = qkv + r * width, *keys = from + queries;
        const float *cos = l.cos + batch.positions[r] * l.rotary, *sin = l.sin + batch.positions[r] * l.rotary;
        alignas(64) float turned[LARGEST_HEAD];
        float* values = keys_are_values ? v + (int64_t)r * kv * dim : keys + kv * dim;
        if (keys_are_values) memcpy(values, keys, sizeof(float) * kv * dim);
        for (int h = 0; h < kv && writes && l.v_norm; h++) rms_norm(values + h * dim, l.v_norm, d.eps, dim, values + h * dim);
        for (int h = kv_only ? heads : 0; h < heads + (writes ? kv : 0); h++) {
            float* head = h < heads ? from + h * each : keys + (h - heads) * dim;
            const float* norm = h < heads ? l.q_norm : l.k_norm;
            if (norm) rms_norm(head, norm, d.eps, dim, head);
            rotate(head, cos, sin, l.rotary, turned);
            memcpy(turned + l.rotary, head + l.rotary, 4 * (dim - l.rotary));
            memcpy(h < heads ? q + ((int64_t)r * heads + h) * dim : head, turned, 4 * dim);
        }
        if (writes) write_row(batch, l.cache, r, keys, values);
    });
    if (kv_only) return nullptr;
    float* mixed = Session::room(s.mixed, (int64_t)rows * l.o.in);
    s.attend(batch, l.cache, q, mixed);
    if (!l.gated && !gates) return mixed;
    for_rows(s.team, rows, 4 * heads * dim, [&](int r) {
        for (int h = 0; h < heads; h++) {
            const float* gate = qkv + r * width + h * each + dim;
            float* to = mixed + ((int64_t)r * heads + h) * dim;
            for (int i = 0; i < dim; i += LANES) {
                const int n = std::min(LANES, dim - i);
                const Vector raw = gates ? all(gates[(int64_t)r * heads + h]) : load_some(gate + i, n);
                store_some(to + i, load_some(to + i, n) / (1.0f + exponential(-raw)), n);
            }
        }
    });
    return mixed;
}

// `kv_only`: see `attend_layer`.
void layer_forward(Session& s, const Decoder& d, const Layer& l, const Batch& batch, const float* x, float* stream, bool kv_only) {
    const int rows = batch.rows, hidden = d.hidden;
    float* normed = Session::room(s.normed, (int64_t)rows * std::max(hidden, l.qkv.in));
    if (l.input_norm) {
        for_rows(s.team, rows, hidden, [&](int r) {
            rms_norm(stream + (int64_t)r * hidden, l.input_norm, d.eps, hidden, normed + (int64_t)r * hidden);
        });
        x = normed;
    }
    const float* mixed = l.recurrent ? recur_layer(s, d, l, rows, x) : attend_layer(s, d, l, batch, x, kv_only);
    if (kv_only) return;
    add_normed(s, d, rows, l.attention_norm, stream, [&](float* to) { product(s, l.o, mixed, rows, to, true); });
    for_rows(s.team, rows, hidden, [&](int r) {
        rms_norm(stream + (int64_t)r * hidden, l.post_norm, d.eps, hidden, normed + (int64_t)r * hidden);
    });
    add_normed(s, d, rows, l.mlp_norm, stream, [&](float* to) {
        if (l.gate_up.data) add_mlp(s, l, normed, rows, to);
        if (l.experts.gate_up.data && l.router_norm) add_normed_experts(s, d, l, stream, rows, to);
        else if (l.experts.gate_up.data) add_experts(s, l.experts, normed, normed, rows, to);
    });
    if (l.tail_gate.data) {
        const int size = d.layer_input_size;
        const float* inputs = d.layer_inputs + (&l - d.layers) * size;
        float* gates = Session::room(s.mixed, (int64_t)rows * size);
        product(s, l.tail_gate, stream, rows, gates);
        for_rows(s.team, rows, size, [&](int r) {
            float* gate = gates + (int64_t)r * size;
            const float* input = inputs + (int64_t)r * d.count * size;
            for (int i = 0; i < size; i += LANES) {
                int n = std::min(LANES, size - i);
                store_some(gate + i, activated(l.activation, load_some(gate + i, n)) * load_some(input + i, n), n);
            }
        });
        add_normed(s, d, rows, l.tail_norm, stream, [&](float* to) { product(s, l.tail_projection, gates, rows, to, true); });
    }
    if (l.factor != 1.0f)
        for_rows(s.team, rows, hidden, [&](int r) {
            for (int i = 0; i < hidden; i++) stream[(int64_t)r * hidden + i] *= l.factor;
        });
}

// Whether all positions and slots exist, and the pool of recurrent layers holds the trees.
bool is_inside(const Decoder& d, const Batch& batch) {
    for (int i = 0; i < d.count; i++)
        if (d.layers[i].recurrent && !holds_trees(*d.layers[i].recurrent, d.sequences, d.groups)) return false;
    for (int r = 0; r < batch.rows; r++) {
        bool inside = batch.positions[r] >= 0 && batch.positions[r] < d.context && batch.out_cache_loc[r] >= 0;
        for (int i = 0; i < d.count && inside; i++) inside = d.layers[i].recurrent || batch.out_cache_loc[r] < d.layers[i].cache.slots;
        if (!inside) return false;
    }
    return true;
}

// About how long one thread takes.
double decode_nanoseconds(const Decoder& d, const Batch& batch) {
    double expected = 0;
    for (const Layer* l = d.layers; l < d.layers + d.count; l++) {
        for (const Packed* w : {&l->qkv, &l->o, &l->gates, &l->gate_up, &l->down, &l->tail_gate, &l->tail_projection})
            if (w->data) expected += nanoseconds(*w, batch.rows);
        if (l->experts.gate_up.data) expected += experts_nanoseconds(l->experts, batch.rows);
        if (!l->recurrent) expected += attention_nanoseconds(batch, l->cache);
        else expected += recurrent_nanoseconds(*l->recurrent, d.sequences, d.groups);
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
