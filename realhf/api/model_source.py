"""What a model is made from: a Hugging Face directory, a GGUF file, or the directory of a run or of one of its
checkpoints."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from realhf.architecture.model import DecoderConfig, Head
from realhf.architecture.named import architecture
from realhf.architecture.transformers_config import BACKEND as TRANSFORMERS
from realhf.architecture.transformers_config import TransformersConfig, transformers_model
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json, read_file
from realhf.gguf.cache import find_gguf, hugging_face_directory

_CONFIG, _INDEX, _TOKENIZER = "config.json", "index.json", "tokenizer.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # of a model or data set on the Hugging Face hub
_REMEDY = (
    "give a Hugging Face directory (config.json, safetensors), a GGUF file, the directory of a run, or one of its "
    "models, RUN_DIR/checkpoints/latest/MODEL"
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The weights of a model, its architecture, and the tokenizer that came with it.

    checkpoint: the directory of the weights; None: there are none, they are random.
    head: that whose weights the checkpoint has; None: there is no checkpoint.
    tokenizer: a directory with a tokenizer.json, or None where none came with the weights.
    """

    checkpoint: str | None
    architecture: DecoderConfig
    head: Head | None = None
    tokenizer: str | None = None


class _HuggingFaceConfig(msgspec.Struct, frozen=True):
    """The part of a config.json that names the class of the model."""

    architectures: list[str] | None = None


class _Index(msgspec.Struct, frozen=True):
    """The part of a checkpoint's index.json that says what model it is of; `metadata` has the optimizer's steps where
    that has been trained."""

    architecture: dict[str, Any]
    metadata: dict[str, Any] = {}


def model_source(
    path: str, otherwise: DecoderConfig | None = None, *, head: Literal["lm", "scalar"] = "lm", backend: str = ""
) -> ModelSource:
    """Finds weights, architecture and tokenizer in the directory or GGUF file that a user names; with an empty `path`
    it is the architecture `otherwise` with random weights. A GGUF file is converted once, into a Hugging Face directory
    in the user's cache.

    Of a run it takes the model of its newest checkpoint that has the wanted `head`; where there are several, the one
    that was trained. The architecture is that of the checkpoint, with its own head; a model with another head makes a
    new one.

    Raises:
        UserError: it is none of those, cannot be read, or it is not clear which of its models is meant.
    """
    if not path and otherwise is not None:
        return ModelSource(checkpoint=None, architecture=otherwise)
    directory = Path(path)
    if path and (file := find_gguf(directory)):
        path = str(directory := hugging_face_directory(file))
    if not path or not directory.is_dir():
        is_of_hub = HUB_NAME.fullmatch(path) and not directory.parent.exists()
        raise UserError(f"model {path!r}: no such directory; {_REMEDY}{_download(path) if is_of_hub else ''}")
    if (directory / _CONFIG).is_file():
        found = transformers_model(path) if backend == TRANSFORMERS else architecture(path)
        head = _head_of(directory / _CONFIG)
        return ModelSource(checkpoint=path, architecture=found, head=head, tokenizer=_with_tokenizer(directory))
    checkpoint = directory if (directory / _INDEX).is_file() else _model_of_run(directory, head)
    found = _saved(checkpoint)
    return ModelSource(
        checkpoint=str(checkpoint), architecture=found, head=found.head, tokenizer=_tokenizer_of_run(checkpoint)
    )


def _download(name: str) -> str:
    folder = name.partition("/")[2]
    return (
        "; nothing is downloaded: if this is a name on the Hugging Face hub, get the model first, with "
        f"`hf download {name} --local-dir {folder}`, and give --model ./{folder}"
    )


def _head_of(config: Path) -> Head:
    """By the class that a config.json names; without one it is taken for a language model."""
    named = read_file(config, lambda data: decode_json(data, _HuggingFaceConfig), "config.json", _REMEDY).architectures
    return "scalar" if any(name.endswith("Classification") for name in named or ()) else "lm"


def _model_of_run(directory: Path, head: str) -> Path:
    """The only model with this head in the newest checkpoint of a run; else its only model."""
    latest = directory / "checkpoints" / "latest"
    latest = latest if latest.is_dir() else directory
    models = sorted(index.parent for index in latest.glob(f"*/{_INDEX}"))
    if not models:
        raise UserError(f"model {directory}: no checkpoint of a model is there; {_REMEDY}")
    fitting = [model for model in models if _saved(model).head == head] if len(models) > 1 else models
    if len(fitting) > 1:  # a copy that follows the trained model is not meant
        fitting = [model for model in fitting if "optimizer_steps" in _index(model).metadata] or fitting
    if len(fitting) != 1:
        raise UserError(
            f"model {directory}: the run has the models {', '.join(model.name for model in models)}, and "
            f"{'none' if not fitting else 'more than one'} of them has a head of kind {head!r}; give one of them: "
            f"{models[0]}"
        )
    return fitting[0]


def _saved(checkpoint: Path) -> DecoderConfig:
    """The architecture that a checkpoint's index names."""
    index = _index(checkpoint)
    kind = TransformersConfig if "parameters" in index.architecture else DecoderConfig
    try:
        found: DecoderConfig = decode_json(json.dumps(index.architecture), kind)
    except BadContentError as error:
        raise UserError(f"{checkpoint / _INDEX}: not an architecture: {error}; use another checkpoint") from None
    return found


def _index(checkpoint: Path) -> _Index:
    return read_file(checkpoint / _INDEX, lambda data: decode_json(data, _Index), "index.json", _REMEDY)


def _tokenizer_of_run(checkpoint: Path) -> str | None:
    """RUN_DIR/tokenizer, for RUN_DIR/checkpoints/STEP/MODEL."""
    parents = checkpoint.absolute().parents
    return _with_tokenizer(parents[2] / "tokenizer") if len(parents) > 2 else None


def _with_tokenizer(directory: Path) -> str | None:
    return str(directory) if (directory / _TOKENIZER).is_file() else None
