"""The kernels' arguments as the host packs them: ``csrc/*_arguments.cuh``, field by field."""

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


class BackwardRank(ctypes.Structure):
    """What one rank of a backward launch works on besides."""

    _fields_ = (
        ("query", TensorMap),
        ("output_gradient", TensorMap),
        ("output_rows", ctypes.c_uint64),
        ("output_gradient_rows", ctypes.c_uint64),
        ("output_stride", ctypes.c_int64),
        ("output_head_stride", ctypes.c_int64),
        ("output_gradient_stride", ctypes.c_int64),
        ("output_gradient_head_stride", ctypes.c_int64),
        ("key_tasks", ctypes.c_uint64),
        ("items", ctypes.c_uint64),
        ("query_tiles", ctypes.c_uint64),
        ("owned", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("statistics", ctypes.c_uint64),
        ("query_sums", ctypes.c_uint64),
        ("query_gradient", ctypes.c_uint64),
        ("key_gradient", ctypes.c_uint64),
        ("value_gradient", ctypes.c_uint64),
        ("num_key_tasks", ctypes.c_int32),
        ("num_query_tiles", ctypes.c_int32),
        ("num_owned", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
        ("num_counters", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 11),
    )


class BackwardArguments(ctypes.Structure):
    """The backward kernel's one parameter."""

    _fields_ = (
        ("base", Arguments),
        ("ranks", BackwardRank * LAUNCH_RANKS),
        ("counts_offset", ctypes.c_uint64),
        ("sums_offset", ctypes.c_uint64),
        ("heads_per_task", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("unused", ctypes.c_int32 * 10),
    )


assert ctypes.sizeof(RankArguments) == 640, "csrc/forward_arguments.cuh asserts the same size"
assert ctypes.sizeof(Arguments) == LAUNCH_RANKS * 640 + 128 + 64, "csrc/forward_arguments.cuh asserts the same size"
assert ctypes.sizeof(BackwardRank) == 448, "csrc/backward_arguments.cuh asserts the same size"
assert ctypes.sizeof(BackwardArguments) == ctypes.sizeof(Arguments) + 8 * 448 + 64, "as in backward_arguments.cuh"
