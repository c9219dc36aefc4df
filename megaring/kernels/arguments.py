"""The forward kernel's arguments as the host packs them: ``csrc/forward_arguments.cuh``, field by field."""

from __future__ import annotations

import ctypes

LAUNCH_RANKS = 8  # virtual ranks that can share one launch
DOMAIN_RANKS = 16  # ranks of one arena domain
CONTROL_BYTES = 256
RECORD_WORDS = 8

TensorMap = ctypes.c_ubyte * 128


class RankArguments(ctypes.Structure):
    """What one rank of a launch works on."""

    _fields_ = (
        ("query", TensorMap),
        ("key", TensorMap),
        ("value", TensorMap),
        ("arena", TensorMap),
        ("output", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("segments", ctypes.c_uint64),
        ("sends", ctypes.c_uint64),
        ("key_rows", ctypes.c_uint64),
        ("value_rows", ctypes.c_uint64),
        ("key_stride", ctypes.c_uint64),
        ("value_stride", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("num_tiles", ctypes.c_int32),
        ("num_sends", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 5),
    )


class Arguments(ctypes.Structure):
    """The kernel's one parameter."""

    _fields_ = (
        ("ranks", RankArguments * LAUNCH_RANKS),
        ("arenas", ctypes.c_uint64 * DOMAIN_RANKS),
        ("timeout_ns", ctypes.c_uint64),
        ("flags_offset", ctypes.c_uint64),
        ("data_offset", ctypes.c_uint64),
        ("arena_rows", ctypes.c_int32),
        ("domain_ranks", ctypes.c_int32),
        ("ctas_per_rank", ctypes.c_int32),
        ("query_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("heads_per_section", ctypes.c_int32),
        ("digest", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32 * 2),
    )


assert ctypes.sizeof(RankArguments) == 640, "csrc/forward_arguments.cuh asserts the same size"
assert ctypes.sizeof(Arguments) == LAUNCH_RANKS * 640 + 128 + 64, "csrc/forward_arguments.cuh asserts the same size"
