// Forwards of Llama-like decoders on a CPU, one call each. The reference is eagle_server/models/layers.py. Python calls the
// plain C interface in eagle_server/ops/native_linear.py and native_decoder.py.
#include <mutex>

#include "attention.h"
#include "linear.h"

namespace {

struct Layer {
    Packed qkv, o, gate_up, down;
    const float* input_norm;  // null: the input is normed already, and the residual stream is given
    const float* post_norm;
    const float* q_norm;  // null: none
    const float* k_norm;
    Cache cache;
};

struct Decoder {
    const Layer* layers;
    const float* norm;  // null: none
    const float* cos;   // [context, head_dim], both; the first half of the sine is negated
    const float* sin;
    const int32_t* aux_boundaries;
    int32_t count, hidden, boundaries, context;
    float eps;
};

// Threads, and memory that grows with the forwards and is kept.
struct Session {
    explicit Session(int threads) : team(threads), scores(threads) {}

    template <class T> static T* room(std::vector<T>& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
        return buffer.data();
    }

    void attend(const Batch& batch, const Cache& cache, const float* query, float* out) {
        int64_t size = (int64_t)longest_kv(batch) * LANES;
        attend_all(team, batch, cache, query, out, [&](int thread) { return room(scores[thread], size); });
    }

    std::mutex mutex;
    Team team;
    std::vector<float> qkv, q, mixed, normed;
    std::vector<uint32_t> input;
    std::vector<std::vector<float>> scores;
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

// Rotates the pairs (i, i + dim / 2) of one head.
void rotate(const float* x, const float* cos, const float* sin, int dim, float* to) {
    alignas(64) float twice[LARGEST_HEAD * 3 / 2];  // x, and its first half again
    memcpy(twice, x, 4 * dim);
    memcpy(twice + dim, x, 2 * dim);
    for (int i = 0; i < dim; i += LANES)
        store(to + i, fma(load(twice + i + dim / 2), load(sin + i), load(x + i) * load(cos + i)));
}

void silu_mul(const float* gate_up, int size, float* to) {
    for (int i = 0; i < size; i += LANES) {
        int n = std::min(LANES, size - i);
        store_some(to + i, silu(load_some(gate_up + i, n)) * load_some(gate_up + size + i, n), n);
    }
}

constexpr int ROW_TILE = 8;

// `size`: floats of a row.
template <class Work> void for_rows(Team& team, int rows, int size, const Work& work) {
    team.run((rows + ROW_TILE - 1) / ROW_TILE, 0.3 * rows * size, [&](int tile, int) {
        for (int row = tile * ROW_TILE; row < std::min(rows, (tile + 1) * ROW_TILE); row++) work(row);
    });
}

const uint32_t* prepared(Session& s, const Packed& w, const float* x, int rows) {
    int64_t stride = input_stride(w);
    if (is_prepared(w)) return (const uint32_t*)x;
    uint32_t* to = Session::room(s.input, rows * stride);
    for_rows(s.team, rows, w.in, [&](int row) { prepare_row(w, x + (int64_t)row * w.in, to + row * stride); });
    return to;
}

void product(Session& s, const Packed& w, const float* x, int rows, float* y, bool add = false) {
    linear(s.team, w, prepared(s, w, x, rows), rows, y, add);
}

void layer_forward(Session& s, const Decoder& d, const Layer& l, const Batch& batch, const float* x, float* stream) {
    const int rows = batch.rows, hidden = d.hidden, dim = l.cache.head_dim, heads = l.cache.heads, kv = l.cache.kv_heads;
    const int64_t width = (int64_t)(heads + 2 * kv) * dim;
    float* normed = Session::room(s.normed, (int64_t)rows * std::max(hidden, l.qkv.in));
    if (l.input_norm) {
        for_rows(s.team, rows, hidden, [&](int r) {
            rms_norm(stream + (int64_t)r * hidden, l.input_norm, d.eps, hidden, normed + (int64_t)r * hidden);
        });
        x = normed;
    }
    float* qkv = Session::room(s.qkv, rows * width);
    product(s, l.qkv, x, rows, qkv);
    float* q = Session::room(s.q, (int64_t)rows * heads * dim);
    for_rows(s.team, rows, 2 * (int)width, [&](int r) {
        float *from = qkv + r * width, *keys = from + heads * dim;
        const float *cos = d.cos + batch.positions[r] * dim, *sin = d.sin + batch.positions[r] * dim;
        alignas(64) float turned[LARGEST_HEAD];
        for (int h = 0; h < heads + kv; h++) {
            float* head = from + h * dim;
            const float* norm = h < heads ? l.q_norm : l.k_norm;
            if (norm) rms_norm(head, norm, d.eps, dim, head);
            rotate(head, cos, sin, dim, turned);
            memcpy(h < heads ? q + ((int64_t)r * heads + h) * dim : head, turned, 4 * dim);
        }
        write_row(batch, l.cache, r, keys, keys + kv * dim);
    });
    float* mixed = Session::room(s.mixed, (int64_t)rows * std::max(l.o.in, l.down.in));
    s.attend(batch, l.cache, q, mixed);
    product(s, l.o, mixed, rows, stream, true);
    for_rows(s.team, rows, hidden, [&](int r) {
        rms_norm(stream + (int64_t)r * hidden, l.post_norm, d.eps, hidden, normed + (int64_t)r * hidden);
    });
    const int inner = l.down.in;
    if (inner % LANES == 0) {
        gated(s.team, l.gate_up, prepared(s, l.gate_up, normed, rows), rows, mixed);
    } else {
        float* both = Session::room(s.qkv, (int64_t)rows * 2 * inner);
        product(s, l.gate_up, normed, rows, both);
        for_rows(s.team, rows, 8 * inner, [&](int r) { silu_mul(both + (int64_t)r * 2 * inner, inner, mixed + (int64_t)r * inner); });
    }
    product(s, l.down, mixed, rows, stream, true);
}

// Whether all positions and slots exist.
bool is_inside(const Decoder& d, const Batch& batch) {
    for (int r = 0; r < batch.rows; r++) {
        bool found = batch.positions[r] >= 0 && batch.positions[r] < d.context;
        if (!found || batch.out_cache_loc[r] < 0 || batch.out_cache_loc[r] >= d.layers->cache.slots) return false;
    }
    return true;
}

}  // namespace

extern "C" {

Session* eagle_session_new(int threads) { return new Session(threads); }

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
    s->team.expect(nanoseconds(*w, rows));
    product(*s, *w, x, rows, y);
}

// q [rows, heads, head_dim] over the cache, after k and v [rows, kv_heads, head_dim] are written to it.
void eagle_attention(
    Session* s, const Batch* batch, const Cache* cache, const float* q, const float* k, const float* v, float* out) {
    std::lock_guard lock(s->mutex);
    int size = cache->kv_heads * cache->head_dim;
    s->team.expect(attention_nanoseconds(*batch, *cache));
    for_rows(s->team, batch->rows, size, [&](int r) {
        write_row(*batch, *cache, r, k + (int64_t)r * size, v + (int64_t)r * size);
    });
    s->attend(*batch, *cache, q, out);
}

// x: [rows, hidden], or the normed input of the first layer if it has no input norm. stream [rows, hidden]: the residual
// stream before the first layer, then after the last. hidden: its norm. aux [rows, boundaries * hidden]. Returns 1, and
// computes nothing, if a position or slot does not exist.
int eagle_decode(
    Session* s, const Decoder* d, const Batch* batch, const float* x, float* stream, float* hidden, float* aux) {
    if (!is_inside(*d, *batch)) return 1;
    std::lock_guard lock(s->mutex);
    const int64_t size = d->hidden, rows = batch->rows;
    double expected = 0;
    for (const Layer* l = d->layers; l < d->layers + d->count; l++) {
        for (const Packed* w : {&l->qkv, &l->o, &l->gate_up, &l->down}) expected += nanoseconds(*w, rows);
        expected += attention_nanoseconds(*batch, l->cache);
    }
    s->team.expect(expected);
    for (int i = 0; i <= d->count; i++) {
        for (int b = 0; b < d->boundaries; b++)
            if (d->aux_boundaries[b] == i)
                for (int64_t r = 0; r < rows; r++)
                    memcpy(aux + (r * d->boundaries + b) * size, stream + r * size, 4 * size);
        if (i < d->count) layer_forward(*s, *d, d->layers[i], *batch, x, stream);
    }
    if (!d->norm) return 0;
    for_rows(s->team, rows, size, [&](int r) { rms_norm(stream + r * size, d->norm, d->eps, size, hidden + r * size); });
    return 0;
}
}
