"""The structs of model.h and heads.cpp, for ctypes; names and order are the same there."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import ClassVar


class LinearStruct(Structure):
    """A linear layer."""

    _fields_: ClassVar = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
    ]


class LayerStruct(Structure):
    """A decoder layer."""

    _fields_: ClassVar = [
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    ]


class ModelStruct(Structure):
    """A model over one KV pool."""

    _fields_: ClassVar = [
        ("layers", POINTER(LayerStruct)),
        ("layer_count", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("eps", c_float),
        ("head_eps", c_float),
        ("scaling", c_float),
        ("final_norm", c_void_p),
        ("lm_head", LinearStruct),
    ]


class SegmentStruct(Structure):
    """Rows of one sequence."""

    _fields_: ClassVar = [
        ("first", c_int64),
        ("width", c_int64),
        ("start", c_int64),
        ("slots", c_void_p),
        ("visible", c_void_p),
    ]


class StepStruct(Structure):
    """One step."""

    _fields_: ClassVar = [
        ("rows", c_int64),
        ("segment_count", c_int64),
        ("logit_count", c_int64),
        ("threads", c_int64),
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("segments", POINTER(SegmentStruct)),
        ("row_segment", c_void_p),
        ("logit_rows", c_void_p),
        ("scratch", c_void_p),
        ("hidden", c_void_p),
        ("logits", c_void_p),
    ]


class ByteRowsStruct(Structure):
    """Output rows in 8 bits."""

    _fields_: ClassVar = [
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
    ]


class HeadBlockStruct(Structure):
    """A gated block of draft heads."""

    _fields_: ClassVar = [("up", LinearStruct), ("down", LinearStruct)]


class HeadsStruct(Structure):
    """Sequential draft heads."""

    _fields_: ClassVar = [
        ("first", LinearStruct),
        ("following", LinearStruct),
        ("out", LinearStruct),
        ("lm_head", ByteRowsStruct),
        ("blocks", POINTER(HeadBlockStruct)),
        ("depth_bias", c_void_p),
        ("ones", c_void_p),
        ("block_count", c_int64),
        ("width", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("vocabulary", c_int64),
        ("eps", c_float),
    ]


#: In the order in which ``specdec_struct_bytes`` numbers them.
STRUCTS: tuple[type[Structure], ...] = (
    LinearStruct,
    LayerStruct,
    ModelStruct,
    SegmentStruct,
    StepStruct,
    HeadsStruct,
    ByteRowsStruct,
)
