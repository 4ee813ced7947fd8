"""Hugging Face's `config.json`: the decoder that it describes, and the file that describes a decoder.

`realhf.architecture.families` says how each family reads and writes it. A decoder can be written as any family from
whose fields the same decoder is read back.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.architecture.families import FAMILIES
from realhf.architecture.families.family import Content, Family
from realhf.architecture.families.fields import Fields, shown
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.base.files import decode_json, read_file


def config_content(path: Path) -> Content:
    """The content of a config.json; only the language model's part, where it describes more.

    Raises:
        UserError: the file cannot be read or is not JSON.
    """
    remedy = "give the config.json of a Hugging Face model"
    content = read_file(path, lambda data: decode_json(data, dict[str, Any]), "config.json", remedy)
    if "hidden_size" not in content and isinstance(content.get("text_config"), dict):
        nested: Content = content["text_config"]
        return nested
    return content


def family_of(content: Mapping[str, Any], path: Path | str = "config.json") -> Family:
    """The family a config.json is of. Raises UserError where it does not say, and for one that is not supported."""
    model_type = content.get("model_type")
    if model_type is None:
        raise UserError(
            f"{path}: model_type is missing, so the model's family is unknown; add it, one of {', '.join(FAMILIES)}"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"{path}: model_type={shown(model_type)} is not supported; choose a checkpoint of {', '.join(FAMILIES)}, "
            "or have transformers compute the model (backend='transformers', see docs/models.md)"
        )
    return FAMILIES[model_type]


def decoder_of(content: Mapping[str, Any], path: Path | str = "config.json") -> DecoderConfig:
    """The decoder, under a language-model head, that the content of a config.json describes; `path` is for errors.

    Raises:
        UserError: the content lacks a field, is of an unknown family or has an unsupported setting.
    """
    fields = Fields(content, path)
    family = family_of(content, path)
    fields.refuse("quantization_config")
    try:
        return family.read(fields)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def write_config(model: DecoderConfig, dtype: str, like: Mapping[str, Any] | None = None) -> Content:
    """The content of a config.json from which transformers makes the same decoder.

    `like` is the config.json of the checkpoint that the model came from. If it describes the same decoder, its family
    and its other fields (end tokens, longest sequence) are kept.

    Raises:
        UserError: no family can express the decoder.
    """
    lm = model.with_head("lm")
    content = _content(lm, like)
    content["tie_word_embeddings"] = model.tied_embeddings
    family = family_of(content)
    class_suffix = family.lm_class if model.head == "lm" else "ForSequenceClassification"
    content["architectures"] = [family.class_prefix + class_suffix]
    if model.head == "scalar":
        content |= {"num_labels": 1, "id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
    return content | {"torch_dtype": dtype}


def _content(lm: DecoderConfig, like: Mapping[str, Any] | None) -> Content:
    if like is not None and _trunk(decoder_of(like)) == _trunk(lm):
        return {key: value for key, value in like.items() if key not in ("dtype", "transformers_version")}
    for family in FAMILIES.values():
        content = family.write(lm) | {"model_type": family.model_type}
        try:
            if decoder_of(content) == lm:
                return content
        except UserError:
            continue
    raise UserError(
        f"no Hugging Face family has all that this decoder needs ({lm}); those there are: {', '.join(FAMILIES)}"
    )


def _trunk(model: DecoderConfig) -> DecoderConfig:
    return model.with_head("scalar").with_head("lm")
