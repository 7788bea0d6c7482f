"""The structures of kernels/cpu's plain C interface, field by field as in linear.h, attention.h and decoder.cpp."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p


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
    )


class BatchStruct(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("requests", c_int32),
        ("positions", c_void_p),
        ("out_cache_loc", c_void_p),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("visible", c_void_p),
        ("row_depths", c_void_p),
        ("column_depths", c_void_p),
        ("mask_rows", c_int32),
        ("mask_columns", c_int32),
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
    )


class LayerStruct(Structure):
    _fields_ = (
        ("qkv", PackedStruct),
        ("o", PackedStruct),
        ("gate_up", PackedStruct),
        ("down", PackedStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cache", CacheStruct),
    )


class DecoderStruct(Structure):
    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("aux_boundaries", c_void_p),
        ("count", c_int32),
        ("hidden", c_int32),
        ("boundaries", c_int32),
        ("context", c_int32),
        ("eps", c_float),
    )
