"""Architectures that only `transformers` can build: their dimensions, and names and shapes of their parameters.

No torch here. A separate process asks `transformers` about a config.json, once; the answer is kept in the user's cache.
"""

import contextlib
import hashlib
import importlib.metadata
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json, read_bytes, write_atomically
from realhf.base.numbers import check_range

# Fields of a config.json that do not describe the architecture.
_UNUSED = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")
_TIMEOUT_S = 600
# A model is described by building it, module by module. Beyond these limits that would take hours, or all memory.
_MAX_LAYERS, _MAX_EXPERTS, _MAX_MODULES = 1000, 10_000, 100_000
_MAX_WHOLE, _MAX_REAL, _MAX_LISTED = 2**31, 1e15, 10_000
BACKEND = "transformers"  # as `realhf.api.backends` names it


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """A model that `transformers` builds and computes; the other fields are its dimensions, for planning.

    Attributes:
        config: JSON with sorted keys, from which `transformers` builds the model under a language-model head.
        parameters: (name, shape) of every parameter of that model, as `named_parameters` gives them.
        head_parameters: those of them that belong to the language-model head alone.
    """

    config: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    head_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parameters:
            raise UserError("parameters is empty; make a TransformersConfig with `transformers_model(DIRECTORY)`")


def check_backend(name: str, model: DecoderConfig, backend: str) -> None:
    """Raises UserError where the backend does not compute such a model: `transformers` computes models of its own
    config, every other backend those of this project's."""
    if isinstance(model, TransformersConfig) and backend != BACKEND and ":" not in backend:
        family = msgspec.json.decode(model.config).get("model_type")
        raise UserError(
            f"{name} is a {family!r}, which transformers alone can build, and has backend={backend!r}; give it "
            f"ModelSetup(backend={BACKEND!r}), or choose a checkpoint of another family"
        )
    if backend == BACKEND and not isinstance(model, TransformersConfig):
        raise UserError(
            f"{name} has backend={BACKEND!r} and an architecture of this project; give "
            "model_type=transformers_model(DIRECTORY) to its calls, or leave backend out"
        )


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of `python -m realhf.models.transformers_models` about a config.json; `error` where it is refused."""

    error: str = ""
    dimensions: dict[str, Any] = {}  # fields of `DecoderConfig`
    experts: tuple[int, int] = (0, 0)  # how many of a layer, how many of them a token goes through
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    head_parameters: tuple[str, ...] = ()


def transformers_model(directory: Path | str) -> TransformersConfig:
    """The architecture of a Hugging Face directory (or of its config.json) as `transformers` builds it, for models
    with `ModelSetup(backend="transformers")`.

    The directory's own code (`trust_remote_code`) is never executed.

    Raises:
        UserError: the config cannot be read, `transformers` is not installed, or it knows no such causal language
            model.
    """
    path = Path(directory)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = decode_json(read_bytes(path), dict[str, Any])
    except OSError as error:
        raise UserError(f"{path}: cannot read the architecture ({error.strerror}); give a config.json") from None
    except BadContentError as error:
        raise UserError(f"{path}: not a config.json: {error}; give that of a Hugging Face model") from None
    _check_numbers(content, path)
    if "quantization_config" in content:
        raise UserError(f"{path}: quantization_config is not supported; choose a checkpoint that is not quantized")
    config = {key: value for key, value in content.items() if key not in _UNUSED}
    text = msgspec.json.encode(config, order="sorted").decode()
    found = _described(text, path)
    if found.error:
        code = " (its own code, which auto_map names, is never executed)" if "auto_map" in content else ""
        raise UserError(
            f"{path}: this project does not know the model, and transformers cannot build it{code}: {found.error}"
        )
    count, per_token = found.experts
    try:
        return TransformersConfig(
            **found.dimensions,
            experts=Experts(count=count, per_token=per_token),
            config=text,
            parameters=found.parameters,
            head_parameters=found.head_parameters,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_numbers(content: dict[str, Any], path: Path) -> None:
    """Raises UserError for a number, at whatever depth of a config.json, that no model has."""
    layers, experts = 1, 1
    waiting: list[tuple[str, Any]] = list(content.items())
    while waiting:
        name, value = waiting.pop()
        where = f"{path}: {name}"
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            check_range(f"{where}: the length", len(value), 0, _MAX_LISTED)
            waiting += [(name, one) for one in value]
        elif isinstance(value, float):
            check_range(where, value, -_MAX_REAL, _MAX_REAL)
        elif isinstance(value, int):
            if "layer" in name:
                layers = max(layers, check_range(where, value, -_MAX_LAYERS, _MAX_LAYERS))
            elif "expert" in name and "size" not in name and "dim" not in name:
                experts = max(experts, check_range(where, value, -_MAX_EXPERTS, _MAX_EXPERTS))
            else:
                check_range(where, value, -_MAX_WHOLE, _MAX_WHOLE)
    check_range(f"{path}: layers times experts", layers * experts, 1, _MAX_MODULES)


def _described(config: str, path: Path) -> Description:
    """The answer of `transformers`, or that of an earlier time."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"{path} is of a family that transformers alone can build, and transformers is not installed; install it: "
            "pip install 'realhf[transformers]'"
        ) from None
    digest = hashlib.sha256(f"{version}\n{config}".encode()).hexdigest()
    kept = platformdirs.user_cache_path("realhf") / "transformers" / f"{digest}.json"
    with contextlib.suppress(OSError, BadContentError):  # not asked yet
        return decode_json(read_bytes(kept), Description)
    try:
        done = subprocess.run(
            python_command("realhf.models.transformers_models"),
            input=config.encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{path}: transformers did not build the model within {_TIMEOUT_S} s; choose a checkpoint of fewer layers"
        ) from None
    try:
        found = decode_json((done.stdout.splitlines() or [b""])[-1], Description)
    except BadContentError:
        raise UserError(
            f"{path}: transformers said nothing of it: {done.stderr.decode(errors='replace')[-2000:]}"
        ) from None
    if not found.error:
        with contextlib.suppress(OSError):  # it is asked again the next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, msgspec.json.encode(found))
    return found
