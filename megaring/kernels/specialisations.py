"""What is compiled: one cubin per kernel and set of compile-time choices, each with its budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

FORWARD_THREADS = 384
FORWARD_REGISTERS = 168  # at launch; setmaxnreg then deals 384 x 168 out to the warpgroups


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


def forward(head_dim: int, *, bfloat16: bool, causal: bool, ping_pong: bool = True) -> Specialisation:
    """The forward kernel for a head dimension of 64 or 128."""
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
        ),
        registers=FORWARD_REGISTERS,
        shared_bytes=6 * 128 * head_dim * 2 + 2 * 16384 + 1024,
    )


def every_specialisation() -> tuple[Specialisation, ...]:
    """All that a run can need, in a fixed order."""
    return tuple(
        forward(head_dim, bfloat16=bfloat16, causal=causal)
        for head_dim, bfloat16, causal in product((128, 64), (True, False), (True, False))
    )
