"""Build the part of the model that this rank holds."""

from __future__ import annotations

import logging

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megaring.errors import UserError
from megaring.megatron.config import ModelConfig, ParallelConfig
from megaring.megatron.parameters import initialise
from megaring.megatron.rope import ShardRotaryEmbedding
from megaring.megatron.spec import block_spec
from megaring.megatron.transformer import transformer_config

# It announces at every construction that GPTModel will be succeeded by HybridModel.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_model(model: ModelConfig, parallel: ParallelConfig, *, seed: int) -> list[GPTModel]:
    """The chunks of this rank's pipeline stage (one: there is no interleaved schedule), on its device.

    Call it on every rank after ``parallel.start``. Weights depend on ``seed`` alone, not on the layout. The result is
    not yet wrapped for mixed precision and data parallelism; ``step.TrainStep`` does that.
    """
    on_gpu = torch.cuda.is_available()
    if model.bf16 and not on_gpu:
        raise UserError("--bf16 needs a GPU, and this machine has none that torch can use; drop the flag")
    config = transformer_config(model, parallel)
    chunk = GPTModel(
        config,
        block_spec(model, get_num_layers_to_build(config)),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
    )
    chunk.rotary_pos_emb = ShardRotaryEmbedding(
        model.kv_channels,
        1.0,
        rotary_base=model.rotary_base,
        use_cpu_initialization=not on_gpu,
        cp_group=chunk.pg_collection.cp,
    )
    if chunk.post_process:
        # The loss gathers the rows of the tensor-parallel ranks itself, before it picks those that count, and its
        # backward pass adds the gradients up again; so this layer must do neither.
        chunk.output_layer.sequence_parallel = False
        chunk.output_layer.allreduce_dgrad = False
        chunk.output_layer.disable_grad_reduce = True
    if on_gpu:
        chunk.cuda()
    initialise(chunk, model, seed)
    return [chunk]
