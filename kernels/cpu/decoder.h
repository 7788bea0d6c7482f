// Forwards of Llama-like decoders. The reference is eagle_server/models/layers.py.
#pragma once

#include "latent.h"
#include "recurrent_layer.h"

namespace {

// Lets `add(to)` add to the stream; `norm`: what it adds is normed before. Then it is multiplied by the layer's factor.
template <class Add>
void add_normed(Session& s, const Decoder& d, const Layer& l, int rows, const float* norm, float* stream, const Add& add) {
    if (!norm && l.added_factor == 1.0f) return add(stream);
    const int size = d.hidden;
    float* y = Session::room(s.added, (int64_t)rows * size);
    memset(y, 0, (size_t)4 * rows * size);
    add(y);
    for_rows(s.team, rows, 2 * size, [&](int r) {
        float *from = y + (int64_t)r * size, *to = stream + (int64_t)r * size;
        if (norm) rms_norm(from, norm, d.eps, size, from);
        for (int i = 0; i < size; i += LANES) {
            int n = std::min(LANES, size - i);
            store_some(to + i, fma(load_some(from + i, n), all(l.added_factor), load_some(to + i, n)), n);
        }
    });
}

// Adds to y [rows, hidden] what the MLP makes of x [rows, hidden].
void add_mlp(Session& s, const Layer& l, const float* x, int rows, float* y) {
    const int inner = l.down.in;
    float* mixed = Session::room(s.mixed, (int64_t)rows * inner);
    if (l.activation == RELU2) {
        product(s, l.gate_up, x, rows, mixed);
        for_rows(s.team, rows, 2 * inner, [&](int r) { squared_relu(mixed + (int64_t)r * inner, inner, mixed + (int64_t)r * inner); });
    } else if (inner % LANES == 0 && l.limit <= 0) {
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

// Adds to y [rows, hidden] what the experts make of a narrower copy of x [rows, hidden], which the router reads.
void add_narrow_experts(Session& s, const Layer& l, const float* x, int rows, float* y) {
    const int64_t count = (int64_t)rows * l.narrow.out;
    float *read = Session::room(s.routed, count), *made = Session::room(s.experts, count);
    product(s, l.narrow, x, rows, read);
    memset(made, 0, 4 * count);
    add_experts(s, l.experts, read, x, rows, made);
    product(s, l.widen, made, rows, y, true);
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
    if (l.o.data) {
        auto mixed = [&](const float* from) {
            if (l.recurrent) return recur_layer(s, d, l, rows, from);
            return l.latent.queries.data ? attend_latent(s, d, l, batch, from, kv_only) : attend_layer(s, d, l, batch, from, kv_only);
        };
        if (kv_only) {
            mixed(x);
            return;
        }
        add_normed(s, d, l, rows, l.attention_norm, stream, [&](float* to) {
            convolved(s, l.attention_convolution, batch, x, to, [&](const float* from, float* y) { product(s, l.o, mixed(from), rows, y, true); });
        });
    }
    if (l.post_norm) {
        for_rows(s.team, rows, hidden, [&](int r) {
            rms_norm(stream + (int64_t)r * hidden, l.post_norm, d.eps, hidden, normed + (int64_t)r * hidden);
        });
        add_normed(s, d, l, rows, l.mlp_norm, stream, [&](float* to) {
            if (l.gate_up.data)
                convolved(s, l.mlp_convolution, batch, normed, to, [&](const float* from, float* y) { add_mlp(s, l, from, rows, y); });
            if (l.experts.gate_up.data && l.router_norm) add_normed_experts(s, d, l, stream, rows, to);
            else if (l.narrow.data) add_narrow_experts(s, l, normed, rows, to);
            else if (l.experts.gate_up.data) add_experts(s, l.experts, normed, normed, rows, to);
        });
    }
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
        add_normed(s, d, l, rows, l.tail_norm, stream, [&](float* to) { product(s, l.tail_projection, gates, rows, to, true); });
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
        for (int i = 0; i < d.count && inside; i++) inside = !d.layers[i].attends() || batch.out_cache_loc[r] < d.layers[i].cache.slots;
        if (!inside) return false;
    }
    return true;
}

// About how long one thread takes.
double decode_nanoseconds(const Decoder& d, const Batch& batch) {
    double expected = 0;
    for (const Layer* l = d.layers; l < d.layers + d.count; l++) {
        for (const Packed* w : {&l->qkv, &l->o, &l->gates, &l->state_gate, &l->latent.queries, &l->latent.absorb, &l->latent.values, &l->gate_up, &l->down, &l->narrow,
                                &l->widen, &l->tail_gate, &l->tail_projection,
                                &l->attention_convolution.projection, &l->mlp_convolution.projection})
            if (w->data) expected += nanoseconds(*w, batch.rows);
        if (l->experts.gate_up.data) expected += experts_nanoseconds(l->experts, batch.rows);
        if (l->attends()) expected += attention_nanoseconds(batch, l->cache);
        if (l->recurrent) expected += recurrent_nanoseconds(*l->recurrent, d.sequences, d.groups);
    }
    return expected;
}

// Writes keys and values of a block drafter's context: of each layer, from the decoder's norm of what `combine` makes of
// features [rows, combine.in].
void write_context(Session& s, const Decoder& d, const Packed& combine, const Batch& batch, const float* features) {
    const int64_t size = d.hidden, rows = batch.rows;
    float* context = Session::room(s.hidden, rows * size);
    product(s, combine, features, rows, context);
    for_rows(s.team, rows, size, [&](int r) { rms_norm(context + r * size, d.norm, d.eps, size, context + r * size); });
    for (const Layer* l = d.layers; l < d.layers + d.count; l++) attend_layer(s, d, *l, batch, context, true);
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
