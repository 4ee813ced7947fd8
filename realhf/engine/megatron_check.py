"""Whether megatron-core can compute a model's layers; without torch, so that the launcher can ask too."""

import importlib.util

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.geometry.layout import ParallelStrategy


def check_megatron(config: DecoderConfig, strategy: ParallelStrategy, device_type: str) -> None:
    """Whether Megatron can compute the layers of a model under its home's `strategy`, on devices of `device_type`.

    Raises:
        UserError: no GPU, no megatron-core, an architecture or a layout that it is not set up for.
    """
    remedy = "or choose native"
    if device_type != "cuda":
        raise UserError(f"backend='megatron' needs a GPU, and the model is on {device_type}; run it on one, {remedy}")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UserError(f"backend='megatron' needs megatron-core; pip install 'realhf[gpu]', {remedy}")
    if (strategy.tp, strategy.pp) != (1, 1):
        raise UserError(
            f"backend='megatron' with tp={strategy.tp}, pp={strategy.pp}: it is set up for data parallelism alone; "
            f"choose a layout of tp=1, pp=1, {remedy}"
        )
    check_architecture(config)


def check_architecture(config: DecoderConfig) -> None:
    """Raises UserError unless layers are of Llama's kind: no other kind is translated here."""
    is_llama = config.norm == "rms" and config.mlp == "gated" and config.activation == "silu"
    has_other = config.attention_output_bias or config.mlp_bias or config.experts.count or config.positions != "rotary"
    if not is_llama or has_other:
        raise UserError(
            "backend='megatron' computes RMSNorm, gated SiLU MLPs and rotary positions, without experts and without "
            "biases but of query, key and value (llama, mistral, qwen2, qwen3); choose native for this model"
        )
