"""What is compiled: one cubin per kernel and set of compile-time choices, each with its budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

FORWARD_THREADS = 384
FORWARD_REGISTERS = 168  # at launch; setmaxnreg then deals 384 x 168 out to the warpgroups


SLACK = 8


@dataclass(frozen=True)
class Specialisation:
    """One compilation. source: file under ``csrc``. function: its kernel. defines: (name, value) macros, in order.

    registers: most registers per thread that the compiler may report. shared_bytes: dynamic shared memory of a block.
    """

    source: str
    function: str
    defines: tuple[tuple[str, int], ...]
    registers: int
    shared_bytes: int

    @property
    def label(self) -> str:
        """Readable name: the function and the values of its macros."""
        values = " ".join(f"{name.removeprefix('MEGARING_').lower()}={value}" for name, value in self.defines)
        return f"{self.function} {values}".strip()


def forward(
    head_dim: int, *, bfloat16: bool, causal: bool, ping_pong: bool = False, slack: int = SLACK, delays: bool = False
) -> Specialisation:
    """The forward kernel for a head dimension of 64 or 128.

    ping_pong: whether the consumers take turns on the tensor cores. slack: powers of two by which scores may outgrow
    the running maximum before outputs are rescaled. delays: for tests, the roles pause at random.
    """
    if head_dim not in (64, 128):
        raise ValueError(f"the fused kernels take a head dimension of 64 or 128, not {head_dim}; use the ring backend")
    return Specialisation(
        source="megaring_forward.cu",
        function="megaring_forward",
        defines=(
            ("MEGARING_HEAD_DIM", head_dim),
            ("MEGARING_BFLOAT16", int(bfloat16)),
            ("MEGARING_CAUSAL", int(causal)),
            ("MEGARING_PING_PONG", int(ping_pong)),
            ("MEGARING_SLACK", slack),
            *((("MEGARING_DELAYS", 1),) if delays else ()),
        ),
        registers=FORWARD_REGISTERS,
        shared_bytes=6 * 128 * head_dim * 2 + 2 * 16384 + 1024,
    )


def backward(head_dim: int, *, bfloat16: bool, causal: bool, delays: bool = False) -> Specialisation:
    """The backward kernel for a head dimension of 64 or 128. delays: for tests, the roles pause at random."""
    if head_dim not in (64, 128):
        raise ValueError(f"the fused kernels take a head dimension of 64 or 128, not {head_dim}; use the ring backend")
    keys, queries, scores, statistics = 2 * 128 * head_dim * 2, 2 * 64 * head_dim * 2, 2 * 128 * 64 * 2, 2 * 64 * 4
    sums = 64 * head_dim * 4
    return Specialisation(
        source="megaring_backward.cu",
        function="megaring_backward",
        defines=(
            ("MEGARING_HEAD_DIM", head_dim),
            ("MEGARING_BFLOAT16", int(bfloat16)),
            ("MEGARING_CAUSAL", int(causal)),
            *((("MEGARING_DELAYS", 1),) if delays else ()),
        ),
        registers=FORWARD_REGISTERS,
        shared_bytes=keys + 2 * (queries + statistics) + scores + sums + 2 * 16384 + 512,
    )


def every_specialisation() -> tuple[Specialisation, ...]:
    """All that a run can need, in a fixed order."""
    return tuple(
        kernel(head_dim, bfloat16=bfloat16, causal=causal)
        for kernel, head_dim, bfloat16, causal in product((forward, backward), (128, 64), (True, False), (True, False))
    )


def unit_kernels() -> tuple[Specialisation, ...]:
    """Kernels that exercise one device layer each, for tests on a GPU."""
    tile = 128 * 128 + 1024
    wgmma = [
        Specialisation(
            f"unit/{source}.cu",
            function,
            (("MEGARING_HEAD_DIM", head_dim), ("MEGARING_BFLOAT16", int(bfloat16))),
            255,
            4 * 128 * head_dim + 1024,
        )
        for source, function in (("unit_wgmma", "unit_wgmma_ss"), ("unit_wgmma", "unit_wgmma_rs"))
        for head_dim, bfloat16 in product((128, 64), (True, False))
    ]
    return (
        Specialisation("unit/unit_tma.cu", "unit_tma_2d", (), 255, tile),
        Specialisation("unit/unit_tma.cu", "unit_tma_3d", (), 255, tile),
        *wgmma,
        Specialisation("unit/unit_registers.cu", "unit_registers", (), FORWARD_REGISTERS, 0),
        Specialisation("unit/unit_softmax.cu", "unit_softmax", (("MEGARING_SLACK", SLACK),), 255, 0),
        Specialisation("unit/unit_signal.cu", "unit_signal", (), 255, 16384 + 1024),
    )
