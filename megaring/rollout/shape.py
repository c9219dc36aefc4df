"""What a model's attention stores: its projections and its KV cache, for GQA and for absorbed MLA. No torch.

Notation: T ranks, H query heads, H_kv KV heads, S the bytes of one layer's projections that a layout shards or
replicates (W = layers x S), k the KV bytes of one token over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from megaring.rollout.feed_forward import FeedForward


@dataclass(frozen=True)
class MlaShape:
    """Widths of multi-head latent attention, per head where a head has one.

    ``q_lora_rank`` is None where queries come straight from the hidden state. The cache keeps ``kv_lora_rank`` latent
    and ``qk_rope`` rotary elements a token, shared by all heads.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int


@dataclass(frozen=True)
class Projection:
    """One weight matrix ``[rows, columns]`` under Megatron's module name.

    ``split`` is the dimension that tensor parallelism cuts into T equal slices; a bias has one element a row and is cut
    with them.
    """

    name: str
    rows: int
    columns: int
    split: int
    bias: bool = False

    @property
    def elements(self) -> int:
        """Parameters, with the bias."""
        return self.rows * self.columns + (self.rows if self.bias else 0)


@dataclass(frozen=True)
class ModelShape:
    """A decoder whose layers are all of one attention kind.

    ``weight_bytes`` and ``kv_bytes`` are bytes per element. ``head_dim`` is the width of a GQA head; with ``mla`` set
    it and ``kv_heads`` mean nothing, as the cache then has one head. ``shard_down`` says that tensor parallelism cuts
    the low-rank down projections of MLA as well, as Megatron's local spec does without Transformer Engine; replicated
    ones cost the same in every layout. ``feed_forward`` is the rest of the model, where it is known. Raises ValueError
    for a size below 1 or query heads that KV heads do not divide.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mla: MlaShape | None = None
    weight_bytes: int = 2
    kv_bytes: int = 2
    qkv_bias: bool = False
    shard_down: bool = False
    feed_forward: FeedForward | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "weight_bytes", "kv_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name} is {getattr(self, name)}; it is at least 1")
        if self.mla is None and self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.query_heads} query heads do not divide by {self.kv_heads} KV heads; "
                "every KV head serves the same number of them"
            )

    @classmethod
    def from_config(cls, config: Any, *, name: str = "model", shard_down: bool = False, **changes: Any) -> Self:
        """Build from any object with the attributes of Megatron's ``TransformerConfig`` or ``MLATransformerConfig``.

        ``params_dtype.itemsize`` sets the bytes of weights and cache where the config has one. ``changes`` override
        fields (``kv_bytes=1``). Raises ValueError that names an attribute which is missing.
        """
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        itemsize = getattr(getattr(config, "params_dtype", None), "itemsize", 2)
        fields: dict[str, Any] = {
            "name": name,
            "layers": _integer(config, "num_layers"),
            "hidden": hidden,
            "query_heads": heads,
            "kv_heads": getattr(config, "num_query_groups", None) or heads,
            "head_dim": getattr(config, "kv_channels", None) or hidden // heads,
            "mla": _mla(config) if getattr(config, "multi_latent_attention", False) else None,
            "weight_bytes": itemsize,
            "kv_bytes": itemsize,
            "qkv_bias": bool(getattr(config, "add_qkv_bias", False) or getattr(config, "add_bias_linear", False)),
            "shard_down": shard_down,
            "feed_forward": FeedForward.from_config(config),
        }
        return cls(**{**fields, **changes})

    def cut(self, layers: int) -> Self:
        """The same model with its first ``layers`` layers only."""
        rest = self.feed_forward
        if rest is not None:
            rest = replace(rest, dense_layers=min(rest.dense_layers, layers))
        return replace(self, layers=layers, feed_forward=rest)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections of one layer whose placement a layout chooses (SPLASH, appendix A)."""
        if self.mla is None:
            heads = self.query_heads + 2 * self.kv_heads
            return (
                Projection("linear_qkv", heads * self.head_dim, self.hidden, 0, self.qkv_bias),
                Projection("linear_proj", self.hidden, self.query_heads * self.head_dim, 1),
            )
        mla, made = self.mla, []
        query_width = self.query_heads * (mla.qk_nope + mla.qk_rope)
        if mla.q_lora_rank is None:
            made.append(Projection("linear_q_proj", query_width, self.hidden, 0))
        else:
            if self.shard_down:
                made.append(Projection("linear_q_down_proj", mla.q_lora_rank, self.hidden, 0))
            made.append(Projection("linear_q_up_proj", query_width, mla.q_lora_rank, 0))
        if self.shard_down:
            made.append(Projection("linear_kv_down_proj", mla.kv_lora_rank + mla.qk_rope, self.hidden, 0))
        made.append(Projection("linear_kv_up_proj", self.query_heads * (mla.qk_nope + mla.v_dim), mla.kv_lora_rank, 0))
        made.append(Projection("linear_proj", self.hidden, self.query_heads * mla.v_dim, 1))
        return tuple(made)

    @property
    def replicated_elements(self) -> int:
        """Attention parameters of one layer that every rank holds whole in every layout: MLA's down projections."""
        if self.mla is None or self.shard_down:
            return 0
        return self.hidden * ((self.mla.q_lora_rank or 0) + self.mla.kv_lora_rank + self.mla.qk_rope)

    @property
    def layer_projection_bytes(self) -> int:
        """S: one layer's projections, whole (SPLASH, equation 9, without scales)."""
        return self.weight_bytes * sum(each.elements for each in self.projections)

    @property
    def projection_bytes(self) -> int:
        """W: the projections of all layers, whole."""
        return self.layers * self.layer_projection_bytes

    @property
    def cache_heads(self) -> int:
        """Heads that the cache can be split by: the KV heads, or 1 for the latent of MLA."""
        return 1 if self.mla is not None else self.kv_heads

    @property
    def cache_head_bytes(self) -> int:
        """Cache bytes of one token, one layer and one cache head: key and value, or latent and rotary key."""
        width = 2 * self.head_dim if self.mla is None else self.mla.kv_lora_rank + self.mla.qk_rope
        return self.kv_bytes * width

    @property
    def layer_token_bytes(self) -> int:
        """Cache bytes of one token in one layer, all heads."""
        return self.cache_heads * self.cache_head_bytes

    @property
    def token_bytes(self) -> int:
        """k: cache bytes of one token over all layers (SPLASH, section 2)."""
        return self.layers * self.layer_token_bytes

    @property
    def query_width(self) -> int:
        """d_q: elements of one head's query as it meets the cache; absorbed for MLA (SPLASH, section 3)."""
        return self.head_dim if self.mla is None else self.mla.kv_lora_rank + self.mla.qk_rope

    @property
    def result_width(self) -> int:
        """d_z: elements of one head's attention result before the value projection (SPLASH, section 3)."""
        return self.head_dim if self.mla is None else self.mla.kv_lora_rank

    def head_split(self, ranks: int) -> int:
        """h = min(T, cache heads): over how many ranks a history is divided under TP. Checks ``ranks``."""
        self.check_ranks(ranks)
        return min(ranks, self.cache_heads)

    def rank_heads(self, rank: int, ranks: int) -> range:
        """The cache heads that ``rank`` of ``ranks`` holds under TP: those that its query heads attend to."""
        split = self.head_split(ranks)
        width, first = self.cache_heads // split, rank * split // ranks
        return range(first * width, (first + 1) * width)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError, with the arithmetic, unless heads and projections divide over ``ranks``."""
        if ranks < 1:
            raise ValueError(f"{ranks} ranks: at least 1 is needed")
        if self.query_heads % ranks:
            raise ValueError(
                f"{self.name}: {self.query_heads} query heads do not divide over {ranks} ranks; {_choices(self)}"
            )
        if self.cache_heads % ranks and ranks % self.cache_heads:
            raise ValueError(
                f"{self.name}: {ranks} ranks neither divide the {self.cache_heads} KV heads nor are a multiple "
                f"of them; {_choices(self)}"
            )
        for each in self.projections:
            size = (each.rows, each.columns)[each.split]
            if size % ranks:
                raise ValueError(
                    f"{self.name}: {each.name} has {size} {('rows', 'columns')[each.split]}, which do not divide over "
                    f"{ranks} ranks; {_choices(self)}"
                )


def _choices(shape: ModelShape) -> str:
    fits = [str(ranks) for ranks in range(1, min(shape.query_heads, 64) + 1) if _divides(shape, ranks)]
    return f"these do: {', '.join(fits)}"


def _divides(shape: ModelShape, ranks: int) -> bool:
    sizes: Sequence[int] = [(each.rows, each.columns)[each.split] for each in shape.projections]
    heads = shape.cache_heads
    return not (shape.query_heads % ranks or (heads % ranks and ranks % heads) or any(size % ranks for size in sizes))


def _integer(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; a model shape needs an integer of at least 1")
    return value


def _mla(config: Any) -> MlaShape:
    return MlaShape(
        q_lora_rank=getattr(config, "q_lora_rank", None),
        kv_lora_rank=_integer(config, "kv_lora_rank"),
        qk_nope=_integer(config, "qk_head_dim"),
        qk_rope=_integer(config, "qk_pos_emb_head_dim"),
        v_dim=_integer(config, "v_head_dim"),
    )
