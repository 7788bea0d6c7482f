// The layers of a decoder, and norms and rotations.
#pragma once

#include "convolution.h"
#include "experts.h"
#include "recurrent.h"

namespace {

// What latent attention has beside the layer: qkv makes a compressed query, which may lack, and the latent with its rotated part; q_norm and
// k_norm are of both. Keys and values of the cache are the same.
struct Latent {
    Packed queries;       // [heads * (inputs + rotary), ..]; data null: the layer has keys and values
    Packed absorb;        // [heads * rank, inputs]: of each head W_UK, transposed; each head has rows of zeros up to a multiple of GROUP
    Packed values;        // [heads * value size, rank]: of each head W_UV; the same
    float eps;            // of both norms
    float q_scale, kv_scale;  // on what they give
    int32_t interleaved;  // whether the pairs (2 i, 2 i + 1) are rotated
};

struct Layer {
    Packed qkv, o;         // qkv may lack values, which are the keys then, or both: another layer writes the cache; data null:
                           // the layer neither attends nor is recurrent
    Packed gates;          // of a recurrent layer, b and a; of attention, one number per head; data null: none
    Packed state_gate;     // of a recurrent layer of the rule kda
    Packed gate_up, down;  // of an MLP, or of shared experts; data null: none
    Latent latent;
    Experts experts;       // added to it; data null: none
    Packed narrow, widen;  // before and after the experts, but not the router; data null: none
    Packed tail_gate, tail_projection;  // data null: none
    Convolution attention_convolution, mlp_convolution;
    const float* input_norm;  // null: the input is normed already, and the residual stream is given
    const float* post_norm;   // null: there is neither an MLP nor experts
    const float* q_norm;      // null: none
    const float* k_norm;
    const float* attention_norm;  // of what attention and MLP add to the stream; null: none
    const float* mlp_norm;
    const float* v_norm;
    const float* tail_norm;
    const float* state_norm;   // of a recurrent layer, [value_dim], of ssd [value_heads * value_dim]
    const float* shared_gate;  // [hidden], of shared experts; null: none
    const float* router_norm;  // Gemma 4: router and experts read the stream, each through a norm, and MLP and experts are
    const float* experts_norm;      // normed before they are added; null: experts read what the MLP reads
    const float* dense_out_norm;
    const float* experts_out_norm;
    const float* cos;  // [context, rotary], both; the first half of the sine is negated
    const float* sin;
    int32_t rotary;      // dimensions of a head that are rotated, its first
    int32_t activation;  // RELU2: gate_up has no gate
    int32_t gated;        // whether attention has a gate: then a head's query in qkv is followed by its gate
    int32_t by_key_head;  // whether qkv and gates have the outputs of one key head after the other
    float factor;        // of the stream after the layer
    float added_factor;  // of what is added to the stream
    float limit;         // of the MLP, see gate_mul; 0: none
    Cache cache;
    const Recurrent* recurrent;  // null: the layer attends

    bool attends() const { return o.data && !recurrent; }
};

struct Decoder {
    const Layer* layers;
    const float* norm;  // null: none
    const int32_t* aux_boundaries;
    const float* layer_inputs;  // [rows, count, layer_input_size], of the layers' tails
    const Sequences* sequences;  // of recurrent layers, whose rows are in these groups, one after the other
    int32_t count, hidden, boundaries, context, layer_input_size, groups;
    float eps;
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

// Rotates the pairs (i, i + dim / 2) of the first `dim` dimensions of one head.
void rotate(const float* x, const float* cos, const float* sin, int dim, float* to) {
    alignas(64) float twice[LARGEST_HEAD * 3 / 2];  // x, and its first half again
    memcpy(twice, x, 4 * dim);
    memcpy(twice + dim, x, 2 * dim);
    for (int i = 0; i < dim; i += LANES) {
        int n = std::min(LANES, dim - i);
        Vector other = load_some(twice + i + dim / 2, n);
        store_some(to + i, fma(other, load_some(sin + i, n), load_some(x + i, n) * load_some(cos + i, n)), n);
    }
}

}  // namespace
