"""The architecture of a decoder: everything about a model except its weights."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from realhf.base.errors import UserError
from realhf.base.numbers import check_range
from realhf.base.options import RANDOM_WEIGHTS, Option, Settings

Head = Literal["lm", "scalar"]
DType = Literal["float32", "float64", "bfloat16"]
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "float64": 8, "bfloat16": 2}
Norm = Literal["rms", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Mlp = Literal["gated", "plain"]
Positions = Literal["rotary", "learned"]
RopeScalingKind = Literal["none", "linear", "dynamic", "llama3"]

# Limits above any known model. Within them, all parameters can be listed in seconds, and their bytes fit into 64 bits.
MAX_LAYERS = 1_000
_MAX_POSITIONS = 10**9
_MAX_EXPERTS = 100_000  # in all layers together


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Settings):
    """How rotary angles are stretched for sequences longer than those of pre-training.

    `linear`: all frequencies are divided by `factor` (Chen et al., 2023). `dynamic`: the base grows with lengths above
    `original_positions` (NTK-aware scaling); a token is rotated for the length that ends with it, as in generation with
    a cache. `llama3`: low frequencies are divided by `factor`, high ones kept, and those between
    `low_frequency_factor` and `high_frequency_factor` interpolated (Llama 3.1).
    """

    WHERE = "rope scaling: "

    HEADING = RANDOM_WEIGHTS

    kind: Annotated[RopeScalingKind, Option("how rotary angles are stretched for long sequences")] = "none"
    factor: Annotated[float, Option("factor that they are stretched by", range=(1, 10**6))] = 1.0
    original_positions: Annotated[int, Option("longest sequence before stretching", range=(1, _MAX_POSITIONS))] = 8192
    low_frequency_factor: Annotated[
        float, Option("llama3: angles of lower frequencies are divided by the factor", range=(0, 10**6))
    ] = 1.0
    high_frequency_factor: Annotated[
        float, Option("llama3: angles of higher frequencies are kept", range=(0, 10**6))
    ] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "llama3" and not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise UserError(
                f"rope scaling: low_frequency_factor={self.low_frequency_factor} must be above 0 and below "
                f"high_frequency_factor={self.high_frequency_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of every MLP; a `count` of 0 means none.

    Every token goes through `per_token` experts. Their weights are the softmax over all experts; with `normalised` the
    chosen weights are scaled to sum to one (as Mixtral always does).
    """

    HEADING = RANDOM_WEIGHTS

    count: Annotated[int, Option("experts in place of each MLP (0: none)")] = 0
    per_token: Annotated[int, Option("experts that each token goes through")] = 0
    normalised: Annotated[bool, Option("scale the weights of the chosen experts to sum to one")] = True

    def __post_init__(self) -> None:
        if self.count < 0 or not (1 <= self.per_token <= self.count if self.count else self.per_token == 0):
            raise UserError(
                f"experts: per_token={self.per_token} must be from 1 to count={self.count} (both 0 for a dense model)"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Settings):
    """A decoder-only transformer; the defaults are those of Llama (RMSNorm, rotary positions, SwiGLU).

    `activation` "gelu_tanh" is the tanh approximation. No result depends on `max_position_embeddings`, which Hugging
    Face checkpoints name, and models that differ only in it are equal.
    """

    HEADING = RANDOM_WEIGHTS

    hidden_size: Annotated[int, Option("width of the residual stream", range=(1, 10**5))]
    intermediate_size: Annotated[int, Option("width of an MLP, or of each expert", range=(1, 10**6))]
    num_layers: Annotated[int, Option("layers", range=(1, MAX_LAYERS))]
    num_heads: Annotated[int, Option("query heads", range=(1, 10**4))]
    num_kv_heads: Annotated[int, Option("key and value heads", range=(1, 10**4))]
    vocab_size: Annotated[int, Option("tokens of the vocabulary", range=(1, 10**7))]
    head: Annotated[Head, Option("logits of tokens (lm), or one value a token (scalar)")] = "lm"
    tied_embeddings: Annotated[bool, Option("use the embedding as output matrix too")] = False
    rope_theta: Annotated[float, Option("base of rotary angles", range=(1, 10**12))] = 10_000.0
    rms_norm_eps: Annotated[float, Option("epsilon of every norm", range=(0, 1))] = 1e-5
    attention_head_dim: Annotated[int | None, Option("width of a head (default: hidden_size / num_heads)")] = None
    norm: Annotated[Norm, Option("RMSNorm, RMSNorm times 1 + weight, or LayerNorm with a bias")] = "rms"
    activation: Annotated[Activation, Option("activation of the MLP")] = "silu"
    mlp: Annotated[Mlp, Option("down(activation(gate(x)) * up(x)), or plain: down(activation(up(x)))")] = "gated"
    qkv_bias: Annotated[bool, Option("queries, keys and values have a bias")] = False
    attention_output_bias: Annotated[bool, Option("attention's output has a bias")] = False
    mlp_bias: Annotated[bool, Option("the linears of the MLP have a bias")] = False
    qk_norm: Annotated[bool, Option("RMSNorm over each head of queries and keys, before rotation")] = False
    positions: Annotated[Positions, Option("rotary angles, or a learned embedding")] = "rotary"
    max_positions: Annotated[
        int, Option("longest sequence of learned positions (0 for rotary ones)", range=(0, _MAX_POSITIONS))
    ] = 0
    rope_scaling: RopeScaling = RopeScaling()
    sliding_window: Annotated[
        int | None,
        Option("tokens that a token attends to, itself included (default: all before it)", range=(1, _MAX_POSITIONS)),
    ] = None
    full_attention_layers: Annotated[tuple[int, ...], Option("layers without the sliding window")] = ()
    scale_embeddings: Annotated[bool, Option("multiply embeddings by sqrt(hidden_size)")] = False
    experts: Experts = Experts()
    max_position_embeddings: Annotated[
        int | None, Option("longest sequence that rotary angles were trained for (default: not known)")
    ] = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_layers x experts.count", self.num_layers * self.experts.count, 0, _MAX_EXPERTS)
        self._check_heads()
        if self.head == "scalar" and self.tied_embeddings:
            raise UserError("a scalar head has no output embedding to tie; set tied_embeddings=False")
        if (self.positions == "learned") != (self.max_positions > 0):
            raise UserError(
                f"max_positions={self.max_positions} with positions={self.positions!r}: learned positions need at "
                "least 1, rotary ones have no limit (0)"
            )
        if self.positions == "learned" and self.rope_scaling.kind != "none":
            raise UserError("rope_scaling is for rotary positions; learned ones have no angles to scale")
        if self.sliding_window is None and self.full_attention_layers:
            raise UserError("full_attention_layers needs a sliding_window that the other layers have")
        if self.experts.count and (self.mlp != "gated" or self.mlp_bias):
            raise UserError("experts are gated MLPs without biases; set mlp='gated' and mlp_bias=False")

    def _check_heads(self) -> None:
        if self.attention_head_dim is None:
            if self.hidden_size % self.num_heads or self.head_dim % 2:
                raise UserError(
                    f"hidden_size={self.hidden_size} must be num_heads={self.num_heads} times an even head "
                    f"dimension; choose hidden_size as a multiple of {2 * self.num_heads}"
                )
        elif check_range("attention_head_dim", self.attention_head_dim, 2, 10**4) % 2:
            raise UserError(f"attention_head_dim={self.attention_head_dim} must be even")
        elif self.attention_head_dim * self.num_heads == self.hidden_size:
            object.__setattr__(self, "attention_head_dim", None)  # one way to say it: equal models compare equal
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.attention_head_dim is None else self.attention_head_dim

    @property
    def longest_sequence(self) -> int | None:
        """How many tokens a sequence may have; None: any number, or not known."""
        if self.positions == "learned":
            return self.max_positions
        if self.max_position_embeddings is None:
            return None
        # For these two kinds the field is the length before scaling, for others the length with it.
        factor = self.rope_scaling.factor if self.rope_scaling.kind in ("linear", "dynamic") else 1
        return int(self.max_position_embeddings * factor)

    @property
    def query_size(self) -> int:
        """Width of all query heads together, and of attention's output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def active_intermediate_size(self) -> int:
        """Width of the MLP that one token goes through, or of its experts together."""
        return self.intermediate_size * (self.experts.per_token or 1)

    def window(self, layer: int) -> int | None:
        """How many tokens a token of `layer` attends to, itself included; None: all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def with_head(self, head: Head) -> "DecoderConfig":
        """The same trunk under another head."""
        return replace(self, head=head, tied_embeddings=self.tied_embeddings and head == "lm")
