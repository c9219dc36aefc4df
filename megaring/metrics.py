"""Where a run's figures go: JSON lines always, the screen, and Weights & Biases on request."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buddyring import Placement


def placement_figures(placements: Sequence[Placement]) -> dict[str, Any]:
    """How the sequences of a step were placed: counts by group size, and the worst imbalances of its microbatches."""
    sizes = Counter(group.size for placement in placements for group in placement.groups)
    return {
        "sequences": sum(sizes.values()),
        "by_group_size": {str(size): sizes[size] for size in sorted(sizes)},
        "mixed": any(len({group.size for group in placement.groups}) > 1 for placement in placements),
        "token_imbalance": max((placement.token_imbalance for placement in placements), default=0.0),
        "attention_imbalance": max((placement.attention_imbalance for placement in placements), default=0.0),
    }


def step_line(figures: Mapping[str, Any], total_steps: int) -> str:
    """One line for a person: loss, speed, placement and both imbalances of a step."""
    placed = ", ".join(
        f"{count} whole" if size == "1" else f"{count} on {size}" for size, count in figures["by_group_size"].items()
    )
    mfu = f" | MFU {figures['mfu']:.1%}" if figures.get("mfu") is not None else ""
    return (
        f"step {figures['step']:>{len(str(total_steps))}}/{total_steps} | loss {figures['loss']:.4f} | "
        f"{figures['tokens_per_s']:,.0f} tokens/s{mfu} | {figures['sequences']} sequences: {placed} | "
        f"imbalance tokens {figures['token_imbalance']:.1%}, attention {figures['attention_imbalance']:.1%} | "
        f"{figures['step_s']:.2f} s"
    )


class Reporter:
    """Writes a run's figures. Made on one rank only; call ``close`` at the end, also after an error."""

    def __init__(self, path: Path, total_steps: int, start_step: int, wandb_settings: dict[str, Any] | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._total = total_steps
        self._bar = None
        self._wandb = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True)
        if wandb_settings is not None:
            import wandb

            self._wandb = wandb.init(dir=str(path.parent), **wandb_settings)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def record(self, kind: str, figures: Mapping[str, Any]) -> None:
        """Append one JSON line ``{"kind": kind, **figures}`` and pass its numbers on to Weights & Biases."""
        self._file.write(json.dumps({"kind": kind, **figures}) + "\n")
        self._file.flush()
        if self._wandb is not None and "step" in figures:
            numbers = {k: v for k, v in figures.items() if isinstance(v, (int, float)) and k != "step"}
            self._wandb.log({f"{kind}/{k}": v for k, v in numbers.items()}, step=figures["step"])

    def train_step(self, figures: Mapping[str, Any], show: bool) -> None:
        """Record a training step, move the progress bar and, when ``show``, print its line."""
        self.record("train", figures)
        if show:
            self.say(step_line(figures, self._total))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {figures['loss']:.3f}", refresh=False)
            self._bar.update(figures["step"] - self._bar.n)

    def close(self) -> None:
        """Close the file, the bar and the Weights & Biases run."""
        if self._bar is not None:
            self._bar.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file.close()
