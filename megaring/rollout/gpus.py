"""GPUs by name with nominal rates, for plans made on a machine that has none: data-sheet peaks times assumed shares.

The shares are guesses of what well-built kernels reach, the same for every GPU; a calibration replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaring.megatron.flops import PEAK_FLOPS
from megaring.rollout.calibration import Calibration, Constants

_SHARES = "60 % of peak FLOP/s in projections, 50 % in attention; 80 % of memory bandwidth for weights, 70 % for KV; "
_SHARES += "70 % of link bandwidth"


@dataclass(frozen=True)
class Gpu:
    """``memory_gib``: what a process sees of the device. Bandwidths in bytes/s, per direction for the links."""

    name: str
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float

    def nominal(self) -> Calibration:
        """Rates of the data sheet times the assumed shares."""
        peak = PEAK_FLOPS[self.name]
        constants = Constants(
            projection_flops=0.6 * peak,
            attention_flops=0.5 * peak,
            weight_bandwidth=0.8 * self.memory_bandwidth,
            kv_bandwidth=0.7 * self.memory_bandwidth,
            link_bandwidth=0.7 * self.link_bandwidth,
            collective_latency=15e-6,
            step_overhead=1e-3,
        )
        return Calibration(f"{self.name} data sheet", constants, "not measured", detail=_SHARES)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 79.1, 3.35e12, 450e9),
        Gpu("H200", 139.8, 4.8e12, 450e9),
        Gpu("B200", 178.3, 8.0e12, 900e9),
    )
}
