// EAGLE's draft-extend and draft steps, one call each, for heads that are Llama-like decoders. The references are
// eagle_server/worker/drafters/eagle.py, eagle_server/speculation/candidates.py and the heads in eagle_server/models/drafts.
#pragma once

#include <numeric>

#include "decoder.h"
#include "sampling.h"

namespace {

enum Residual : int32_t { JOINED, HIDDEN, NORMED_HIDDEN };

struct Head {
    Decoder decoder;
    Packed combine;  // from features to hidden states; data null: features are hidden states
    Packed joined;   // from embedding and hidden state, side by side, to the decoder's input; data null: these are the input
    Packed lm_head;
    const void* embed;         // [vocab, hidden]
    const float* embed_norm;   // null: none
    const float* hidden_norm;  // null: none
    const int64_t* ids;        // target ids of the draft's tokens; null: the same
    int32_t embed_is_bf16, uses_hidden;
    int32_t residual;     // a Residual: the stream before the first layer
    int32_t feeds_normed; // the feedback is the normed stream
    float embed_scale;    // of embeddings
};

// The requests of a call, and whose noise ranks the children of their roots: keys and temperature null: none.
struct Requests {
    int32_t count, topk;
    const int64_t* seq_lens;
    const int64_t* extend_lens;
    const int64_t* req_pool_indices;
    const int32_t* req_to_token;
    int64_t table_width;
    const int64_t* keys;
    const int64_t* positions;
    const float* temperature;
};

// Tokens and features [count, width] by row of the page table: what the target accepted.
struct Accepted {
    const int64_t* tokens;
    const void* features;
    int32_t features_are_bf16, width, feature_size;
};

// What corrects a drafter's guesses: AcceptanceEstimates of eagle_server/worker/budget/estimates.py. ratios null: nothing does.
struct Estimates {
    const float* ratios;             // [temperatures, depths, 2, edges + 1]: of a node's first child, and of the others
    const float* edges;              // ascending
    const int64_t* temperature_bin;  // [requests]
    int32_t depths, edge_count;
    float most;

    float corrected(float guess, int request, int level, int rank) const {
        if (!ratios) return guess;
        int64_t bin = std::lower_bound(edges, edges + edge_count, guess) - edges;
        int64_t group = 2 * (temperature_bin[request] * depths + std::min(level, depths - 1)) + (rank > 0);
        return std::min(ratios[group * (edge_count + 1) + bin] + guess, most);
    }
};

const float* widened(const void* from, bool is_bf16, int64_t place, int size, float* room) {
    if (!is_bf16) return (const float*)from + place;
    for (int i = 0; i < size; i += LANES) {
        int n = std::min(LANES, size - i);
        store_some(room + i, load_some_bf16((const uint16_t*)from + place + i, n), n);
    }
    return room;
}

// hidden [rows, hidden] -> the feedback, and in `normed` what the logits are made of. `normed` may be the feedback.
// `kv_only`: neither is computed.
const float* head_forward(
    Session& s, const Head& h, const Batch& batch, const int64_t* tokens, const float* hidden, const float*& normed,
    bool kv_only = false) {
    const int rows = batch.rows, size = h.decoder.hidden, width = h.uses_hidden ? 2 * size : size;
    float* parts = Session::room(s.parts, (int64_t)rows * width);
    for_rows(s.team, rows, width, [&](int r) {
        float* to = parts + (int64_t)r * width;
        const float* embedded = widened(h.embed, h.embed_is_bf16, tokens[r] * size, size, to);
        if (h.embed_norm) rms_norm(embedded, h.embed_norm, h.decoder.eps, size, to);
        else if (embedded != to) memcpy(to, embedded, 4 * size);
        for (int i = 0; i < size && h.embed_scale != 1.0f; i++) to[i] *= h.embed_scale;
        if (!h.uses_hidden) return;
        const float* own = hidden + (int64_t)r * size;
        if (h.hidden_norm) rms_norm(own, h.hidden_norm, h.decoder.eps, size, to + size);
        else memcpy(to + size, own, 4 * size);
    });
    float *stream = Session::room(s.stream, (int64_t)rows * size), *after = Session::room(s.after, (int64_t)rows * size);
    if (h.joined.data) product(s, h.joined, parts, rows, stream);
    else
        for (int64_t r = 0; r < rows; r++) {
            const float* from = h.residual == HIDDEN ? hidden + r * size : parts + r * width + (h.residual == NORMED_HIDDEN ? size : 0);
            memcpy(stream + r * size, from, 4 * size);
        }
    decode(s, h.decoder, batch, h.joined.data ? stream : parts, stream, after, nullptr, kv_only);
    normed = h.decoder.norm ? after : stream;
    return h.feeds_normed ? normed : stream;
}

// The topk children of `rows` nodes, whose requests are rows / count each: log-probabilities and target ids.
void children(Session& s, const Head& h, const Requests& q, const float* normed, int rows, int level, float* logp, int64_t* tokens) {
    const int vocab = h.lm_head.out, nodes = rows / q.count;
    float* logits = Session::room(s.logits, (int64_t)rows * vocab);
    product(s, h.lm_head, normed, rows, logits);
    std::vector<int64_t> keys(rows), positions(rows);
    std::vector<float> temperature(rows);
    for (int r = 0; r < rows && q.temperature; r++) {
        int request = r / nodes;
        keys[r] = q.keys[request], positions[r] = q.positions[request] + level, temperature[r] = q.temperature[request];
    }
    Scoring scoring{logits, keys.data(), positions.data(), q.temperature ? temperature.data() : nullptr, h.ids, vocab, rows, vocab};
    best_tokens(s, scoring, q.topk, logp, tokens);
    for (int i = 0; i < rows * q.topk && h.ids; i++) tokens[i] = h.ids[tokens[i]];
}

double head_nanoseconds(const Head& h, const Batch& batch) {
    double whole = decode_nanoseconds(h.decoder, batch) + nanoseconds(h.lm_head, batch.rows);
    for (const Packed* w : {&h.joined, &h.combine})
        if (w->data) whole += nanoseconds(*w, batch.rows);
    return whole;
}

// The rows of one forward of the head. Row r of request i stands at the given place of its text.
struct Rows {
    std::vector<int64_t> positions, slots, kv_lens, row_depths, column_depths;
    std::vector<int32_t> qo_indptr{0};
    std::vector<uint8_t> visible;

    // A place outside the table has slot -1, which `is_inside` refuses.
    void add(const Requests& q, int request, int64_t position, int64_t place) {
        bool inside = place >= 0 && place < q.table_width;
        positions.push_back(position);
        slots.push_back(inside ? q.req_to_token[q.req_pool_indices[request] * q.table_width + place] : -1);
    }

    void close(int64_t kv_len) {
        kv_lens.push_back(kv_len);
        qo_indptr.push_back((int32_t)positions.size());
    }

    Batch batch(const Requests& q, int mask_rows, int mask_columns) const {
        bool masked = !visible.empty();
        return {(int32_t)positions.size(), q.count, positions.data(), slots.data(), qo_indptr.data(), q.req_pool_indices, kv_lens.data(),
                q.req_to_token, masked ? visible.data() : nullptr, row_depths.data(), column_depths.data(), mask_rows, mask_columns,
                masked ? q.count : 0, q.table_width};
    }
};

// Features [rows, size] to hidden states.
const float* combined(Session& s, const Head& h, const float* features, int rows) {
    if (!h.combine.data) return features;
    float* to = Session::room(s.hidden, (int64_t)rows * h.decoder.hidden);
    product(s, h.combine, features, rows, to);
    return to;
}

// Writes the draft's KV of prompt rows, whose outputs nobody reads. tokens [rows], features [rows, size], or null if hidden
// states are not used. Returns 1, and computes nothing, if a position or slot does not exist.
int draft_prefill(Session& s, const Head& h, const Batch& batch, const int64_t* tokens, const float* features) {
    if (!is_inside(h.decoder, batch)) return 1;
    Team::Together together(s.team, head_nanoseconds(h, batch));
    const float *hidden = features ? combined(s, h, features, batch.rows) : nullptr, *normed;
    head_forward(s, h, batch, tokens, hidden, normed, true);
    return 0;
}

// Rewrites the draft's KV of the accepted tokens. feedback [count, hidden] is of each request's newest token; logp and tokens
// [count, topk] are its children. Returns 1, and computes nothing, if a position or slot does not exist.
int draft_extend(Session& s, const Head& h, const Requests& q, const Accepted& accepted, float* feedback, float* logp, int64_t* tokens) {
    Rows rows;
    std::vector<int64_t> own, from;
    for (int i = 0; i < q.count; i++) {
        int64_t first = q.seq_lens[i] - q.extend_lens[i];
        if (q.extend_lens[i] < 1 || q.extend_lens[i] > accepted.width) return 1;
        for (int64_t j = 0; j < q.extend_lens[i]; j++) {
            rows.add(q, i, first + j, first + j);
            from.push_back(q.req_pool_indices[i] * accepted.width + j);
            own.push_back(accepted.tokens[from.back()]);
        }
        rows.close(q.seq_lens[i]);
    }
    Batch batch = rows.batch(q, 0, 0);
    if (!is_inside(h.decoder, batch)) return 1;
    Team::Together together(s.team, head_nanoseconds(h, batch));
    const int size = h.decoder.hidden, wide = accepted.feature_size;
    float* features = Session::room(s.features, (int64_t)batch.rows * wide);
    for (int64_t r = 0; r < batch.rows && h.uses_hidden; r++) {
        const float* found = widened(accepted.features, accepted.features_are_bf16, from[r] * wide, wide, features + r * wide);
        if (found != features + r * wide) memcpy(features + r * wide, found, 4 * wide);
    }
    const float *hidden = combined(s, h, features, batch.rows), *normed;
    const float* fed = head_forward(s, h, batch, own.data(), hidden, normed);
    std::vector<float> newest((int64_t)q.count * size);
    for (int64_t i = 0; i < q.count; i++) {
        int64_t row = rows.qo_indptr[i + 1] - 1;
        memcpy(feedback + i * size, fed + row * size, 4 * size);
        memcpy(newest.data() + i * size, normed + row * size, 4 * size);
    }
    children(s, h, q, newest.data(), q.count, 0, logp, tokens);
    return 0;
}

// What the draft steps of one request have found, by pool index: see CandidatePool.
struct Pool {
    std::vector<int64_t> tokens, parents{-1};
    std::vector<float> scores, guesses;

    // Adds the k children of a node whose path has the score `above`.
    void add(const Estimates& estimates, int request, int level, int k, float above, const float* logp, const int64_t* children) {
        for (int c = 0; c < k; c++) {
            tokens.push_back(children[c]), guesses.push_back(logp[c]);
            scores.push_back(above + estimates.corrected(logp[c], request, level, c));
        }
    }
};

float finite(float score) { return score == score ? score : -INFINITY; }

// The first `count` of `scores`, descending; ties go to the lower index.
std::vector<int64_t> best_of(const float* scores, int64_t size, int64_t count) {
    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
        return finite(scores[a]) > finite(scores[b]) || (finite(scores[a]) == finite(scores[b]) && a < b);
    });
    order.resize(count);
    return order;
}

struct Candidates {
    int64_t* tokens;          // [requests, nodes], as selected, scores and guesses; room for `count` nodes
    int64_t* selected_index;
    int64_t* parent_list;     // [requests, topk * steps + 1]
    float* scores;
    float* guesses;
    int32_t count;
    float least;  // nodes with a lower score are padding, token -1
};

// The best candidates of all pools, whose parent lists are complete. Returns how many nodes the largest tree has without padding.
int select(const std::vector<Pool>& pools, const Candidates& out) {
    const int64_t groups = pools.empty() ? 0 : (int64_t)pools[0].parents.size();
    std::vector<std::vector<int64_t>> best;
    int nodes = 0;
    for (const Pool& pool : pools) {
        best.push_back(best_of(pool.scores.data(), pool.scores.size(), out.count));
        while (nodes < out.count && finite(pool.scores[best.back()[nodes]]) >= out.least) nodes++;
    }
    for (size_t i = 0; i < pools.size(); i++) {
        const Pool& pool = pools[i];
        best[i].resize(nodes);
        std::sort(best[i].begin(), best[i].end());
        std::copy_n(pool.parents.begin(), groups, out.parent_list + i * groups);
        for (int64_t n = 0; n < nodes; n++) {
            int64_t place = i * nodes + n, own = best[i][n];
            out.selected_index[place] = own, out.guesses[place] = pool.guesses[own];
            out.scores[place] = finite(pool.scores[own]);
            out.tokens[place] = out.scores[place] >= out.least ? pool.tokens[own] : -1;
        }
    }
    return nodes;
}

// `steps` forwards over the topk best nodes of each level, then the best of all. logp, tokens [requests, topk] are the first
// level, hidden [requests * topk, hidden] the feedback at its nodes' parents. Returns how many nodes the largest tree has without
// padding, or -1 if a position or slot does not exist.
int draft_steps(
    Session& s, const Head& h, const Requests& q, const Estimates& estimates, int steps, const float* logp, const int64_t* tokens,
    const float* hidden, const Candidates& out) {
    const int k = q.topk, rows = q.count * k, size = h.decoder.hidden;
    std::vector<Pool> pools(q.count);
    std::vector<int64_t> frontier(tokens, tokens + rows), found(rows * k);
    std::vector<float> scores(rows), guesses(rows * k);
    std::vector<uint8_t> reached;  // [rows, step * k]: the window slots of each node's ancestors
    float* fed = Session::room(s.hidden, (int64_t)rows * size);
    memcpy(fed, hidden, (int64_t)4 * rows * size);
    for (int r = 0; r < rows; r++) {
        Pool& pool = pools[r / k];
        if (r % k == 0) pool.add(estimates, r / k, 0, k, 0, logp + r, tokens + r);
        scores[r] = pool.scores[r % k];
    }
    for (int r = 0; r < rows && steps; r++) pools[r / k].parents.push_back(r % k);
    for (int step = 0; step < steps; step++) {
        const int width = (step + 1) * k;
        Rows level;
        for (int r = 0; r < rows; r++) {
            int request = r / k;
            level.add(q, request, q.seq_lens[request] + step, q.seq_lens[request] + step * k + r % k);
            level.row_depths.push_back(step);
            for (int c = 0; c < width; c++) level.visible.push_back(c < step * k ? reached[(int64_t)r * step * k + c] : c - step * k == r % k);
            if (r % k < k - 1) continue;
            level.close(q.seq_lens[request] + width);
            for (int c = 0; c < width; c++) level.column_depths.push_back(c / k);
        }
        Batch batch = level.batch(q, k, width);
        if (!is_inside(h.decoder, batch)) return -1;
        Team::Together together(s.team, head_nanoseconds(h, batch));
        const float* normed;
        const float* feedback = head_forward(s, h, batch, frontier.data(), fed, normed);
        children(s, h, q, normed, rows, step + 1, guesses.data(), found.data());
        std::vector<uint8_t> seen((int64_t)rows * width);
        for (int i = 0; i < q.count; i++) {
            Pool& pool = pools[i];
            const int64_t start = (int64_t)pool.tokens.size(), first = i * k;
            for (int64_t n = first; n < first + k; n++) pool.add(estimates, i, step + 1, k, scores[n], &guesses[n * k], &found[n * k]);
            if (step == steps - 1) continue;
            std::vector<int64_t> chosen = best_of(pool.scores.data() + start, k * k, k);
            for (int c = 0; c < k; c++) {
                int64_t parent = first + chosen[c] / k;
                pool.parents.push_back(start + chosen[c]);
                frontier[first + c] = pool.tokens[start + chosen[c]], scores[first + c] = pool.scores[start + chosen[c]];
                memcpy(fed + (first + c) * size, feedback + parent * size, 4 * size);
                memcpy(seen.data() + (first + c) * width, level.visible.data() + parent * width, width);
            }
        }
        reached.swap(seen);
    }
    return select(pools, out);
}

}  // namespace
