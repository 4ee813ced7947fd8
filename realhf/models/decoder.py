"""The decoder: one pipeline stage of a model of any family, written as for one device.

Tensor parallelism enters through the sizes of the local weights and the three layer classes of
`realhf.parallel.tensor`; head counts are inferred from them. With one stage and no group this is the whole model on one
device. The fields of `DecoderConfig` choose the parts in which families differ: norms, MLP, positions, biases, windows.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realhf.architecture.compute import Recomputed
from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import chunk_layers
from realhf.models.attention import Attention
from realhf.models.mlp import feed_forward
from realhf.models.norms import RMSNorm, hidden_norm, normalised_in_order
from realhf.models.recomputation import run_layer
from realhf.models.rotary import rotary_tables, rotate
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.joined import JoinedLinears
from realhf.parallel.ordered import Leaves, columns
from realhf.parallel.sequence import TokenShards, enter, gather_outputs
from realhf.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from realhf.parallel.vocabulary import Logits

KEEPS_ALL = Recomputed()


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, tp: int, group: dist.ProcessGroup | None):
        super().__init__()
        hidden, bias = config.hidden_size, config.qkv_bias
        self.layer, self.head_dim, self.window, self.group = layer, config.head_dim, config.window(layer), group
        self.q_proj = ColumnParallelLinear((config.query_size // tp, hidden), bias=bias)
        self.k_proj = ColumnParallelLinear((config.kv_size // tp, hidden), bias=bias)
        self.v_proj = ColumnParallelLinear((config.kv_size // tp, hidden), bias=bias)
        self.o_proj = RowParallelLinear((hidden, config.query_size // tp), group, bias=config.attention_output_bias)
        self.joined = JoinedLinears(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, group) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, shards: TokenShards | None = None
    ) -> Tensor:
        x = enter(x, self.group, shards)
        q, k, v = (out.unflatten(-1, (-1, self.head_dim)) for out in self.joined(x))
        if torch.is_grad_enabled() and cos.shape[-1]:  # attention keeps v alone, not q and k as they are before it too
            v = v.contiguous()
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        out = attend(self.layer, q, k, v, self.window)  # [tokens, heads / tp, head_dim]
        del q, k, v  # without gradients their memory is free for the product
        return self.o_proj(out.flatten(-2), shards)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, tp: int, group: dist.ProcessGroup | None):
        super().__init__()
        self.input_layernorm = hidden_norm(config)
        self.self_attn = SelfAttention(config, layer, tp, group)
        self.post_attention_layernorm = hidden_norm(config)
        self.mlp = feed_forward(config, tp, group)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, shards: TokenShards | None = None
    ) -> Tensor:
        """With `shards`, x and the result have this rank's tokens; cos and sin are of all tokens."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, shards)
        return x + self.mlp(self.post_attention_layernorm(x), shards)


class _Trunk(nn.Module):
    """The parameters that Hugging Face keeps under `model.`"""

    def __init__(self, config: DecoderConfig, layers: Iterable[int], tp: int, groups: ParallelGroups):
        super().__init__()
        if groups.is_first_stage:
            self.embed_tokens = VocabParallelEmbedding((config.vocab_size // tp, config.hidden_size), groups.tensor)
            if config.positions == "learned":
                # Every tensor-parallel rank has all positions. This way no random numbers are drawn.
                vectors = torch.empty(config.max_positions, config.hidden_size)
                self.embed_positions = nn.Embedding.from_pretrained(vectors, freeze=False)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i, tp, groups.tensor) for i in layers})
        if groups.is_last_stage:
            self.norm = hidden_norm(config)


class Decoder(nn.Module):
    """This rank's stage (all its model chunks) and tensor-parallel part of a model; parameters are uninitialised.

    Parameter names and shapes are those of `realhf.geometry.boxes.device_boxes`.
    """

    def __init__(self, config: DecoderConfig, groups: ParallelGroups):
        super().__init__()
        strategy = groups.layout.strategy
        self.config, self.groups = config, groups
        # Computes a layer in passes with gradients, in place of its modules: (layer, *its arguments) -> Tensor.
        self.trains_layer: Callable[..., Tensor] | None = None
        # As `trains_layer`, in passes without gradients.
        self.infers_layer: Callable[..., Tensor] | None = None
        # The sums of divided products, where their bits must not depend on the layout (`realhf.parallel.ordered`).
        self.leaves: Leaves | None = None
        # Whether common prefixes of sequences may be computed once (`realhf.models.prefixed_attention`).
        self.shares_prefixes = all(config.window(layer) is None for layer in range(config.num_layers))
        self.chunks = chunk_layers(config.num_layers, strategy, groups.stage)
        self.model = _Trunk(config, chain(*self.chunks), strategy.tp, groups)
        if not groups.is_last_stage:
            return
        if config.head == "scalar":
            self.score = ColumnParallelLinear((1, config.hidden_size))
        elif not config.tied_embeddings:
            self.lm_head = VocabParallelHead((config.vocab_size // strategy.tp, config.hidden_size))
        elif not groups.is_first_stage:
            # The second copy of the tied embedding; training sums the gradients of both copies.
            self.model.embed_tokens = VocabParallelEmbedding(
                (config.vocab_size // strategy.tp, config.hidden_size), groups.tensor
            )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attention,
        head_rows: Tensor | None = None,
        shards: TokenShards | None = None,
        recomputed: Recomputed = KEEPS_ALL,
        chunk: int = 0,
    ) -> Tensor | Logits:
        """One stage, or one of its model chunks.

        Args:
            x: tokens [tokens] int64 for the first chunk of the first stage, else the hidden states of the chunk before
                [tokens, hidden].
            positions: position of every token in its sequence [tokens].
            head_rows: the rows that the head runs on, in the order of its output (last stage; None: all).
            shards: with sequence parallelism: hidden states between layers and stages have this rank's tokens.
            recomputed: the layers whose activations `realhf.models.recomputation.run_layer` recomputes.
            chunk: which of `chunks`.

        Returns:
            hidden states [tokens, hidden]; for the last chunk of the last stage logits [tokens, vocab], which are
            computed when they are used, or values [tokens].
        """
        if self.groups.is_first_stage and chunk == 0:
            x = self.embed(x, positions, shards)
        cos, sin = rotary_tables(positions, self.config, x.dtype)
        for place, i in enumerate(self.chunks[chunk]):
            layer = self.model.layers[str(i)]
            replacement = self.trains_layer if torch.is_grad_enabled() else self.infers_layer
            compute = layer if replacement is None else partial(replacement, layer)
            x = run_layer(recomputed.of(place), compute, x, cos, sin, attend, shards)
        if not self.has_head(chunk):
            return x
        return self.output(x, head_rows, shards)

    def has_head(self, chunk: int) -> bool:
        """Whether the head follows the layers of `chunk`."""
        return self.groups.is_last_stage and chunk == len(self.chunks) - 1

    def embed(self, tokens: Tensor, positions: Tensor, shards: TokenShards | None = None) -> Tensor:
        """The input of the first layer [tokens, hidden], from tokens and positions [tokens], on the first stage."""
        x = self.model.embed_tokens(tokens, shards)
        if self.config.scale_embeddings:
            # Rounded to the dtype of x first, as in Gemma. A number, since a tensor would be copied from the host.
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device="cpu").item()
        if self.config.positions == "learned":
            x = x + self.model.embed_positions(positions if shards is None else positions[shards.own])
        return x

    def output(self, x: Tensor, rows: Tensor | None = None, shards: TokenShards | None = None) -> Tensor | Logits:
        """Applies the final norm and the head to hidden states [tokens, hidden] of the last stage: see `forward`."""
        x = self.model.norm(x) if self.leaves is None else normalised_in_order(self.model.norm, x)
        if self.config.head == "scalar":
            values = gather_outputs(self._scores(x).squeeze(-1), shards)  # [tokens]
            return values if rows is None else values.index_select(0, rows)
        x = enter(x, self.groups.tensor, shards) if self.leaves is None else x
        x = x if rows is None else x.index_select(0, rows)
        if self.config.tied_embeddings:
            assert self.model.embed_tokens.weight is not None, "a tied embedding is not cut"
            return Logits(x, self.model.embed_tokens.weight, self.groups.tensor, leaves=self.leaves)
        return Logits(x, self.lm_head.weights(), self.groups.tensor, self.lm_head.packed, leaves=self.leaves)

    def _scores(self, x: Tensor) -> Tensor:
        if self.leaves is None:
            return self.score(x)
        assert self.score.weight is not None
        return columns(x[None], self.leaves, (self.score.weight, None))[0]

    def head(self, x: Tensor) -> Tensor:
        """As `output`, with the logits complete on every tensor-parallel rank."""
        output = self.output(x)
        return output.full() if isinstance(output, Logits) else output
