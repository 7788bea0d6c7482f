// A mixture of experts: a router, and the MLPs of the experts that it chose, with a gate or without. The reference is eagle_server/models/moe.py.
//
// Rows are sorted by expert, so an expert's weights are read once for all rows that chose it, and those of no other. A row's
// result is summed in the order of its own choices, whatever the other rows chose.
#pragma once

#include <numeric>

#include "session.h"

namespace {

enum RouterScores : int32_t { SOFTMAX = 0, SIGMOID = 1 };

struct Experts {
    Packed router;            // [experts + identities, hidden], computed in float32
    Packed gate_up;           // [experts * 2 * inner, hidden]: of each expert its gate, then its up; with RELU2 [experts * inner,
                              // hidden], its up; data null: no experts
    Packed down;              // [experts * hidden, inner]
    const float* correction;  // [experts], added to the scores where experts are chosen; null: none
    const float* factors;     // [experts], on the weights; null: none
    int32_t identities;       // the last of the router's outputs, whose experts give back their input
    int32_t adds_identities;  // whether these count here: of several ranks on one
    int32_t chosen;           // experts of a row
    int32_t groups, chosen_groups;  // rows go to experts in their best groups
    int32_t group_best;             // how many of its best scores make a group's score
    int32_t scores;                 // RouterScores
    int32_t normalize;              // the chosen scores are divided by their sum
    int32_t activation;             // Activation
    float scale;                    // on the weights
    float limit, alpha;  // both > 0: the gate is (up + 1) * gate * sigmoid(alpha * gate), both cut at the limit (gpt-oss);
                         // limit alone: see gate_mul
};

constexpr int EXPERT_ROWS = 1024;  // rows at once, which bounds the scratch memory

// gate_up [2 * inner], with RELU2 [inner] -> [inner]
void activate(const Experts& e, const float* gate_up, float* to) {
    const int inner = e.down.in;
    if (e.activation == RELU2) return squared_relu(gate_up, inner, to);
    if (e.limit <= 0 || e.alpha <= 0) return gate_mul(gate_up, inner, e.activation, to, e.limit);
    const Vector most = all(e.limit);
    for (int i = 0; i < inner; i += LANES) {
        const int n = std::min(LANES, inner - i);
        const Vector gate = -max(-load_some(gate_up + i, n), -most);
        const Vector up = max(-max(-load_some(gate_up + inner + i, n), -most), -most);
        store_some(to + i, (up + 1.0f) * (gate / (1.0f + exponential(gate * all(-e.alpha)))), n);
    }
}

// The index of the largest score; of equal ones the first.
int best_index(const float* scores, int size) {
    int best = 0;
    for (int i = 1; i < size; i++)
        if (scores[i] > scores[best]) best = i;
    return best;
}

// Logits [size] to scores, in place.
void score(const Experts& e, float* logits, int size) {
    const float most = e.scores == SOFTMAX ? logits[best_index(logits, size)] : 0;
    Vector total{};
    for (int i = 0; i < size; i += LANES) {
        const int n = std::min(LANES, size - i);
        const Vector x = load_some(logits + i, n);
        store_some(logits + i, e.scores == SOFTMAX ? exponential(x - all(most)) : 1.0f / (1.0f + exponential(-x)), n);
        total = total + load_some(logits + i, n);
    }
    if (e.scores != SOFTMAX) return;
    const float whole = sum(total);
    for (int i = 0; i < size; i++) logits[i] /= whole;
}

int weighted(const Experts& e) { return e.router.out - e.identities; }  // experts with weights

// The experts of a row and their weights [chosen], from the router's logits [experts], which become scores. `ranked`: room
// for as many floats.
void choose(const Experts& e, float* scores, float* ranked, int* experts, float* weights) {
    const int count = e.router.out, size = count / e.groups;
    score(e, scores, count);
    for (int i = 0; i < count; i++) ranked[i] = scores[i] + (e.correction ? e.correction[i] : 0);
    if (e.groups > 1) {
        std::vector<float> groups(e.groups), best(size);
        std::vector<uint8_t> kept(e.groups);
        for (int g = 0; g < e.groups; g++) {
            const int most = std::min(e.group_best, size);
            std::partial_sort_copy(ranked + g * size, ranked + (g + 1) * size, best.begin(), best.begin() + most, std::greater<float>());
            groups[g] = std::accumulate(best.begin(), best.begin() + most, 0.0f);
        }
        for (int i = 0; i < e.chosen_groups; i++) {
            const int group = best_index(groups.data(), e.groups);
            kept[group] = 1, groups[group] = -INFINITY;
        }
        for (int i = 0; i < count; i++)
            if (!kept[i / size]) ranked[i] = -INFINITY;
    }
    float total = 0;
    for (int i = 0; i < e.chosen; i++) {
        experts[i] = best_index(ranked, count);
        ranked[experts[i]] = -INFINITY;
        total += weights[i] = scores[experts[i]];
    }
    for (int i = 0; i < e.chosen; i++) {
        weights[i] = (e.normalize ? weights[i] / (total + 1e-20f) : weights[i]) * e.scale;
        if (e.factors) weights[i] *= e.factors[experts[i]];
    }
}

// The outputs of one expert in the vectors of a product with the weights of all: the first is `lead` floats after the first
// vector's begin.
struct Outputs {
    int first, vectors, lead;

    Outputs(int expert, int size)
        : first((int)((int64_t)expert * size / LANES)), lead((int)((int64_t)expert * size % LANES)) {
        vectors = (lead + size + LANES - 1) / LANES;
    }
    // Floats of a row that has room for any expert's vectors.
    static int64_t stride(int size) { return (int64_t)rounded_up(size + LANES - 1, GROUP); }
};

// The (row, choice) pairs of a forward, sorted by expert and within an expert by row, without those of identities.
struct Pairs {
    std::vector<int> experts, begins;  // those that some row chose, and where their pairs begin; one more: the end
    std::vector<int> pairs, places;    // the pair at a place, and the inverse

    Pairs(const int* chosen, int count, int all_experts) : places(count) {
        std::vector<int> next(all_experts + 1);
        int begin = 0;
        for (int i = 0; i < count; i++)
            if (chosen[i] < all_experts) next[chosen[i] + 1]++;
        for (int e = 0; e < all_experts; e++) {
            if (next[e + 1]) experts.push_back(e), begins.push_back(begin);
            begin += next[e + 1];
            next[e + 1] = begin;
        }
        begins.push_back(begin);
        pairs.resize(begin);
        for (int i = 0; i < count; i++)
            if (chosen[i] < all_experts) pairs[places[i] = next[chosen[i]]++] = i;
    }
};

// One expert's share of `w`, the weights of `experts`.
Packed of_one(const Packed& w, int experts) {
    Packed one = w;
    one.out = w.out / experts;
    return one;
}

// About how long one thread takes for the products of `rows` pairs with weights of `experts` experts.
double expert_nanoseconds(const Experts& e, const Packed& w, int experts, int rows) {
    return experts * nanoseconds(of_one(w, weighted(e)), (rows + experts - 1) / std::max(1, experts));
}

double experts_nanoseconds(const Experts& e, int rows) {
    const int pairs = rows * e.chosen, experts = std::min(weighted(e), pairs);
    return nanoseconds(e.router, rows) + expert_nanoseconds(e, e.gate_up, experts, pairs) + expert_nanoseconds(e, e.down, experts, pairs);
}

// y [pairs, stride]: each expert's products with its pairs, in its vectors. `input(i)`: the prepared rows of expert number i.
template <class Input> void grouped(Team& team, const Experts& e, const Packed& w, const Pairs& p, const Input& input, float* y) {
    const int size = w.out / weighted(e), active = (int)p.experts.size();
    const int64_t stride = Outputs::stride(size);
    struct Piece {
        int number, vector, vectors, begin, end;
    };
    std::vector<Piece> pieces;
    int width = WIDEST;
    while (width > 1 && (size / LANES + width - 1) / width * active < 3 * team.size()) width /= 2;
    for (int i = 0; i < active; i++) {
        const Outputs outputs(p.experts[i], size);
        const int rows = p.begins[i + 1] - p.begins[i], chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
        for (int v = 0; v < outputs.vectors; v += width)
            for (int c = 0; c < chunks; c++)
                pieces.push_back({i, v, std::min(width, outputs.vectors - v), rows * c / chunks, rows * (c + 1) / chunks});
    }
    team.run((int)pieces.size(), expert_nanoseconds(e, w, active, p.begins.back()), [&](int tile, int) {
        const Piece& piece = pieces[tile];
        const int first = Outputs(p.experts[piece.number], size).first;
        float* own = y + p.begins[piece.number] * stride;
        auto where = [&](int row, int vector) { return own + row * stride + (vector - first) * LANES; };
        auto put = [&](float* to, int vector, Vector sum) { store(to, with_bias(w, sum, vector * LANES)); };
        linear_columns(w, input(piece.number), piece.begin, piece.end, first + piece.vector, piece.vectors, where, put);
    });
}

void add_experts_of(
    Session& s, const Experts& e, const float* x, const float* routed, int rows, float* y, const int64_t* given, const float* given_weights) {
    const int count = e.router.out, hidden = e.gate_up.in, inner = e.down.in, k = e.chosen, choices = rows * k;
    float* scores = Session::room(s.logits, given ? 0 : (int64_t)2 * rows * count);
    float* weights = Session::room(s.expert_weights, choices);
    int* chosen = Session::room(s.chosen, choices);
    if (given) {
        std::copy(given, given + choices, chosen);
        std::copy(given_weights, given_weights + choices, weights);
    } else {
        product(s, e.router, routed, rows, scores);
        for_rows(s.team, rows, 2 * k * count, [&](int r) {
            choose(e, scores + (int64_t)r * count, scores + (int64_t)(rows + r) * count, chosen + r * k, weights + r * k);
        });
    }
    const Pairs p(chosen, choices, weighted(e));
    const int pairs = (int)p.pairs.size();

    const uint32_t* own = prepared(s, e.gate_up, x, rows);
    const int64_t stride = input_stride(e.gate_up);
    uint32_t* gathered = Session::room(s.gathered, pairs > (int)p.experts.size() ? pairs * stride : 0);
    auto is_alone = [&](int number) { return p.begins[number + 1] - p.begins[number] == 1; };
    s.team.run((int)p.experts.size(), pairs * stride / 4.0, [&](int i, int) {
        for (int place = p.begins[i]; place < p.begins[i + 1] && !is_alone(i); place++)
            memcpy(gathered + place * stride, own + p.pairs[place] / k * stride, 4 * stride);
    });
    auto rows_of = [&](int i) { return is_alone(i) ? own + p.pairs[p.begins[i]] / k * stride : gathered + p.begins[i] * stride; };
    const int inward = e.gate_up.out / weighted(e);
    const int64_t wide = Outputs::stride(inward), narrow = Outputs::stride(hidden), depth = input_stride(e.down);
    float* both = Session::room(s.both, pairs * wide);
    grouped(s.team, e, e.gate_up, p, rows_of, both);

    const int64_t room = rounded_up(inner, GROUP);
    float* mixed = Session::room(s.activated, pairs * room);
    uint32_t* input = Session::room(s.input, pairs * depth);
    for_rows(s.team, pairs, 8 * inner, [&](int place) {
        const Outputs outputs(chosen[p.pairs[place]], inward);
        activate(e, both + place * wide + outputs.lead, mixed + place * room);
        prepare_row(e.down, mixed + place * room, input + place * depth);
    });
    float* out = Session::room(s.both, pairs * narrow);  // gate and up are not read any more
    grouped(s.team, e, e.down, p, [&](int i) { return input + p.begins[i] * depth; }, out);
    for_rows(s.team, rows, k * hidden, [&](int r) {
        for (int c = 0; c < hidden; c += LANES) {
            const int n = std::min(LANES, hidden - c);
            Vector sums{};
            for (int j = r * k; j < (r + 1) * k; j++) {
                const bool is_identity = chosen[j] >= weighted(e);
                if (is_identity && !e.adds_identities) continue;
                const float* from = is_identity ? x + (int64_t)r * hidden + c : out + p.places[j] * narrow + Outputs(chosen[j], hidden).lead + c;
                sums = fma(all(weights[j]), load_some(from, n), sums);
            }
            float* to = y + (int64_t)r * hidden + c;
            store_some(to, load_some(to, n) + sums, n);
        }
    });
}

// Adds to y [rows, gate_up.in] what the experts of each row make of x [rows, gate_up.in]. routed [rows, router.in]: what the router reads.
// given, weights [rows, chosen]: the experts of each row, which then no router chooses.
void add_experts(
    Session& s, const Experts& e, const float* x, const float* routed, int rows, float* y, const int64_t* given = nullptr,
    const float* weights = nullptr) {
    for (int64_t r = 0; r < rows; r += EXPERT_ROWS) {
        const int64_t at = r * e.gate_up.in, pair = given ? r * e.chosen : 0;
        add_experts_of(s, e, x + at, routed + r * e.router.in, std::min(EXPERT_ROWS, (int)(rows - r)), y + at, given ? given + pair : nullptr, weights + pair);
    }
}

}  // namespace
