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
    float rate, skip;
};

// One node over `n` columns, all if `whole`: u, and o; and the state after it, [key_dim, COLUMNS], if `keeps`.
template <int rule, bool whole, bool keeps>
void step(Block state, int n, int dim, const HeadInputs& head, const float* v, float* to, float* u, float* o) {
    const int second = n - LANES;
    const auto decay = [&](int i) { return head.decays[rule == KDA ? i : 0]; };
    Vector updates[2], outputs[2][2] = {};
    const Vector values[2] = {columns<whole>(v, n), columns<whole>(v + LANES, second)};
    if (rule == SSD) {
        for (int half = 0; half < 2; half++) updates[half] = all(head.rate) * values[half];
    } else {
        Vector sums[2][4] = {};
        const auto add = [&](int i, int part) {
            const float* row = state.from + i * state.stride;
            const Vector key = all(rule == KDA ? head.k[i] * decay(i) : head.k[i]);
            sums[0][part] = fma(columns<whole>(row, n), key, sums[0][part]);
            sums[1][part] = fma(columns<whole>(row + LANES, second), key, sums[1][part]);
        };
        int i = 0;
        for (; i + 4 <= dim; i += 4) add(i, 0), add(i + 1, 1), add(i + 2, 2), add(i + 3, 3);
        for (; i < dim; i++) add(i, 0);
        for (int half = 0; half < 2; half++) {
            Vector read = (sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]);
            if (rule != KDA) read = all(decay(0)) * read;
            updates[half] = all(head.rate) * (values[half] - read);
        }
    }
    const auto advance = [&](int i, int part) {
        const float* row = state.from + i * state.stride;
        const Vector key = all(head.k[i]), query = all(head.q[i]), factor = all(decay(i));
        const Vector a = fma(key, updates[0], columns<whole>(row, n) * factor);
        const Vector b = fma(key, updates[1], columns<whole>(row + LANES, second) * factor);
        outputs[0][part] = fma(a, query, outputs[0][part]);
        outputs[1][part] = fma(b, query, outputs[1][part]);
        if (keeps) {
            store(to + i * COLUMNS, a);
            store(to + i * COLUMNS + LANES, b);
        }
    };
    int i = 0;
    for (; i + 2 <= dim; i += 2) advance(i, 0), advance(i + 1, 1);
    if (i < dim) advance(i, 0);
    for (int half = 0; half < 2 && n > half * LANES; half++) {
        int count = std::min(LANES, n - half * LANES);
        Vector out = outputs[half][0] + outputs[half][1];
        if (rule == SSD) out = fma(all(head.skip), values[half], out);
        store_some(u + half * LANES, updates[half], count);
        store_some(o + half * LANES, out, count);
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
