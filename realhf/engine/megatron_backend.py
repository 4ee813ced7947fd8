"""Layers computed by megatron-core in training, over the parameters that the native engine holds.

The parameters keep their names, boxes and places in the arena; for a pass with gradients a layer's weights are put
together as Megatron has them, differentiably, so that gradients arrive where the optimizer looks for them.
Everything else is the engine's: embedding, head, attention kernels, micro-batches, ZeRO-1, checkpoints, reallocation.
Nothing imports megatron-core before `MegatronLayers` is made.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.megatron_check import check_architecture, check_megatron
from realhf.engine.model import ShardedModel
from realhf.models.attention import Attention
from realhf.models.decoder import DecoderLayer
from realhf.models.rotary import rotate
from realhf.parallel.sequence import TokenShards

# Our name -> Megatron's, for parameters that are the same in both.
_SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
_FC1 = "mlp.linear_fc1.weight"


def to_megatron(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """A layer's parameters by Megatron's names, from ours (without the layer's prefix); differentiable.

    Query, key and value are one matrix there: for every key-value head the rows of its query heads, then its key's,
    then its value's. The gate's rows stand above those of the other half.
    """
    fused = {theirs: weights[ours] for ours, theirs in _SAME.items() if ours in weights}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in weights:
            parts = [weights[f"self_attn.{name}_proj.{kind}"].unflatten(0, (config.num_kv_heads, -1)) for name in "qkv"]
            fused[f"self_attention.linear_qkv.{kind}"] = torch.cat(parts, dim=1).flatten(0, 1)
    fused[_FC1] = torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]])
    return fused


class MegatronModel(ShardedModel):
    """The native model, whose layers megatron-core computes in passes with gradients."""

    def __init__(self, spec: ModelSpec):
        """Raises UserError where megatron-core cannot be used."""
        if spec.optimizer is not None:
            check_megatron(spec.config, spec.groups.layout.strategy, torch.device(spec.device).type)
        super().__init__(spec)
        if spec.optimizer is not None:
            self.decoder.trains_layer = MegatronLayers(spec.config, spec.dtype)


class MegatronLayers:
    """Computes any layer of a model with one `TransformerLayer` of megatron-core, whose own parameters are never used.

    Copies of the fused weights live until the backward pass: of query, key, value, gate and up, once more the size of
    these parameters a micro-batch in flight.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype):
        check_architecture(config)
        assert dist.is_initialized(), "Megatron asks torch.distributed for its groups, as every worker has them"
        self.config = config
        with warnings.catch_warnings(action="ignore"):  # Apex and Transformer Engine are missing, and not used
            self._layer, self._core = _transformer_layer(config, dtype)

    def __call__(
        self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, shards: TokenShards | None
    ) -> Tensor:
        """As `DecoderLayer.forward`: [tokens, hidden] -> the same.

        Packed sequences are one sequence to Megatron; `attend` keeps them apart, and rotation goes by their places.
        """
        assert shards is None, "sequence parallelism is tensor parallelism's"
        attention = layer.self_attn

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(attention.layer, rotate(query, cos, sin), rotate(key, cos, sin), value, attention.window)

        self._core.attend = core
        weights = to_megatron(dict(layer.named_parameters()), self.config)
        out, _ = functional_call(self._layer, weights, (x[:, None],), {"attention_mask": None})  # [tokens, 1, hidden]
        return out[:, 0]


class _CoreAttention(nn.Module):
    """Attention between Megatron's projections. Megatron makes it, with its own arguments."""

    def __init__(self, **arguments: Any):
        super().__init__()
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """query [tokens, 1, heads, head_dim], key and value [tokens, 1, kv_heads, head_dim] -> [tokens, 1, hidden]."""
        assert self.attend is not None
        return self.attend(query[:, 0], key[:, 0], value[:, 0]).flatten(1)[:, None]


class _Alone:
    """A process group of one, which Megatron asks for its size."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _transformer_layer(config: DecoderConfig, dtype: torch.dtype) -> tuple[nn.Module, _CoreAttention]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = TransformerConfig(
        num_layers=1,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        use_cpu_initialization=True,  # its parameters are thrown away
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_norm)
    spec.submodules.self_attention.submodules.core_attention = _CoreAttention
    groups = ProcessGroupCollection(tp=_Alone(), cp=_Alone(), pp=_Alone())
    layer = build_module(spec, config=settings, layer_number=1, pg_collection=groups)
    return layer.to("meta"), layer.self_attention.core_attention
