"""Model shapes by name, and from recipes: YAML files of Megatron's option names."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from megaring.errors import UserError
from megaring.options import build_parser, positive
from megaring.recipe import recipe_defaults
from megaring.rollout.feed_forward import FeedForward
from megaring.rollout.shape import MlaShape, ModelShape

SHAPES: dict[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        ModelShape(
            "DeepSeek-V2-Lite",
            layers=27,
            hidden=2048,
            query_heads=16,
            kv_heads=16,
            head_dim=128,
            mla=MlaShape(q_lora_rank=None, kv_lora_rank=512, qk_nope=128, qk_rope=64, v_dim=128),
            feed_forward=FeedForward(10944, 1, 64, 6, 1408, shared_hidden=2 * 1408, vocab=102400),
        ),
        ModelShape(
            "DeepSeek-V3",
            layers=61,
            hidden=7168,
            query_heads=128,
            kv_heads=128,
            head_dim=128,
            mla=MlaShape(q_lora_rank=1536, kv_lora_rank=512, qk_nope=128, qk_rope=64, v_dim=128),
            feed_forward=FeedForward(18432, 3, 256, 8, 2048, shared_hidden=2048, vocab=129280),
        ),
        ModelShape(
            "Qwen3-30B-A3B",
            layers=48,
            hidden=2048,
            query_heads=32,
            kv_heads=4,
            head_dim=128,
            feed_forward=FeedForward(6144, 0, 128, 8, 768, vocab=151936),
        ),
    )
}


def read_recipe(path: Path) -> ModelShape:
    """The shape that a recipe describes; ``bf16: true`` sets 2 bytes an element for weights and cache, else 4.

    Raises UserError for keys that are neither an option of pretraining nor one of MLA's, values that do not parse, and
    sizes that no model can have.
    """
    parser = build_parser()
    group = parser.add_argument_group("multi-latent attention and experts, as Megatron-LM spells them")
    group.add_argument("--multi-latent-attention", action=argparse.BooleanOptionalAction, default=False)
    for name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"):
        group.add_argument(f"--{name}", type=positive)
    group.add_argument("--moe-shared-expert-intermediate-size", type=positive)
    group.add_argument("--moe-layer-freq", type=layer_frequency, default=1)
    try:
        parser.set_defaults(**recipe_defaults(parser, path))
    except ImportError:
        raise UserError("reading a recipe needs PyYAML: pip install 'megaring[train]'") from None
    options = parser.parse_args([])
    width = 2 if options.bf16 else 4
    try:
        shape = ModelShape.from_config(options, name=path.stem)
    except ValueError as error:
        raise UserError(f"recipe {path}: {error}") from None
    return replace(shape, weight_bytes=width, kv_bytes=width)


def layer_frequency(text: str) -> int | tuple[int, ...]:
    """Which layers have experts: every N-th, or Megatron's pattern of flags such as ``([0]*3+[1]*58)``.

    Raises ValueError for anything else.
    """
    if text.isdigit():
        return positive(text)
    bare = text.replace(" ", "").removeprefix("(").removesuffix(")")
    flags: list[int] = []
    for term in bare.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", term)
        if match is None:
            raise ValueError(f"{text!r} is neither a number nor a pattern such as ([0]*3+[1]*58)")
        flags += [int(flag) for flag in match[1].split(",")] * int(match[2] or 1)
    return tuple(flags)
