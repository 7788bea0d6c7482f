// The plain C interface. Python calls it in eagle_server/ops/native/linear.py, native_decoder.py, native_drafting.py and in
// the twins of gumbel.py, draw.py, topk.py, tree.py and accept.py.
#include "drafting.h"
#include "layout.h"
#include "row_trees.h"
#include "tree.h"

extern "C" {

// See `layout`.
const char* eagle_layout() {
    static const std::string text = layout();
    return text.c_str();
}

Session* eagle_session_new(int threads) { return new Session(threads); }

int64_t eagle_block_bytes(int format, int inputs) { return block_bytes(format, inputs); }

int64_t eagle_packed_bytes(const Packed* w) { return packed_bytes(*w); }

void eagle_pack(Session* s, const Packed* w, const void* weight, void* to) {
    std::lock_guard lock(s->mutex);
    pack(s->team, *w, weight, to);
}

void eagle_unpack(Session* s, const Packed* w, void* weight) {
    std::lock_guard lock(s->mutex);
    unpack(s->team, *w, weight);
}

// y [rows, out] = x [rows, in] W^T + bias.
void eagle_linear(Session* s, const Packed* w, const float* x, int rows, float* y) {
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, nanoseconds(*w, rows));
    product(*s, *w, x, rows, y);
}

// y [rows, hidden]: what the experts of each row make of x [rows, hidden]. routed: what the router reads.
void eagle_experts(Session* s, const Experts* e, const float* x, const float* routed, int rows, float* y) {
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, experts_nanoseconds(*e, rows));
    memset(y, 0, (size_t)4 * rows * e->gate_up.in);
    add_experts(*s, *e, x, routed, rows, y);
}

// The same with experts and weights [rows, k] that are given. Returns 1, and computes nothing, if an expert does not exist.
int eagle_given_experts(
    Session* s, const Experts* e, const float* x, int rows, int k, const int64_t* chosen, const float* weights, float* y) {
    for (int64_t i = 0; i < (int64_t)rows * k; i++)
        if (chosen[i] < 0 || chosen[i] >= e->router.out) return 1;
    std::lock_guard lock(s->mutex);
    Experts these = *e;
    these.chosen = k;
    Team::Together together(s->team, experts_nanoseconds(these, rows));
    memset(y, 0, (size_t)4 * rows * e->gate_up.in);
    add_experts(*s, these, x, x, rows, y, chosen, weights);
    return 0;
}

// q [rows, heads, head_dim] over the cache, after k and v [rows, kv_heads, head_dim] are written to it.
void eagle_attention(
    Session* s, const Batch* batch, const Cache* cache, const float* q, const float* k, const float* v, float* out) {
    std::lock_guard lock(s->mutex);
    int size = cache->kv_heads * cache->head_dim;
    Team::Together together(s->team, attention_nanoseconds(*batch, *cache));
    if (k)
        for_rows(s->team, batch->rows, size, [&](int r) {
            write_row(*batch, *cache, r, k + (int64_t)r * size, v + (int64_t)r * size);
        });
    s->attend(*batch, *cache, q, out);
}

// See `decode`. Returns 1, and computes nothing, if a position or slot does not exist.
int eagle_decode(
    Session* s, const Decoder* d, const Batch* batch, const float* x, float* stream, float* hidden, float* aux) {
    if (!is_inside(*d, *batch)) return 1;
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, decode_nanoseconds(*d, *batch));
    decode(*s, *d, *batch, x, stream, hidden, aux);
    return 0;
}

// See `write_context`. Returns 1, and computes nothing, if a position or slot does not exist.
int eagle_write_context(Session* s, const Decoder* d, const Packed* combine, const Batch* batch, const float* features) {
    if (!is_inside(*d, *batch)) return 1;
    std::lock_guard lock(s->mutex);
    double expected = nanoseconds(*combine, batch->rows);
    for (const Layer* l = d->layers; l < d->layers + d->count; l++) expected += nanoseconds(l->qkv, batch->rows) / 2;
    Team::Together together(s->team, expected);
    write_context(*s, *d, *combine, *batch, features);
    return 0;
}

// See `recur`. Returns 1, and computes nothing, if the pool does not hold the trees.
int eagle_recur(
    Session* s, const Recurrent* layer, const Sequences* groups, int number, const float* x, const float* gates, float* out) {
    if (!holds_trees(*layer, groups, number)) return 1;
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, recurrent_nanoseconds(*layer, groups, number));
    recur(*s, *layer, groups, number, x, gates, out);
    return 0;
}

// See `keep_states`. rows: of the pool. Returns 1, and moves nothing, if a row or a node does not exist.
int eagle_keep_states(
    Session* s, const Recurrent* layers, int number, const int64_t* path, const int64_t* requests, int count, int steps, int rows) {
    for (int i = 0; i < count; i++) {
        if (requests[i] < 0 || requests[i] >= rows) return 1;
        for (int j = 0; j < steps; j++)
            if (path[(int64_t)i * steps + j] >= layers->nodes) return 1;
    }
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, 0.3 * number * count * layers->value_heads * layers->key_dim * layers->value_dim);
    keep_states(*s, layers, number, path, requests, count, steps);
    return 0;
}

// noise [rows, vocab]
void eagle_gumbel(Session* s, const Scoring* scoring, float* noise) {
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, scoring->nanoseconds());
    s->team.run(scoring->rows, scoring->nanoseconds(), [&](int row, int) { fill_noise(*scoring, row, noise + (int64_t)row * scoring->vocab); });
}

// tokens, scores [rows]
void eagle_draw(Session* s, const Scoring* scoring, int64_t* tokens, float* scores) {
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, scoring->nanoseconds());
    draw(*s, *scoring, tokens, scores);
}

// logp, tokens [rows, k]
void eagle_best_tokens(Session* s, const Scoring* scoring, int k, float* logp, int64_t* tokens) {
    std::lock_guard lock(s->mutex);
    Team::Together together(s->team, scoring->nanoseconds());
    best_tokens(*s, *scoring, k, logp, tokens);
}

// selected [bs, drafted], above [bs, groups]; parents, depths [bs, nodes], mask [bs, nodes, nodes]. Returns 1 if an index of
// `selected` is outside the pool or not behind its parent.
int eagle_link_trees(
    const int64_t* selected, const int64_t* above, int bs, int drafted, int groups, int topk, int64_t* parents, int64_t* depths,
    uint8_t* mask) {
    int64_t nodes = drafted + 1;
    for (int64_t i = 0; i < bs; i++)
        if (!link_tree(
                selected + i * drafted, above + i * groups, drafted, groups, topk, parents + i * nodes, depths + i * nodes,
                mask + i * nodes * nodes))
            return 1;
    return 0;
}

// `trees`: the first of `bs`. path, tokens [bs, steps + 1], accept_length, finite [bs]. Returns 1 if a depth is above `steps`, or
// a parent is no node.
int eagle_walk_trees(const Tree* trees, int bs, int64_t* path, int64_t* accept_length, int64_t* tokens, uint8_t* finite) {
    int64_t nodes = trees->nodes, width = trees->steps + 1;
    for (int64_t i = 0; i < bs; i++) {
        Tree tree{trees->tokens + i * nodes, trees->parents + i * nodes, trees->depths + i * nodes, trees->mask + i * nodes * nodes,
                  trees->drawn + i * nodes, trees->finite + i * nodes, trees->nodes, trees->steps};
        if (!is_tree(tree)) return 1;
        finite[i] = walk_tree(tree, path + i * width, accept_length + i, tokens + i * width);
    }
    return 0;
}

// `trees`: the first of those that were verified, without masks and draws. numbers: of those that were drafted; null: all.
// temperatures [drafted], guesses [drafted, width], path [.., steps + 1] and proposed [.., nodes - 1] by number; null: see `Counts`.
// Returns 1 if a depth is above `steps`, or a parent or place is none.
int eagle_count_accepted(
    const Counts* counts, const Tree* trees, int drafted, const int64_t* numbers, const int64_t* temperatures, const int64_t* path,
    const float* guesses, int width, const int64_t* proposed) {
    const int64_t nodes = trees->nodes, steps = trees->steps;
    for (int64_t i = 0; i < drafted; i++) {
        const int64_t number = numbers ? numbers[i] : i, *places = proposed ? proposed + number * (nodes - 1) : nullptr;
        const Tree tree{trees->tokens + number * nodes, trees->parents + number * nodes, trees->depths + number * nodes, nullptr, nullptr, nullptr, trees->nodes, trees->steps};
        if (!is_tree(tree) || (!places && width < nodes - 1)) return 1;
        for (int node = 1; node < nodes && places; node++)
            if (places[node - 1] < 0 || places[node - 1] >= width) return 1;
        counts->add(tree, temperatures[i], path + number * (steps + 1), guesses + i * width, places);
    }
    return 0;
}

int eagle_draft_prefill(Session* s, const Head* head, const Batch* batch, const int64_t* tokens, const float* features) {
    std::lock_guard lock(s->mutex);
    return draft_prefill(*s, *head, *batch, tokens, features);
}

int eagle_draft_extend(
    Session* s, const Head* head, const Requests* requests, const Accepted* accepted, float* feedback, float* logp, int64_t* tokens) {
    std::lock_guard lock(s->mutex);
    return draft_extend(*s, *head, *requests, *accepted, feedback, logp, tokens);
}

// See `row_trees`. selector: null: rows score alike below all parents.
int eagle_row_trees(
    Session* s, const Scoring* scoring, const Selector* selector, int requests, int k, const Estimates* estimates, const Candidates* out) {
    std::lock_guard lock(s->mutex);
    return row_trees(*s, *scoring, selector, requests, k, *estimates, *out);
}

int eagle_draft_steps(
    Session* s, const Head* head, const Requests* requests, const Estimates* estimates, int steps, const float* logp,
    const int64_t* tokens, const float* hidden, const Candidates* out) {
    std::lock_guard lock(s->mutex);
    return draft_steps(*s, *head, *requests, *estimates, steps, logp, tokens, hidden, *out);
}

// Moves the rows of `size` bytes of the nodes path [bs, width] to the front of their windows, in every plane of data
// [planes, slots, size]. Windows begin at positions seq_lens of the rows req_pool_indices of the page table [table_rows,
// table_width]. Returns 1, and moves nothing, if a position or slot does not exist.
int eagle_keep(
    char* data, const int64_t* path, const int64_t* seq_lens, const int64_t* req_pool_indices, const int32_t* req_to_token,
    int bs, int width, int planes, int64_t slots, int64_t size, int64_t table_rows, int64_t table_width) {
    for (int i = 0; i < bs; i++) {
        if (req_pool_indices[i] < 0 || req_pool_indices[i] >= table_rows || seq_lens[i] < 0) return 1;
        const int32_t* window = req_to_token + req_pool_indices[i] * table_width + seq_lens[i];
        for (int j = 1; j < width && path[i * width + j] >= 0; j++)
            for (int64_t node : {(int64_t)j, path[i * width + j]})
                if (seq_lens[i] + node >= table_width || window[node] < 0 || window[node] >= slots) return 1;
    }
    for (int i = 0; i < bs; i++) {
        const int32_t* window = req_to_token + req_pool_indices[i] * table_width + seq_lens[i];
        for (int j = 1; j < width && path[i * width + j] >= 0; j++) {
            const int64_t source = window[path[i * width + j]], target = window[j];
            if (source == target) continue;
            for (int64_t p = 0; p < planes; p++) memcpy(data + (p * slots + target) * size, data + (p * slots + source) * size, size);
        }
    }
    return 0;
}
}
