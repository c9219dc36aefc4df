"""How much work a step is, and how much of a GPU's peak that makes. No torch, no megatron."""

from __future__ import annotations

from megaring.megatron.config import ModelConfig

# Dense bf16 peak of one GPU in FLOP/s, from the vendor's data sheets; the first key found in the device's name counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


def model_flops(model: ModelConfig, tokens: int, sum_squared_lengths: int) -> float:
    """Floating-point operations of one forward and backward pass over ``tokens`` tokens.

    Matrix products only, 2 operations per multiply-add, backward twice the forward, nothing for recomputation (the
    usual definition of model FLOPs, PaLM appendix B). Attention is counted as it is done: causal and inside each
    sequence, ``L^2 / 2`` query-key pairs each, from the sum of ``L^2`` over the sequences.
    """
    hidden, heads, channels = model.hidden_size, model.num_attention_heads, model.kv_channels
    layer = hidden * channels * (2 * heads + 2 * model.num_query_groups)
    if model.num_experts is None:
        layer += 3 * hidden * model.ffn_hidden_size
    else:
        layer += 3 * hidden * model.moe_ffn_hidden_size * model.moe_router_topk + hidden * model.num_experts
    weights = model.num_layers * layer + hidden * model.padded_vocab_size
    attention = model.num_layers * 2 * heads * channels * sum_squared_lengths / 2
    return 3.0 * 2.0 * (weights * tokens + attention)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name (``torch.cuda.get_device_name()``), or None when it is not known."""
    matches = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def mfu(flops: float, seconds: float, gpus: int, device_name: str) -> float | None:
    """Model FLOPs utilisation: the share of the peak of ``gpus`` GPUs that ``flops`` in ``seconds`` make, or None."""
    peak = peak_flops(device_name)
    return None if peak is None else flops / (seconds * gpus * peak)
