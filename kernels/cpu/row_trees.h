// Trees over rows of scores, in one call. The reference is eagle_server/worker/drafters/rows.py.
#pragma once

#include "drafting.h"

namespace {

// DFlash 2's: parent a adds sum_r before[a, r] * mixed[row, r] * after[b, r] to the score of candidate b.
struct Selector {
    const void* before;    // [vocab, rank]
    const void* after;     // [draft vocab, rank]
    const float* mixed;    // [rows, rank]
    const int64_t* roots;  // [requests], target ids
    int32_t rank, is_bf16, candidates;
};

float logsumexp(const float* x, int n) {
    const float most = *std::max_element(x, x + n);
    float total = 0;
    for (int i = 0; i < n; i++) total += std::exp(x[i] - most);
    return most + std::log(total);
}

// The k best of a row's candidates below one parent: to `best` their scores, to `places` which they are. logp: their scores without
// the parent. All other tokens keep their logits, see `DraftRanking.conditioned`.
void choose(
    const Selector& e, int row, int64_t parent, float temperature, int k, const float* logp, const int64_t* drafts, float* best, int64_t* places) {
    const int count = e.candidates;
    std::vector<float> factors(e.rank), room(e.rank), added(count + 1);
    const float *before = widened(e.before, e.is_bf16, parent * e.rank, e.rank, room.data()), *mixed = e.mixed + (int64_t)row * e.rank;
    for (int i = 0; i < e.rank; i++) factors[i] = before[i] * mixed[i];
    float kept = 0;
    for (int c = 0; c < count; c++) {
        const float edge = dot(factors.data(), widened(e.after, e.is_bf16, drafts[c] * e.rank, e.rank, room.data()), e.rank);
        added[c] = logp[c] + (temperature > 0 ? edge / temperature : edge);
        kept += std::exp(logp[c]);
    }
    added[count] = std::log1p(-std::min(kept, 1 - 1e-6f));
    const float whole = logsumexp(added.data(), count + 1);
    const std::vector<int64_t> order = best_of(added.data(), count, k);
    for (int c = 0; c < k; c++) places[c] = order[c], best[c] = finite(added[order[c]] - whole);
}

// Row j of a request scores the children of all nodes of level j, alike or with a selector's edges. The topk best nodes of a level
// have children. Returns as `select`.
int row_trees(
    Session& s, const Scoring& scoring, const Selector* selector, int requests, int k, const Estimates& estimates, const Candidates& out) {
    const int levels = scoring.rows / requests, count = selector ? selector->candidates : k;
    std::vector<float> logp((int64_t)scoring.rows * count), above(k), best(k);
    std::vector<int64_t> found((int64_t)scoring.rows * count), fed(k), places(k), children(k);
    Team::Together together(s.team, scoring.nanoseconds());
    best_tokens(s, scoring, count, logp.data(), found.data());
    std::iota(places.begin(), places.end(), 0);
    std::vector<Pool> pools(requests);
    for (int i = 0; i < requests; i++) {
        Pool& pool = pools[i];
        if (selector) fed[0] = selector->roots[i];
        for (int level = 0; level < levels; level++) {
            const int row = i * levels + level;
            const int64_t start = (int64_t)pool.tokens.size(), *drafts = &found[(int64_t)row * count];
            const float* own = &logp[(int64_t)row * count];
            for (int n = 0; n < (level ? k : 1); n++) {
                if (selector) {
                    const float temperature = scoring.is_drawn(row) ? scoring.temperature[row] : 0;
                    choose(*selector, row, fed[n], temperature, k, own, drafts, best.data(), places.data());
                } else {
                    std::copy_n(own, k, best.data());
                }
                for (int c = 0; c < k; c++) children[c] = scoring.ids ? scoring.ids[drafts[places[c]]] : drafts[places[c]];
                pool.add(estimates, i, level, k, level ? above[n] : 0, best.data(), children.data());
            }
            if (level == levels - 1) break;
            const std::vector<int64_t> chosen = best_of(pool.scores.data() + start, (int64_t)pool.scores.size() - start, k);
            for (int c = 0; c < k; c++) {
                const int64_t node = start + (level ? chosen[c] : c);
                pool.parents.push_back(node), above[c] = pool.scores[node], fed[c] = pool.tokens[node];
            }
        }
    }
    return select(pools, out);
}

}  // namespace
