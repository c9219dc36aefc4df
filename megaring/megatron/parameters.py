"""Where each parameter of a model chunk lies in the whole model, and initial weights that depend on nothing else.

A parameter has the name it has in a one-process model: layers count over pipeline stages, experts over expert-parallel
ranks. Initial weights are drawn per such name and then cut, so that every layout of a model starts from the same
weights. (Megatron's own initialisation depends on tensor, expert and pipeline parallelism; on a CPU it even gives every
expert-parallel rank the same experts.)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megaring.megatron.config import ModelConfig


@dataclass(frozen=True)
class Place:
    """The part of a whole parameter that this rank holds: of ``pieces`` equal pieces along ``dim`` every
    ``ranks``-th one, from piece ``rank`` on. ``name``: in the whole model. ``shape``: of the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    pieces: int = 1
    rank: int = 0
    ranks: int = 1

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole parameter."""
        return torch.cat(whole.chunk(self.pieces, dim=self.dim)[self.rank :: self.ranks], dim=self.dim)

    def paste(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this rank's part into the whole parameter, in place."""
        targets = whole.chunk(self.pieces, dim=self.dim)[self.rank :: self.ranks]
        for target, piece in zip(targets, part.chunk(len(targets), dim=self.dim), strict=True):
            target.copy_(piece)


def placed_parameters(chunk: GPTModel) -> Iterator[tuple[Place, torch.nn.Parameter]]:
    """Every parameter of an unwrapped model chunk with its place."""
    for local_name, parameter in chunk.named_parameters():
        yield _place(chunk, local_name, parameter), parameter


def initialise(chunk: GPTModel, model: ModelConfig, seed: int) -> None:
    """Fill all matrices with normal numbers; norms keep their ones.

    The deviation is ``init_method_std``, for the two projections that write to the residual stream over
    ``sqrt(2 * num_layers)`` (GPT-2; also Megatron's default). The numbers depend on the seed, the parameter's name and
    the kind of device.
    """
    for place, parameter in placed_parameters(chunk):
        if len(place.shape) < 2:
            continue
        digest = hashlib.sha256(f"{seed}:{place.name}".encode()).digest()
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = model.init_method_std
        if re.search(r"linear_(proj|fc2)\.weight$", place.name):
            std /= (2 * model.num_layers) ** 0.5
        whole = torch.empty(place.shape, dtype=torch.float32, device=parameter.device)
        parameter.data.copy_(place.cut(whole.normal_(0.0, std, generator=generator)))


def _place(chunk: GPTModel, local_name: str, parameter: torch.nn.Parameter) -> Place:
    name = re.sub(
        r"(?<=decoder\.layers\.)\d+", lambda m: str(chunk.decoder.layers[int(m[0])].layer_number - 1), local_name
    )
    name = re.sub(r"(linear_fc[12])\.weight(\d+)$", r"local_experts.\2.\1.weight", name)  # grouped experts
    expert = re.search(r"(?<=local_experts\.)\d+", name)
    if expert:
        # Experts are whole: expert tensor parallelism is refused.
        per_rank = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
        index = parallel_state.get_expert_model_parallel_rank() * per_rank + int(expert[0])
        return Place(f"{name[: expert.start()]}{index}{name[expert.end() :]}", tuple(parameter.shape))
    if chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"  # the last stage's copy
    ranks = chunk.config.tensor_model_parallel_size
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Place(name, tuple(parameter.shape))
    dim, shape = parameter.partition_dim, list(parameter.shape)
    shape[dim] *= ranks
    pieces = 2 * ranks if name.endswith("mlp.linear_fc1.weight") else ranks  # gate and up are cut apart
    return Place(name, tuple(shape), dim, pieces, parallel_state.get_tensor_model_parallel_rank(), ranks)
