"""The parameters of a decoder: names, global shapes, how each is divided. No torch here."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig

Place = Literal["embedding", "layer", "head"]
Initial = Literal["normal", "one", "zero"]


@dataclass(frozen=True)
class ParameterSpec:
    """One global parameter.

    shard_dim: the dimension that tensor parallelism divides; None: every rank holds all of the parameter.
    place, layer: determine the pipeline stage that holds it.
    initial: its values before training.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    place: Place
    layer: int = -1
    tied: bool = False
    initial: Initial = "normal"

    @property
    def size(self) -> int:
        return prod(self.shape)

    def is_on_stage(self, layers: Collection[int], stage: int, pp: int) -> bool:
        """Whether the stage that has `layers` holds it; a tied embedding is on the first and the last stage."""
        if self.place == "layer":
            return self.layer in layers
        return (self.place == "embedding" and stage == 0) or ((self.place == "head" or self.tied) and stage == pp - 1)


@lru_cache(maxsize=64)
def decoder_parameters(model: DecoderConfig) -> tuple[ParameterSpec, ...]:
    """All parameters in the order of the forward pass.

    Every family of this project has the names of Hugging Face's Llama here, and weights are [out, in]; other models
    have the names and shapes that `transformers` gives.
    """
    if isinstance(model, TransformersConfig):
        return tuple(_of_transformers(model))
    hidden, vocab = model.hidden_size, model.vocab_size
    specs = [ParameterSpec("model.embed_tokens.weight", (vocab, hidden), 0, "embedding", tied=model.tied_embeddings)]
    if model.positions == "learned":
        specs.append(ParameterSpec("model.embed_positions.weight", (model.max_positions, hidden), None, "embedding"))
    for i in range(model.num_layers):
        specs += _layer(model, f"model.layers.{i}.", i)
    specs += _norm(model, "model.norm", "head", -1)
    if model.head == "scalar":
        specs.append(ParameterSpec("score.weight", (1, hidden), None, "head"))
    elif not model.tied_embeddings:
        specs.append(ParameterSpec("lm_head.weight", (vocab, hidden), 0, "head"))
    return tuple(specs)


def _of_transformers(model: TransformersConfig) -> Iterator[ParameterSpec]:
    """No parameter is divided over tensor parallelism. A number in a name is the layer. Parameters before the first
    layer belong to the embedding, those after it to the head."""
    place: Place = "embedding"
    for name, shape in model.parameters:
        number = re.search(r"\.(\d+)\.", name)
        layer = int(number[1]) if number else -1
        if 0 <= layer < model.num_layers:
            place = "head"  # for all without a number from now on
            yield ParameterSpec(name, shape, None, "layer", layer)
        elif model.head == "lm" or name not in model.head_parameters:
            yield ParameterSpec(name, shape, None, place)
    if model.head == "scalar":
        yield ParameterSpec("score.weight", (1, model.hidden_size), None, "head")


def _layer(model: DecoderConfig, prefix: str, layer: int) -> list[ParameterSpec]:
    hidden, q, kv = model.hidden_size, model.query_size, model.kv_size

    def linears(owner: str, outputs: Mapping[str, int], inputs: int, shard_dim: int | None, bias: bool = False) -> None:
        """Those of one input have their weights side by side, and then their biases (`realhf.parallel.joined`)."""
        names = {f"{prefix}{owner}.{name}": size for name, size in outputs.items()}
        specs.extend(
            ParameterSpec(f"{name}.weight", (size, inputs), shard_dim, "layer", layer) for name, size in names.items()
        )
        if bias:  # divided with the outputs, or whole
            dim = 0 if shard_dim == 0 else None
            specs.extend(
                ParameterSpec(f"{name}.bias", (size,), dim, "layer", layer, initial="zero")
                for name, size in names.items()
            )

    def mlp(name: str, bias: bool) -> None:
        inner = model.intermediate_size
        of_input = ("gate_proj", "up_proj") if model.mlp == "gated" else ("up_proj",)
        linears(name, dict.fromkeys(of_input, inner), hidden, 0, bias)
        linears(name, {"down_proj": hidden}, inner, 1, bias)

    specs = _norm(model, prefix + "input_layernorm", "layer", layer)
    linears("self_attn", {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, 0, model.qkv_bias)
    linears("self_attn", {"o_proj": hidden}, q, 1, model.attention_output_bias)
    if model.qk_norm:
        specs += [
            ParameterSpec(f"{prefix}self_attn.{n}.weight", (model.head_dim,), None, "layer", layer, initial="one")
            for n in ("q_norm", "k_norm")
        ]
    specs += _norm(model, prefix + "post_attention_layernorm", "layer", layer)
    if not model.experts.count:
        mlp("mlp", model.mlp_bias)
        return specs
    linears("mlp", {"gate": model.experts.count}, hidden, None)
    for j in range(model.experts.count):
        mlp(f"mlp.experts.{j}", False)
    return specs


def _norm(model: DecoderConfig, name: str, place: Place, layer: int) -> list[ParameterSpec]:
    weight: Initial = "zero" if model.norm == "rms_plus_one" else "one"
    specs = [ParameterSpec(f"{name}.weight", (model.hidden_size,), None, place, layer, initial=weight)]
    if model.norm == "layer":
        specs.append(ParameterSpec(f"{name}.bias", (model.hidden_size,), None, place, layer, initial="zero"))
    return specs


def sees_own_tokens(spec: ParameterSpec) -> bool:
    """Whether a tensor-parallel rank applies this replicated parameter only to its own tokens under sequence
    parallelism, so its gradient must be summed over the ranks. Norms of heads see all tokens, of the rank's heads."""
    return spec.shard_dim is None and not spec.name.endswith(("q_norm.weight", "k_norm.weight"))


def parameter_count(model: DecoderConfig) -> int:
    return sum(spec.size for spec in decoder_parameters(model))
