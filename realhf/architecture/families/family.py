"""The description of a model family: how its `config.json` and its tensor names describe a decoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from realhf.architecture.families.fields import Fields
from realhf.architecture.model import Activation, DecoderConfig

Content = dict[str, Any]

ACTIVATION_NAMES: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Source:
    """Where a checkpoint holds one whole parameter.

    tensor, shape: the checkpoint's tensor.
    offset: where the parameter starts in the tensor, which may hold several.
    transposed: the tensor holds the parameter transposed.
    """

    tensor: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    transposed: bool = False


def same_name(parameter: str, shape: tuple[int, ...], model: DecoderConfig) -> Source:
    """The parameter is a tensor of its own, named as here (`realhf.geometry.parameters`)."""
    return Source(parameter, shape, (0,) * len(shape))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face.

    class_prefix: begins the names of its classes in transformers; `lm_class` ends that of its language model.
    read: the decoder that a config.json describes. Raises UserError for a field that the decoder cannot have.
    write: the fields of a config.json from which `read` gives the decoder, if the family can express it.
    source: where a checkpoint has a parameter, by the parameter's name and shape.
    base_prefix: begins the names of all tensors but the head's, except in checkpoints of the model without a head.
    """

    model_type: str
    class_prefix: str
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], Content]
    source: Callable[[str, tuple[int, ...], DecoderConfig], Source] = same_name
    lm_class: str = "ForCausalLM"
    base_prefix: str = ""
