// One node of a recurrent layer over some columns of one head's state. The rules are those of eagle_server/ops/recurrent/nodes.py.
#pragma once

#include <algorithm>

#include "vector.h"

namespace {

enum Rule { DELTA, KDA, SSD, CONVOLUTION };

constexpr int COLUMNS = 2 * LANES;  // of a state that are computed at once

struct Block {  // some columns of a state
    const float* from;
    int64_t stride;  // floats between its rows
};

// The first n columns of a vector, none if n < 1; `whole`: all.
template <bool whole> Vector columns(const float* from, int n) {
    if (whole) return load(from);
    return n > 0 ? load_some(from, std::min(n, LANES)) : Vector{};
}

// One head of a node, without its values.
struct HeadInputs {
    const float *q, *k, *decays;  // [key_dim]; decays [1] where a head has one
    float rate, skip, key_query;  // key_query: k . q
};

// One node over `n` columns, all if `whole`: u, and o; and the state after it, [key_dim, COLUMNS], if `keeps`.
//
// The old state is read once for both: with a = e^g S, u = b (v - a^T k) and o = (a + k u^T)^T q = a^T q + (k . q) u. So a
// leaf of a tree, of which nobody needs the state, costs half.
template <int rule, bool whole, bool keeps>
void step(Block state, int n, int dim, const HeadInputs& head, const float* v, float* to, float* u, float* o) {
    const int second = n - LANES;
    const auto decay = [&](int i) { return head.decays[rule == KDA ? i : 0]; };
    const Vector values[2] = {columns<whole>(v, n), columns<whole>(v + LANES, second)};
    Vector reads[2][2] = {}, outputs[2][2] = {};  // sums over even and odd rows
    const auto add = [&](int i, int part) {
        const float* row = state.from + i * state.stride;
        const Vector halves[2] = {columns<whole>(row, n), columns<whole>(row + LANES, second)};
        const Vector query = all(rule == KDA ? head.q[i] * decay(i) : head.q[i]);
        for (int half = 0; half < 2; half++) outputs[half][part] = fma(halves[half], query, outputs[half][part]);
        if (rule == SSD) return;
        const Vector key = all(rule == KDA ? head.k[i] * decay(i) : head.k[i]);
        for (int half = 0; half < 2; half++) reads[half][part] = fma(halves[half], key, reads[half][part]);
    };
    int i = 0;
    for (; i + 2 <= dim; i += 2) add(i, 0), add(i + 1, 1);
    if (i < dim) add(i, 0);
    const Vector product = all(head.key_query), factor = all(rule == KDA ? 1.0f : decay(0));
    Vector updates[2];
    for (int half = 0; half < 2; half++) {
        if (rule == SSD) updates[half] = all(head.rate) * values[half];
        else updates[half] = all(head.rate) * (values[half] - factor * (reads[half][0] + reads[half][1]));
        Vector out = fma(product, updates[half], factor * (outputs[half][0] + outputs[half][1]));
        if (rule == SSD) out = fma(all(head.skip), values[half], out);
        if (n <= half * LANES) continue;
        const int count = std::min(LANES, n - half * LANES);
        store_some(u + half * LANES, updates[half], count);
        store_some(o + half * LANES, out, count);
    }
    for (int i = 0; keeps && i < dim; i++) {
        const float* row = state.from + i * state.stride;
        const Vector key = all(head.k[i]), each = rule == KDA ? all(decay(i)) : factor;
        store(to + i * COLUMNS, fma(key, updates[0], columns<whole>(row, n) * each));
        store(to + i * COLUMNS + LANES, fma(key, updates[1], columns<whole>(row + LANES, second) * each));
    }
}

using Step = void (*)(Block, int, int, const HeadInputs&, const float*, float*, float*, float*);

template <int rule> Step step_of(bool whole, bool keeps) {
    if (whole) return keeps ? step<rule, true, true> : step<rule, true, false>;
    return keeps ? step<rule, false, true> : step<rule, false, false>;
}

Step step_of(int rule, bool whole, bool keeps) {
    return rule == DELTA ? step_of<DELTA>(whole, keeps) : rule == KDA ? step_of<KDA>(whole, keeps) : step_of<SSD>(whole, keeps);
}

}  // namespace
