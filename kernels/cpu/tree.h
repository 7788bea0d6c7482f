// Trees: their links, the walk along what the target drew, and counts of what was accepted. The references are
// eagle_server/ops/tree/build.py and accept.py, and eagle_server/worker/budget/estimates.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// One tree of `drafted` + 1 nodes. selected [drafted]: ascending pool indices, closed under ancestors. above: the pool index of
// the parent of each of `groups` groups of `topk` siblings, -1 for the root. mask [nodes, nodes]: ancestor or self. Returns false
// if an index is outside the pool or not behind its parent.
bool link_tree(
    const int64_t* selected, const int64_t* above, int drafted, int groups, int topk, int64_t* parents, int64_t* depths,
    uint8_t* mask) {
    int nodes = drafted + 1;
    memset(mask, 0, (int64_t)nodes * nodes);
    parents[0] = -1, depths[0] = 0, mask[0] = 1;
    for (int node = 1; node < nodes; node++) {
        if (selected[node - 1] < 0 || selected[node - 1] >= (int64_t)groups * topk) return false;
        int64_t pool = above[selected[node - 1] / topk];
        int64_t parent = pool < 0 ? 0 : std::lower_bound(selected, selected + node - 1, pool) - selected + 1;
        if (parent >= node) return false;
        parents[node] = parent, depths[node] = depths[parent] + 1;
        memcpy(mask + (int64_t)node * nodes, mask + parent * nodes, nodes);
        mask[(int64_t)node * nodes + node] = 1;
    }
    return true;
}

struct Tree {
    const int64_t* tokens;   // [nodes], as all
    const int64_t* parents;
    const int64_t* depths;
    const uint8_t* mask;     // [nodes, nodes]
    const int64_t* drawn;    // the target's token after each node
    const uint8_t* finite;   // whether its score is
    int nodes, steps;
};

// Whether all depths are at most `steps`, and all parents are nodes.
bool is_tree(const Tree& t) {
    for (int node = 0; node < t.nodes; node++) {
        if (t.depths[node] < 0 || t.depths[node] > t.steps) return false;
        if (node && (t.parents[node] < 0 || t.parents[node] >= t.nodes)) return false;
    }
    return true;
}

// The deepest node below which all nodes to the root have the token drawn at their parent, the first of several. path, tokens
// [steps + 1]: -1 after its end. Returns whether all scores on the path are finite.
bool walk_tree(const Tree& t, int64_t* path, int64_t* accept_length, int64_t* tokens) {
    int64_t last = 0;
    for (int node = 1; node < t.nodes; node++) {
        if (t.depths[node] <= t.depths[last]) continue;
        const uint8_t* row = t.mask + (int64_t)node * t.nodes;
        bool reached = true;
        for (int i = 1; i < t.nodes && reached; i++) reached = !row[i] || t.tokens[i] == t.drawn[t.parents[i]];
        if (reached) last = node;
    }
    bool finite = true;
    std::fill(path, path + t.steps + 1, -1);
    std::fill(tokens, tokens + t.steps + 1, -1);
    *accept_length = t.depths[last];
    for (int node = 0; node < t.nodes; node++) {
        if (!t.mask[last * t.nodes + node]) continue;
        path[t.depths[node]] = node;
        tokens[t.depths[node]] = t.drawn[node];
        finite = finite && t.finite[node];
    }
    return finite;
}

// Accepted and expected nodes, and the logarithms of their ratios: [temperatures, depths, 2, edges + 1] each.
struct Counts {
    double *accepted, *expected;
    float* ratios;
    const float* edges;  // of guesses, as logarithms, ascending
    int32_t depths, edge_count;
    double memory, prior;

    // A node whose parent was accepted. `later`: it is not its parent's first child.
    void add(int64_t temperature, int64_t depth, bool later, float guess, bool is_accepted) const {
        const int64_t bin = std::upper_bound(edges, edges + edge_count, guess) - edges, step = 2 * (edge_count + 1);
        const int64_t first = temperature * depths * step + later * (edge_count + 1) + bin;  // of the first depth
        const int64_t own = first + (std::min<int64_t>(depth, depths) - 1) * step;
        accepted[own] += is_accepted, expected[own] += std::exp((double)guess);
        if (expected[own] > memory) accepted[own] /= 2, expected[own] /= 2;
        double all_accepted = prior, all_expected = prior;
        for (int d = 0; d < depths; d++) all_accepted += accepted[first + d * step], all_expected += expected[first + d * step];
        const double ratio = all_accepted / all_expected;
        for (int64_t d = 0, at = first; d < depths; d++, at += step)
            ratios[at] = (float)std::log((accepted[at] + prior * ratio) / (expected[at] + prior));
    }

    // The nodes of a tree that were tried. path [steps + 1]: see `walk_tree`. guesses: by `proposed` [nodes - 1], the places in
    // the drafter's tree; null: the same places.
    void add(const Tree& t, int64_t temperature, const int64_t* path, const float* guesses, const int64_t* proposed) const {
        auto is_on_path = [&](int64_t node) { return t.depths[node] <= t.steps && path[t.depths[node]] == node; };
        for (int node = 1; node < t.nodes; node++) {
            const float guess = guesses[proposed ? proposed[node - 1] : node - 1];
            if (t.tokens[node] < 0 || !is_on_path(t.parents[node]) || !std::isfinite(guess)) continue;
            const bool later = std::find(t.parents + 1, t.parents + node, t.parents[node]) != t.parents + node;
            add(temperature, t.depths[node], later, guess, is_on_path(node));
        }
    }
};

}  // namespace
