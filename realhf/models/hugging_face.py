"""Where a decoder's parameters stand in a Hugging Face checkpoint. No torch here: the launcher checks files with it."""

from dataclasses import dataclass

from realhf.architecture.model import DecoderConfig
from realhf.geometry.parameters import ParameterSpec, decoder_parameters


@dataclass(frozen=True)
class Source:
    """One whole parameter in a tensor of a Hugging Face checkpoint.

    `shape` is that of the tensor. The parameter, turned around if `transposed`, starts at `offset` in it.
    """

    tensor: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    transposed: bool = False


def sources(model: DecoderConfig, model_type: str) -> dict[str, Source]:
    """Parameter -> where a checkpoint of the family `model_type` has it."""
    specs = decoder_parameters(model)
    if model_type == "gpt2":
        return {spec.name: _gpt2(spec, model) for spec in specs}
    return {
        spec.name: Source(_mixtral(spec.name) if model_type == "mixtral" else spec.name, spec.shape, _zeros(spec))
        for spec in specs
    }


def is_ignored(tensor: str) -> bool:
    """Whether a checkpoint may have the tensor although no parameter is in it: buffers that old versions saved."""
    return tensor.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _mixtral(name: str) -> str:
    """`...mlp.experts.3.up_proj.weight` -> `...block_sparse_moe.experts.3.w3.weight`."""
    if ".mlp." not in name:
        return name
    owner, leaf, weight = name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 2)
    return f"{owner}.{_MIXTRAL.get(leaf, leaf)}.{weight}"


# Linear layers of GPT-2 are stored [in, out]; query, key and value are one.
_GPT2_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_FUSED = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}


def _gpt2(spec: ParameterSpec, model: DecoderConfig) -> Source:
    module, kind = spec.name.rsplit(".", 1)
    inner = module.removeprefix(f"model.layers.{spec.layer}.")
    if spec.place != "layer":
        return Source(f"{_GPT2_NAMES.get(module, module)}.{kind}", spec.shape, _zeros(spec))
    tensor = f"transformer.h.{spec.layer}.{_GPT2_NAMES[inner]}.{kind}"
    shape = spec.shape[::-1]
    part = _GPT2_FUSED.get(inner)
    if part is None:
        return Source(tensor, shape, _zeros(spec), transposed=len(shape) == 2)
    outputs = model.hidden_size
    return Source(
        tensor, (*shape[:-1], 3 * outputs), (*(0 for _ in shape[:-1]), part * outputs), transposed=len(shape) == 2
    )


def _zeros(spec: ParameterSpec) -> tuple[int, ...]:
    return (0,) * len(spec.shape)
