"""The first Gemma."""

from realhf.architecture.families.family import Family
from realhf.architecture.families.fields import Fields
from realhf.architecture.families.llama import read_llama_kin, write_llama_kin
from realhf.architecture.model import DecoderConfig


def _read_gemma(fields: Fields) -> DecoderConfig:
    fields.refuse("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias")
    activation = fields.activation("hidden_act", "gelu_pytorch_tanh")
    return read_llama_kin(
        fields,
        tied=True,
        head_dim=256,
        # Google's own files say "gelu" and mean the approximation; transformers corrects it, too.
        activation="gelu_tanh" if activation == "gelu" else activation,
        qkv_bias=bias,
        attention_output_bias=bias,
        norm="rms_plus_one",
        scale_embeddings=True,
    )


GEMMA = Family(model_type="gemma", class_prefix="Gemma", read=_read_gemma, write=write_llama_kin)
