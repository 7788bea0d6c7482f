// Recurrent layers along the paths of trees. The reference is eagle_server/ops/recurrent/nodes.py, with the rules.
//
// A state S [K, V] of a head is advanced node by node, S' = e^g S + k u^T, in an order that no other row, node or head changes. So a node of a tree has the same bits as its token in a prompt or in plain decoding, and
// `keep_states` repeats the same operations from the k, u and g that nodes stored. Columns of S do not depend on each other:
// a block of them stays in the first-level cache while all nodes are computed, so a state is read once for a whole tree.
#pragma once

#include <cmath>

#include "recurrent_step.h"
#include "session.h"

namespace {

constexpr float NORM_EPS = 1e-6f;
constexpr int LARGEST_KERNEL = 16;

struct Recurrent {
    const float* conv;       // [kernel, channels], the newest input last
    const float* a_log;      // [value_heads]
    const float* dt_bias;    // [decays]
    const float* conv_bias;  // [channels], null: none
    const float* skip;       // [value_heads], null: none
    float* states;           // [rows, value_heads, key_dim, value_dim]
    void* rings;             // [rows, kernel - 1, channels], floats or bfloat16, as `inputs`
    void* inputs;            // [rows, nodes, channels], of the newest trees, as all that follow
    float* keys;             // [rows, nodes, key_heads, key_dim]
    float* updates;          // [rows, nodes, value_heads, value_dim]
    float* decays;           // [rows, nodes, decays]
    int32_t is_bf16, key_heads, value_heads, key_dim, value_dim, kernel, nodes, rule;
    float least_step, largest_step;

    int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    bool solves() const { return rule == DELTA || rule == KDA; }
    int head_decays() const { return rule == KDA ? key_dim : 1; }
    int decay_count() const { return rule == CONVOLUTION ? 0 : value_heads * head_decays(); }
    int gates() const { return decay_count() + (solves() ? value_heads : 0); }
    // Where values, keys and queries begin among the convolution's outputs.
    int first_value() const { return rule == SSD ? 0 : 2 * key_heads * key_dim; }
    int first_key() const { return rule == SSD ? value_heads * value_dim : key_heads * key_dim; }
    int first_query() const { return rule == SSD ? value_heads * value_dim + key_heads * key_dim : 0; }
};

struct Sequences {
    const int32_t* qo_indptr;         // [count + 1]
    const int64_t* req_pool_indices;  // [count]
    const int64_t* starts;            // [count], first positions; null: trees
    const int64_t* parents;           // [count, width], of trees; null: chains, which move the states
    const int64_t* saved;             // [saves, 2]: after chains, the state of the first row is copied to the second
    int32_t count, width, saves;
};

int64_t parent_of(const Sequences& s, int request, int64_t node) {
    return s.parents ? s.parents[(int64_t)request * s.width + node] : node - 1;
}

// Whether the pool has a place for every node of the trees, and every parent is before its children.
bool holds_trees(const Recurrent& l, const Sequences* groups, int number) {
    for (const Sequences* s = groups; s < groups + number; s++) {
        if (!s->parents) continue;
        if (s->width > l.nodes) return false;
        for (int i = 0; i < s->count; i++) {
            if (s->qo_indptr[i + 1] - s->qo_indptr[i] > s->width) return false;
            for (int64_t node = 0; node < s->width; node++)
                if (parent_of(*s, i, node) < -1 || parent_of(*s, i, node) >= node) return false;
        }
    }
    return true;
}

Vector ring_values(const Recurrent& l, int64_t place, int n) {
    return l.is_bf16 ? load_some_bf16((const uint16_t*)l.rings + place, n) : load_some((const float*)l.rings + place, n);
}

// `x` is exact in the ring's type.
void put_inputs(const Recurrent& l, void* ring, int64_t place, const float* x) {
    if (l.is_bf16) store_bf16((uint16_t*)ring + place, x, l.channels());
    else memcpy((float*)ring + place, x, 4 * (int64_t)l.channels());
}

// One row: the convolution; silu, and norms of queries and keys, where the rule has them. x: [rows, channels], from the request's
// first row on.
void mix_row(const Recurrent& l, const Sequences& s, int request, int64_t node, const float* x, float* to) {
    const int channels = l.channels(), kernel = l.kernel;
    const int64_t row = s.req_pool_indices[request], ring = row * (kernel - 1) * channels;
    const bool begins = s.starts && s.starts[request] == 0;
    const float* taps[LARGEST_KERNEL];  // newest first; null: in the ring, or zero
    int64_t at = node;
    int from_rows = 0;
    for (; from_rows < kernel && at >= 0; at = parent_of(s, request, at)) taps[from_rows++] = x + at * channels;
    for (int c = 0; c < channels; c += LANES) {
        const int n = std::min(LANES, channels - c);
        Vector y = l.conv_bias ? load_some(l.conv_bias + c, n) : Vector{};
        for (int back = 0; back < kernel; back++) {
            Vector value{};
            if (back < from_rows) value = load_some(taps[back] + c, n);
            else if (!begins) value = ring_values(l, ring + (int64_t)(kernel - 2 - back + from_rows) * channels + c, n);
            y = fma(value, load_some(l.conv + (int64_t)(kernel - 1 - back) * channels + c, n), y);
        }
        store_some(to + c, l.rule == CONVOLUTION ? y : silu(y), n);
    }
    if (!l.solves()) return;
    const float scale = 1.0f / std::sqrt((float)l.key_dim);
    for (int head = 0; head < 2 * l.key_heads; head++) {
        float* part = to + head * l.key_dim;
        float factor = 1.0f / std::sqrt(dot(part, part, l.key_dim) + NORM_EPS);
        if (head < l.key_heads) factor = factor * scale;
        for (int i = 0; i < l.key_dim; i++) part[i] = part[i] * factor;
    }
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

float decay_of(float log_decay) { return exponential(all(log_decay))[0]; }

// One row: raw gates -> rates [value_heads], log decays and decays [decay_count] each.
void gate_row(const Recurrent& l, const float* gates, float* rates, float* logs, float* decays) {
    const int heads = l.value_heads, each = l.head_decays();
    const float* raw = gates + (l.solves() ? heads : 0);
    for (int i = 0; i < l.decay_count(); i++) {
        const float step = std::min(std::max(softplus(raw[i] + l.dt_bias[i]), l.least_step), l.largest_step);
        logs[i] = -std::exp(l.a_log[i / each]) * step;
        decays[i] = decay_of(logs[i]);
        if (!l.solves()) rates[i] = step;
    }
    for (int h = 0; h < heads && l.solves(); h++) rates[h] = 1.0f / (1.0f + std::exp(-gates[h]));
}

// Nodes in an order in which each stands after its parent, and those between them descend from the parent; and where their
// states are kept. The last child takes its parent's place, which then is still in the nearest cache.
struct Walk {
    std::vector<int> order, place;
    std::vector<char> is_leaf;
    int places = 1;

    Walk(const Sequences& s, int request, int size) : place(size), is_leaf(size, 1) {
        std::vector<int> child(size, -1), sibling(size, -1), open;
        for (int node = size - 1; node >= 0; node--) {
            int64_t parent = parent_of(s, request, node);
            if (parent < 0) continue;
            sibling[node] = child[parent], child[parent] = node, is_leaf[parent] = 0;
        }
        if (size) open.push_back(0);
        while (!open.empty()) {
            int node = open.back();
            open.pop_back();
            int64_t parent = parent_of(s, request, node);
            place[node] = parent < 0 ? 0 : place[parent] + (child[parent] != node);  // the first child comes last
            places = std::max(places, place[node] + 1);
            order.push_back(node);
            for (int next = child[node]; next >= 0; next = sibling[next]) open.push_back(next);
        }
    }
};

// About how long one thread takes.
double recurrent_nanoseconds(const Recurrent& l, const Sequences* groups, int number) {
    double units = 0;
    for (const Sequences* s = groups; s < groups + number; s++) units += 0.05 * s->qo_indptr[s->count] + 0.1 * s->count;
    return units * (l.value_heads * l.key_dim + l.kernel) * l.value_dim;
}

// The states of one group of requests: outputs of all their nodes, and what these nodes or chains leave behind.
// mixed [rows, channels], from `mix_row`; rates [rows, value_heads] and decays [rows, decay_count], from `gate_row`.
void advance_states(
    Session& session, const Recurrent& l, const Sequences& s, const float* mixed, const float* rates, const float* decays, float* out) {
    const int channels = l.channels(), heads = l.value_heads, dim = l.key_dim, width = l.value_dim, shared = heads / l.key_heads;
    std::vector<Walk> walks;
    for (int r = 0; r < s.count; r++) walks.emplace_back(s, r, s.qo_indptr[r + 1] - s.qo_indptr[r]);
    session.team.run(s.count * heads, recurrent_nanoseconds(l, &s, 1), [&](int tile, int thread) {
        const int request = tile / heads, h = tile % heads, first = s.qo_indptr[request];
        const int64_t row = s.req_pool_indices[request];
        const Walk& walk = walks[request];
        const int64_t size = (int64_t)dim * COLUMNS;
        float* room = Session::room(session.scores[thread], (walk.places + 1) * size + width);
        float *zeros = room, *stack = room + size, *spare = stack + walk.places * size;
        const bool begins = s.starts && s.starts[request] == 0;
        float* state = l.states + (row * heads + h) * dim * width;
        for (int column = 0; column < width; column += COLUMNS) {
            const int n = std::min(COLUMNS, width - column);
            Block before{state + column, width};
            if (begins) {
                std::fill(zeros, zeros + size, 0.0f);
                before = {zeros, COLUMNS};
            }
            for (int node : walk.order) {
                const int64_t at = first + node, place = (row * l.nodes + node) * heads + h, parent = parent_of(s, request, node);
                const float* own = mixed + at * channels;
                const float *q = own + l.first_query() + h / shared * dim, *k = own + l.first_key() + h / shared * dim;
                const HeadInputs head{
                    q, k, decays + at * l.decay_count() + h * l.head_decays(), rates[at * heads + h], l.skip ? l.skip[h] : 0,
                    dot(q, k, dim)};
                float* to = s.parents && walk.is_leaf[node] ? nullptr : stack + walk.place[node] * size;
                Block from = parent < 0 ? before : Block{stack + walk.place[parent] * size, COLUMNS};
                step_of(l.rule, n == COLUMNS, to)(
                    from, n, dim, head, own + l.first_value() + h * width + column, to,
                    s.parents ? l.updates + place * width + column : spare + column, out + (at * heads + h) * width + column);
            }
            if (s.parents || walk.order.empty()) continue;
            for (int i = 0; i < dim; i++) memcpy(state + i * width + column, stack + i * COLUMNS, 4 * n);
        }
    });
}

// The rings after chains: the last inputs of ring and rows.
void advance_rings(const Recurrent& l, const Sequences& s, const float* x) {
    const int channels = l.channels(), kept = l.kernel - 1;
    const int64_t size = l.is_bf16 ? 2 : 4;
    for (int r = 0; r < s.count; r++) {
        const int first = s.qo_indptr[r], count = s.qo_indptr[r + 1] - first;
        const int64_t ring = s.req_pool_indices[r] * kept * channels;
        char* places = (char*)l.rings;
        for (int i = 0; i < kept; i++) {
            const int from = count + i;  // in (ring, rows)
            if (from >= kept) put_inputs(l, l.rings, ring + (int64_t)i * channels, x + (int64_t)(first + from - kept) * channels);
            else if (s.starts[r] == 0) memset(places + (ring + (int64_t)i * channels) * size, 0, channels * size);
            else memmove(places + (ring + (int64_t)i * channels) * size, places + (ring + (int64_t)from * channels) * size, channels * size);
        }
    }
}

// x [rows, channels], gates [rows, l.gates()] -> out [rows, value_heads, value_dim]. Chains move their states; trees store
// their nodes.
void recur_group(Session& session, const Recurrent& l, const Sequences& s, const float* x, const float* gates, float* out) {
    const int channels = l.channels(), heads = l.value_heads, keys = l.key_heads * l.key_dim, count = l.decay_count();
    const int rows = s.qo_indptr[s.count];
    const bool is_convolution = l.rule == CONVOLUTION;
    float* mixed = is_convolution ? out : Session::room(session.qkv, (int64_t)rows * channels);
    float* rates = Session::room(session.rates, (int64_t)rows * (heads + 2 * count));
    float *logs = rates + (int64_t)rows * heads, *decays = logs + (int64_t)rows * count;
    std::vector<int> request_of(rows);
    for (int r = 0; r < s.count; r++) std::fill(request_of.begin() + s.qo_indptr[r], request_of.begin() + s.qo_indptr[r + 1], r);
    session.team.run(rows, 2.0 * rows * channels, [&](int row, int) {
        const int request = request_of[row];
        const int64_t first = s.qo_indptr[request], node = row - first, at = row;
        mix_row(l, s, request, node, x + first * channels, mixed + at * channels);
        if (!is_convolution) gate_row(l, gates + at * l.gates(), rates + at * heads, logs + at * count, decays + at * count);
        if (!s.parents) return;
        const int64_t place = s.req_pool_indices[request] * l.nodes + node;
        put_inputs(l, l.inputs, place * channels, x + at * channels);
        if (is_convolution) return;
        memcpy(l.keys + place * keys, mixed + at * channels + l.first_key(), 4 * (int64_t)keys);
        memcpy(l.decays + place * count, logs + at * count, 4 * (int64_t)count);
    });
    if (!is_convolution) advance_states(session, l, s, mixed, rates, decays, out);
    if (s.parents) return;
    advance_rings(l, s, x);
    const int64_t ring = (l.kernel - 1) * channels * (l.is_bf16 ? 2 : 4), state = (int64_t)heads * l.key_dim * l.value_dim;
    for (int i = 0; i < s.saves; i++) {
        const int64_t from = s.saved[2 * i], to = s.saved[2 * i + 1];
        memcpy(l.states + to * state, l.states + from * state, 4 * state);
        memcpy((char*)l.rings + to * ring, (char*)l.rings + from * ring, ring);
    }
}

// The same for groups of requests, whose rows are one after the other.
void recur(Session& session, const Recurrent& l, const Sequences* groups, int number, const float* x, const float* gates, float* out) {
    int64_t first = 0;
    for (const Sequences* s = groups; s < groups + number; first += s->qo_indptr[s->count], s++)
        recur_group(session, l, *s, x + first * l.channels(), gates + first * l.gates(), out + first * l.value_heads * l.value_dim);
}

// Moves states and rings of `count` rows of the pool along their paths [count, steps], -1 after their ends, in all layers.
void keep_states(Session& session, const Recurrent* layers, int number, const int64_t* path, const int64_t* requests, int count, int steps) {
    const Recurrent& any = *layers;
    const int heads = any.value_heads, dim = any.key_dim, width = any.value_dim, shared = heads / any.key_heads;
    session.team.run(number * count * heads, 0.3 * number * count * heads * dim * width, [&](int tile, int thread) {
        const Recurrent& l = layers[tile / heads / count];
        const int request = tile / heads % count, h = tile % heads;
        const int64_t row = requests[request], *own = path + (int64_t)request * steps;
        int length = 0;
        while (length < steps && own[length] >= 0) length++;
        const int each = l.head_decays();
        float* decays = Session::room(session.noise[thread], length * each);
        for (int j = 0; j < length * each && dim; j++)
            decays[j] = decay_of(l.decays[((row * l.nodes + own[j / each]) * heads + h) * each + j % each]);
        float* state = l.states + (row * heads + h) * dim * width;
        for (int i = 0; i < dim; i++)
            for (int column = 0; column < width; column += LANES) {
                const int n = std::min(LANES, width - column);
                Vector values = load_some(state + i * width + column, n);
                for (int j = 0; j < length; j++) {
                    const int64_t place = row * l.nodes + own[j];
                    Vector key = all(l.keys[(place * l.key_heads + h / shared) * dim + i]);
                    values = fma(key, load_some(l.updates + (place * heads + h) * width + column, n), values * all(decays[each == 1 ? j : j * each + i]));
                }
                store_some(state + i * width + column, values, n);
            }
        if (h) return;
        const int64_t channels = l.channels(), size = l.is_bf16 ? 2 : 4, kept = l.kernel - 1;
        char *ring = (char*)l.rings + row * kept * channels * size, *inputs = (char*)l.inputs + row * l.nodes * channels * size;
        for (int64_t i = 0; i < kept; i++) {
            const int64_t from = length + i;
            const char* source = from < kept ? ring + from * channels * size : inputs + own[from - kept] * channels * size;
            memmove(ring + i * channels * size, source, channels * size);
        }
    });
}

}  // namespace
