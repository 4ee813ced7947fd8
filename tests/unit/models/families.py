"""The oracle for every family: random small models of transformers, in float32 or truly in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from realhf.architecture.families import FAMILIES
from realhf.architecture.hugging_face import config_content, decoder_of
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.hugging_face_weights import HuggingFaceReader
from realhf.parallel.groups import ParallelGroups
from tests.unit.engine.losses import ONE_RANK, boxes_of

_SCALED_ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
]


def config_class(family: str) -> type[PreTrainedConfig]:
    return getattr(transformers, f"{FAMILIES[family].class_prefix}Config")


@st.composite
def hugging_face_configs(draw: st.DrawFn, family: str, max_kv_heads: int = 4) -> PreTrainedConfig:
    """A small configuration of a family; what families differ in is drawn."""
    layers = draw(st.sampled_from([1, 2, 3]), label="layers")
    vocab = draw(st.sampled_from([24, 36]), label="vocab")
    tied = draw(st.booleans(), label="tied")
    if family == "gpt2":
        return config_class(family)(
            n_embd=24,
            n_layer=layers,
            n_head=draw(st.sampled_from([2, 4])),
            n_inner=draw(st.sampled_from([None, 40])),
            n_positions=draw(st.sampled_from([20, 64])),
            vocab_size=vocab,
            tie_word_embeddings=tied,
            activation_function=draw(st.sampled_from(["gelu_new", "gelu", "relu"])),
            layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3])),
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    heads = 4
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 4) if n <= max_kv_heads]), label="kv_heads")
    fields: dict[str, Any] = {
        "hidden_size": 24 if family == "gemma" else 32,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    rope: dict[str, Any] = {"rope_type": "default"}
    if family in ("llama", "qwen2", "qwen3"):
        rope = draw(st.sampled_from([rope, *_SCALED_ROPES]), label="rope")
    fields["rope_parameters"] = rope | {"rope_theta": draw(st.sampled_from([500.0, 10_000.0]))}
    if family in ("llama", "mistral", "mixtral", "gemma", "qwen3", "qwen3_moe"):
        fields["head_dim"] = draw(st.sampled_from([6, 8, 12]), label="head_dim")
    if family in ("llama", "qwen3", "qwen3_moe", "gemma"):
        fields["attention_bias"] = draw(st.booleans(), label="attention_bias")
    if family == "llama":
        fields["mlp_bias"] = draw(st.booleans(), label="mlp_bias")
    if family in ("mistral", "mixtral"):
        fields["sliding_window"] = draw(st.sampled_from([None, 1, 4, 7]), label="window")
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = draw(st.booleans(), label="use_sliding_window")
        fields["sliding_window"] = draw(st.sampled_from([3, 6]), label="window")
    if family in ("qwen2", "qwen3") and draw(st.booleans(), label="layer_types"):
        fields["max_window_layers"] = draw(st.integers(0, layers), label="max_window_layers")
    elif family in ("qwen2", "qwen3"):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        fields["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers), label="layer_types")
        if not fields["use_sliding_window"]:
            fields["layer_types"] = ["full_attention"] * layers
    if family == "mixtral":
        fields |= {"num_local_experts": 4, "num_experts_per_tok": draw(st.sampled_from([1, 2]))}
    if family == "qwen3_moe":
        fields |= {"num_experts": 5, "num_experts_per_tok": draw(st.sampled_from([2, 3])), "moe_intermediate_size": 12}
        fields["norm_topk_prob"] = draw(st.booleans())
    return config_class(family)(**fields)


class _Wide(TorchDispatchMode):
    """transformers casts to float32 in norms, rotary tables and routers, whatever the dtype; in here it casts to
    float64 instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Inside, all that transformers makes and computes is of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype == torch.float64:
            with _Wide():
                yield
        else:
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Oracle:
    """A random model of transformers, saved in `directory`."""

    hf: PreTrainedModel
    directory: Path
    dtype: torch.dtype

    @cached_property
    def config(self) -> DecoderConfig:
        return decoder_of(config_content(self.directory / "config.json"))

    def logits(self, sequences: list[Tensor]) -> Tensor:
        """Of every sequence run on its own, laid end to end: [tokens, vocab]."""
        with computing_in(self.dtype):
            return torch.cat([self.hf(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences])

    def state(self, name: str) -> dict[str, Tensor]:
        """The present parameters under the names of a decoder here, by way of a checkpoint called `name`."""
        folder = self.directory / name
        self.hf.save_pretrained(folder)
        reader = HuggingFaceReader(folder, self.config)
        return {spec.name: reader.read(whole_box(spec.name, spec.shape)) for spec in decoder_parameters(self.config)}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients under the names of a decoder here: saved in place of the parameters, which stay as they are."""
        before = [parameter.data for parameter in self.hf.parameters()]
        for parameter in self.hf.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad.clone()
        gradients = self.state("gradients")
        for parameter, data in zip(self.hf.parameters(), before, strict=True):
            parameter.data = data
        return gradients


def oracle(config: PreTrainedConfig, directory: Path, dtype: torch.dtype, seed: int = 0) -> Oracle:
    """A model of `config` with random weights, large enough for attention and routers to be far from uniform."""
    disable_progress_bar()
    config._attn_implementation = "sdpa"  # the eager one computes its softmax in float32
    config._experts_implementation = "eager"  # the grouped product knows no float64
    with computing_in(dtype):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    hf.eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in hf.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(noise * 0.3 if parameter.dim() > 1 else 1 + noise * 0.3)
    hf.tie_weights()
    hf.save_pretrained(directory)
    return Oracle(hf, directory, dtype)


def load(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, groups: ParallelGroups = ONE_RANK, **arguments: Any
) -> ShardedModel:
    """Our model under a layout with the weights of a Hugging Face checkpoint."""
    model = ShardedModel(ModelSpec(config, groups, dtype, **arguments))
    reader = HuggingFaceReader(directory, config)
    for box, tensor in boxes_of(model).values():
        reader.read_into(tensor, box)
    model.residency.written()
    return model


def whole_box(name: str, shape: tuple[int, ...]) -> Box:
    return Box(name, (0,) * len(shape), shape)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the norm of theirs."""
    return ((ours - theirs).norm() / theirs.norm()).item()
