"""GPT-2: learned positions, LayerNorm, a plain MLP, biases everywhere."""

import re

from realhf.architecture.families.family import ACTIVATION_NAMES, Content, Family, Source
from realhf.architecture.families.fields import Fields
from realhf.architecture.model import DecoderConfig


def _read_gpt2(fields: Fields) -> DecoderConfig:
    fields.refuse("scale_attn_weights", True)
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=fields.number("n_inner", 4 * hidden),
        num_layers=fields.number("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=fields.number("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        rms_norm_eps=fields.real("layer_norm_epsilon", 1e-5),
        norm="layer",
        activation=fields.activation("activation_function", "gelu_new"),
        mlp="plain",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        positions="learned",
        max_positions=fields.number("n_positions"),
    )


def _write_gpt2(model: DecoderConfig) -> Content:
    return {
        "n_embd": model.hidden_size,
        "n_inner": model.intermediate_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "layer_norm_epsilon": model.rms_norm_eps,
        "activation_function": ACTIVATION_NAMES[model.activation],
    }


_OUTER_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
}
_LAYER_NAMES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_FUSED = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}


def _gpt2_source(parameter: str, shape: tuple[int, ...], model: DecoderConfig) -> Source:
    """Linear layers are stored [in, out]; query, key and value are one tensor."""
    module, kind = parameter.rsplit(".", 1)
    zeros = (0,) * len(shape)
    in_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if in_layer is None:
        return Source(f"{_OUTER_NAMES.get(module, module)}.{kind}", shape, zeros)
    layer, inner = in_layer.groups()
    tensor, stored, is_matrix = f"transformer.h.{layer}.{_LAYER_NAMES[inner]}.{kind}", shape[::-1], len(shape) == 2
    part = _FUSED.get(inner)
    if part is None:
        return Source(tensor, stored, zeros, transposed=is_matrix)
    outputs = model.hidden_size
    return Source(tensor, (*stored[:-1], 3 * outputs), (*zeros[:-1], part * outputs), transposed=is_matrix)


GPT2 = Family(
    model_type="gpt2",
    class_prefix="GPT2",
    read=_read_gpt2,
    write=_write_gpt2,
    source=_gpt2_source,
    lm_class="LMHeadModel",
    base_prefix="transformer.",
)
