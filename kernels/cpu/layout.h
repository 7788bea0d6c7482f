// Where the fields of the interface's structures are. eagle_server/ops/native/structs.py compares its own with these when
// the library is loaded, so a field that was added on one side alone ends the start, and is no memory corruption.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "row_trees.h"
#include "recurrent.h"
#include "tree.h"

namespace {

struct Anything {
    template <class T> operator T() const;
};

template <class T, class... Given> auto takes(int) -> decltype(T{std::declval<Given>()...}, std::true_type{});
template <class T, class...> auto takes(...) -> std::false_type;

// How many fields a structure has, so that a table cannot forget one.
template <class T, class... Given> constexpr int count_fields() {
    if constexpr (decltype(takes<T, Given..., Anything>(0))::value)
        return count_fields<T, Given..., Anything>();
    else
        return sizeof...(Given);
}

struct Field {
    const char* name;
    size_t offset, size;
};

// A line: the structure's name and size, then name:offset:size of each field.
template <class T, size_t count> std::string described(const char* name, const Field (&fields)[count]) {
    static_assert(count == count_fields<T>(), "every field of the structure stands in its table");
    std::string line = std::string(name) + " " + std::to_string(sizeof(T));
    for (const Field& field : fields)
        line += std::string(" ") + field.name + ":" + std::to_string(field.offset) + ":" + std::to_string(field.size);
    return line + "\n";
}

#define FIELD(type, name) Field{#name, offsetof(type, name), sizeof(type::name)}

std::string layout() {
    std::string text;
    {
        using T = Packed;
        text += described<T>("Packed", {FIELD(T, data), FIELD(T, bias), FIELD(T, scales), FIELD(T, zeros), FIELD(T, kind), FIELD(T, in), FIELD(T, out), FIELD(T, quant_group), FIELD(T, places), FIELD(T, formats), FIELD(T, order)});
    }
    {
        using T = Batch;
        text += described<T>("Batch", {FIELD(T, rows), FIELD(T, requests), FIELD(T, positions), FIELD(T, out_cache_loc), FIELD(T, qo_indptr), FIELD(T, req_pool_indices), FIELD(T, kv_lens), FIELD(T, req_to_token), FIELD(T, visible), FIELD(T, row_depths), FIELD(T, column_depths), FIELD(T, mask_rows), FIELD(T, mask_columns), FIELD(T, masked), FIELD(T, table_width)});
    }
    {
        using T = Cache;
        text += described<T>("Cache", {FIELD(T, keys), FIELD(T, values), FIELD(T, is_bf16), FIELD(T, heads), FIELD(T, kv_heads), FIELD(T, head_dim), FIELD(T, scale), FIELD(T, softcap), FIELD(T, window), FIELD(T, slots), FIELD(T, sinks)});
    }
    {
        using T = Experts;
        text += described<T>("Experts", {FIELD(T, router), FIELD(T, gate_up), FIELD(T, down), FIELD(T, correction), FIELD(T, factors), FIELD(T, identities), FIELD(T, adds_identities), FIELD(T, chosen), FIELD(T, groups), FIELD(T, chosen_groups), FIELD(T, group_best), FIELD(T, scores), FIELD(T, normalize), FIELD(T, activation), FIELD(T, scale), FIELD(T, limit), FIELD(T, alpha)});
    }
    {
        using T = Latent;
        text += described<T>("Latent", {FIELD(T, queries), FIELD(T, absorb), FIELD(T, values), FIELD(T, eps), FIELD(T, q_scale), FIELD(T, kv_scale), FIELD(T, interleaved)});
    }
    {
        using T = Convolution;
        text += described<T>("Convolution", {FIELD(T, projection), FIELD(T, base), FIELD(T, taps), FIELD(T, group)});
    }
    {
        using T = Layer;
        text += described<T>("Layer", {FIELD(T, qkv), FIELD(T, o), FIELD(T, gates), FIELD(T, state_gate), FIELD(T, gate_up), FIELD(T, down), FIELD(T, latent), FIELD(T, experts), FIELD(T, narrow), FIELD(T, widen), FIELD(T, tail_gate), FIELD(T, tail_projection), FIELD(T, attention_convolution), FIELD(T, mlp_convolution), FIELD(T, input_norm), FIELD(T, post_norm), FIELD(T, q_norm), FIELD(T, k_norm), FIELD(T, attention_norm), FIELD(T, mlp_norm), FIELD(T, v_norm), FIELD(T, tail_norm), FIELD(T, state_norm), FIELD(T, shared_gate), FIELD(T, router_norm), FIELD(T, experts_norm), FIELD(T, dense_out_norm), FIELD(T, experts_out_norm), FIELD(T, cos), FIELD(T, sin), FIELD(T, rotary), FIELD(T, activation), FIELD(T, gated), FIELD(T, by_key_head), FIELD(T, factor), FIELD(T, added_factor), FIELD(T, limit), FIELD(T, cache), FIELD(T, recurrent)});
    }
    {
        using T = Decoder;
        text += described<T>("Decoder", {FIELD(T, layers), FIELD(T, norm), FIELD(T, aux_boundaries), FIELD(T, layer_inputs), FIELD(T, sequences), FIELD(T, count), FIELD(T, hidden), FIELD(T, boundaries), FIELD(T, context), FIELD(T, layer_input_size), FIELD(T, groups), FIELD(T, eps)});
    }
    {
        using T = Scoring;
        text += described<T>("Scoring", {FIELD(T, logits), FIELD(T, keys), FIELD(T, positions), FIELD(T, temperature), FIELD(T, ids), FIELD(T, stride), FIELD(T, rows), FIELD(T, vocab)});
    }
    {
        using T = Tree;
        text += described<T>("Tree", {FIELD(T, tokens), FIELD(T, parents), FIELD(T, depths), FIELD(T, mask), FIELD(T, drawn), FIELD(T, finite), FIELD(T, nodes), FIELD(T, steps)});
    }
    {
        using T = Head;
        text += described<T>("Head", {FIELD(T, decoder), FIELD(T, combine), FIELD(T, joined), FIELD(T, lm_head), FIELD(T, embed), FIELD(T, embed_norm), FIELD(T, hidden_norm), FIELD(T, ids), FIELD(T, embed_is_bf16), FIELD(T, uses_hidden), FIELD(T, residual), FIELD(T, feeds_normed), FIELD(T, embed_scale)});
    }
    {
        using T = Requests;
        text += described<T>("Requests", {FIELD(T, count), FIELD(T, topk), FIELD(T, seq_lens), FIELD(T, extend_lens), FIELD(T, req_pool_indices), FIELD(T, req_to_token), FIELD(T, table_width), FIELD(T, keys), FIELD(T, positions), FIELD(T, temperature)});
    }
    {
        using T = Accepted;
        text += described<T>("Accepted", {FIELD(T, tokens), FIELD(T, features), FIELD(T, features_are_bf16), FIELD(T, width), FIELD(T, feature_size)});
    }
    {
        using T = Estimates;
        text += described<T>("Estimates", {FIELD(T, ratios), FIELD(T, edges), FIELD(T, temperature_bin), FIELD(T, depths), FIELD(T, edge_count), FIELD(T, most)});
    }
    {
        using T = Candidates;
        text += described<T>("Candidates", {FIELD(T, tokens), FIELD(T, selected_index), FIELD(T, parent_list), FIELD(T, scores), FIELD(T, guesses), FIELD(T, count), FIELD(T, least)});
    }
    {
        using T = Selector;
        text += described<T>("Selector", {FIELD(T, before), FIELD(T, after), FIELD(T, mixed), FIELD(T, roots), FIELD(T, rank), FIELD(T, is_bf16), FIELD(T, candidates)});
    }
    {
        using T = Counts;
        text += described<T>("Counts", {FIELD(T, accepted), FIELD(T, expected), FIELD(T, ratios), FIELD(T, edges), FIELD(T, depths), FIELD(T, edge_count), FIELD(T, memory), FIELD(T, prior)});
    }
    {
        using T = Recurrent;
        text += described<T>("Recurrent", {FIELD(T, conv), FIELD(T, a_log), FIELD(T, dt_bias), FIELD(T, conv_bias), FIELD(T, skip), FIELD(T, states), FIELD(T, rings), FIELD(T, inputs), FIELD(T, keys), FIELD(T, updates), FIELD(T, decays), FIELD(T, is_bf16), FIELD(T, key_heads), FIELD(T, value_heads), FIELD(T, key_dim), FIELD(T, value_dim), FIELD(T, kernel), FIELD(T, nodes), FIELD(T, rule), FIELD(T, least_step), FIELD(T, largest_step)});
    }
    {
        using T = Sequences;
        text += described<T>("Sequences", {FIELD(T, qo_indptr), FIELD(T, req_pool_indices), FIELD(T, starts), FIELD(T, parents), FIELD(T, saved), FIELD(T, count), FIELD(T, width), FIELD(T, saves)});
    }
    return text;
}

#undef FIELD

}  // namespace
