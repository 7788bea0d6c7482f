"""The structures of kernels/cpu's plain C interface, field by field as in the headers."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p, sizeof


class PackedStruct(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("kind", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("quant_group", c_int32),
        ("places", c_void_p),
        ("formats", c_void_p),
        ("order", c_void_p),
    )


class BatchStruct(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("requests", c_int32),
        ("positions", c_void_p),
        ("out_cache_loc", c_void_p),
        ("qo_indptr", c_void_p),
        ("req_pool_indices", c_void_p),
        ("kv_lens", c_void_p),
        ("req_to_token", c_void_p),
        ("visible", c_void_p),
        ("row_depths", c_void_p),
        ("column_depths", c_void_p),
        ("mask_rows", c_int32),
        ("mask_columns", c_int32),
        ("masked", c_int32),
        ("table_width", c_int64),
    )


class CacheStruct(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("is_bf16", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("slots", c_int64),
        ("sinks", c_void_p),
    )


class ExpertsStruct(Structure):
    _fields_ = (
        ("router", PackedStruct),
        ("gate_up", PackedStruct),
        ("down", PackedStruct),
        ("correction", c_void_p),
        ("factors", c_void_p),
        ("identities", c_int32),
        ("adds_identities", c_int32),
        ("chosen", c_int32),
        ("groups", c_int32),
        ("chosen_groups", c_int32),
        ("group_best", c_int32),
        ("scores", c_int32),
        ("normalize", c_int32),
        ("activation", c_int32),
        ("scale", c_float),
        ("limit", c_float),
        ("alpha", c_float),
    )


class LatentStruct(Structure):
    _fields_ = (
        ("queries", PackedStruct),
        ("absorb", PackedStruct),
        ("values", PackedStruct),
        ("eps", c_float),
        ("q_scale", c_float),
        ("kv_scale", c_float),
        ("interleaved", c_int32),
    )


class ConvolutionStruct(Structure):
    _fields_ = (
        ("projection", PackedStruct),
        ("base", c_void_p),
        ("taps", c_int32),
        ("group", c_int32),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("qkv", PackedStruct),
        ("o", PackedStruct),
        ("gates", PackedStruct),
        ("state_gate", PackedStruct),
        ("gate_up", PackedStruct),
        ("down", PackedStruct),
        ("latent", LatentStruct),
        ("experts", ExpertsStruct),
        ("narrow", PackedStruct),
        ("widen", PackedStruct),
        ("tail_gate", PackedStruct),
        ("tail_projection", PackedStruct),
        ("attention_convolution", ConvolutionStruct),
        ("mlp_convolution", ConvolutionStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("v_norm", c_void_p),
        ("tail_norm", c_void_p),
        ("state_norm", c_void_p),
        ("shared_gate", c_void_p),
        ("router_norm", c_void_p),
        ("experts_norm", c_void_p),
        ("dense_out_norm", c_void_p),
        ("experts_out_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("by_key_head", c_int32),
        ("factor", c_float),
        ("added_factor", c_float),
        ("limit", c_float),
        ("cache", CacheStruct),
        ("recurrent", c_void_p),
    )


class DecoderStruct(Structure):
    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("aux_boundaries", c_void_p),
        ("layer_inputs", c_void_p),
        ("sequences", c_void_p),
        ("count", c_int32),
        ("hidden", c_int32),
        ("boundaries", c_int32),
        ("context", c_int32),
        ("layer_input_size", c_int32),
        ("groups", c_int32),
        ("eps", c_float),
    )


class ScoringStruct(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("keys", c_void_p),
        ("positions", c_void_p),
        ("temperature", c_void_p),
        ("ids", c_void_p),
        ("stride", c_int64),
        ("rows", c_int32),
        ("vocab", c_int32),
    )


class TreeStruct(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("mask", c_void_p),
        ("drawn", c_void_p),
        ("finite", c_void_p),
        ("nodes", c_int32),
        ("steps", c_int32),
    )


class HeadStruct(Structure):
    _fields_ = (
        ("decoder", DecoderStruct),
        ("combine", PackedStruct),
        ("joined", PackedStruct),
        ("lm_head", PackedStruct),
        ("embed", c_void_p),
        ("embed_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("ids", c_void_p),
        ("embed_is_bf16", c_int32),
        ("uses_hidden", c_int32),
        ("residual", c_int32),
        ("feeds_normed", c_int32),
        ("embed_scale", c_float),
    )


class RequestsStruct(Structure):
    _fields_ = (
        ("count", c_int32),
        ("topk", c_int32),
        ("seq_lens", c_void_p),
        ("extend_lens", c_void_p),
        ("req_pool_indices", c_void_p),
        ("req_to_token", c_void_p),
        ("table_width", c_int64),
        ("keys", c_void_p),
        ("positions", c_void_p),
        ("temperature", c_void_p),
    )


class AcceptedStruct(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("features", c_void_p),
        ("features_are_bf16", c_int32),
        ("width", c_int32),
        ("feature_size", c_int32),
    )


class EstimatesStruct(Structure):
    _fields_ = (
        ("ratios", c_void_p),
        ("edges", c_void_p),
        ("temperature_bin", c_void_p),
        ("depths", c_int32),
        ("edge_count", c_int32),
        ("most", c_float),
    )


class SelectorStruct(Structure):
    _fields_ = (
        ("before", c_void_p),
        ("after", c_void_p),
        ("mixed", c_void_p),
        ("roots", c_void_p),
        ("rank", c_int32),
        ("is_bf16", c_int32),
        ("candidates", c_int32),
    )


class CountsStruct(Structure):
    _fields_ = (
        ("accepted", c_void_p),
        ("expected", c_void_p),
        ("ratios", c_void_p),
        ("edges", c_void_p),
        ("depths", c_int32),
        ("edge_count", c_int32),
        ("memory", c_double),
        ("prior", c_double),
    )


class CandidatesStruct(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("selected_index", c_void_p),
        ("parent_list", c_void_p),
        ("scores", c_void_p),
        ("guesses", c_void_p),
        ("count", c_int32),
        ("least", c_float),
    )


class RecurrentStruct(Structure):
    _fields_ = (
        ("conv", c_void_p),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("conv_bias", c_void_p),
        ("skip", c_void_p),
        ("states", c_void_p),
        ("rings", c_void_p),
        ("inputs", c_void_p),
        ("keys", c_void_p),
        ("updates", c_void_p),
        ("decays", c_void_p),
        ("is_bf16", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("kernel", c_int32),
        ("nodes", c_int32),
        ("rule", c_int32),
        ("least_step", c_float),
        ("largest_step", c_float),
    )


class SequencesStruct(Structure):
    _fields_ = (
        ("qo_indptr", c_void_p),
        ("req_pool_indices", c_void_p),
        ("starts", c_void_p),
        ("parents", c_void_p),
        ("saved", c_void_p),
        ("count", c_int32),
        ("width", c_int32),
        ("saves", c_int32),
    )


_STRUCTS = (
    PackedStruct,
    BatchStruct,
    CacheStruct,
    ExpertsStruct,
    LatentStruct,
    ConvolutionStruct,
    LayerStruct,
    DecoderStruct,
    ScoringStruct,
    TreeStruct,
    HeadStruct,
    RequestsStruct,
    AcceptedStruct,
    EstimatesStruct,
    CountsStruct,
    SelectorStruct,
    CandidatesStruct,
    RecurrentStruct,
    SequencesStruct,
)


def check_layout(table: str, structs: Sequence[type[Structure]] = _STRUCTS) -> None:
    """Compare sizes and offsets with those of the compiled kernels: lines `name size field:offset:size ...`.

    Raises:
        RuntimeError: a structure differs; the message names it and its first field that does.
    """
    lines = {words[0]: words[1:] for line in table.splitlines() if (words := line.split())}
    for struct in structs:
        name = struct.__name__.removesuffix("Struct")
        size, *compiled = lines.pop(name, ["0"])
        own = [(field[0], getattr(struct, field[0])) for field in struct._fields_]
        for number, (field, place) in enumerate(own):
            theirs = compiled[number] if number < len(compiled) else "nothing"
            if not theirs.endswith(f":{place.offset}:{place.size}"):
                raise RuntimeError(
                    f"kernels/cpu: {name}.{field}: offset {place.offset} and size {place.size} here, but the kernels "
                    f"have {theirs}; native_structs.py and the header must agree"
                )
        if len(compiled) != len(own) or int(size) != sizeof(struct):
            here, there = f"{len(own)} fields in {sizeof(struct)} bytes", f"{len(compiled)} in {size}"
            raise RuntimeError(f"kernels/cpu: {name}: {here} here, {there} there")
    if lines:
        raise RuntimeError(f"kernels/cpu: {', '.join(lines)}: not in native_structs.py")
