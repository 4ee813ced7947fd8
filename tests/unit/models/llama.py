"""The oracle: Hugging Face's Llama with the weights of one of our models, in float32 or truly in float64."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from realhf.architecture.model import DecoderConfig
from realhf.engine.model import ShardedModel
from tests.unit.engine.losses import boxes_of


class _Norm64(nn.Module):
    """Hugging Face's RMSNorm computes in float32 whatever the dtype; this one stays in float64."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / ((x * x).mean(dim=-1, keepdim=True) + self.eps).sqrt()


class _Rotary64(nn.Module):
    """The same for its rotary tables, which it makes in float32."""

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = [self.theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)] * 2
        angles = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
        return angles.cos(), angles.sin()


def llama(config: DecoderConfig, model: ShardedModel) -> LlamaForCausalLM:
    """Hugging Face's model with the present parameters of `model`, which lies on one rank, in its dtype."""
    hf = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tied_embeddings,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            attn_implementation="sdpa",  # the eager one computes its softmax in float32
            use_cache=False,
        )
    ).to(model.parameters.flat.dtype)
    weights = {name: local for name, (_, local) in boxes_of(model).items()}
    missing, unexpected = hf.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tied_embeddings else [])
    hf.tie_weights()
    if model.parameters.flat.dtype == torch.float64:
        for module in list(hf.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(module, name, _Norm64(child.weight, config.rms_norm_eps))
        hf.model.rotary_emb = _Rotary64(config.head_dim, config.rope_theta)
    return hf


def llama_logits(hf: LlamaForCausalLM, sequences: list[Tensor]) -> Tensor:
    """Logits of every sequence run on its own, laid end to end: [tokens, vocab]."""
    return torch.cat([hf(input_ids=sequence[None]).logits[0] for sequence in sequences])
