"""A Hugging Face checkpoint directory: its config, and the file that holds each tensor. No torch here.

From the headers of the files a launcher checks that a model can be loaded before anything starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgspec

from realhf.architecture.families.family import Family, Source
from realhf.architecture.hugging_face import config_content, decoder_of, family_of
from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig, transformers_model
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json, open_regular, read_bytes
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint_index import (
    INDEX_FILE,
    HeaderEntry,
    check_architecture,
    check_plain_name,
    read_header,
    read_index,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

# Files that are copied along with the weights.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

_DTYPES = ("F64", "F32", "BF16", "F16")
_CHUNK_BYTES = 2**24
_HEADS = ("lm_head.weight", "score.weight")
# Tensors that are no parameters: buffers that old versions of transformers saved.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class _WeightsIndex(msgspec.Struct, frozen=True):
    """The field of `model.safetensors.index.json` that is read; there may be others."""

    weight_map: dict[str, str]


def sources(model: DecoderConfig, family: Family) -> dict[str, Source]:
    """Where a checkpoint of `family` has each parameter of `model`, by the parameter's name."""
    return {spec.name: family.source(spec.name, spec.shape, model) for spec in decoder_parameters(model)}


class HuggingFaceDirectory:
    """The content of a checkpoint directory, by its config.json, its index and the headers of its files.

    Raises:
        UserError: no such directory, a config.json that cannot be used, no safetensors, a missing or truncated file.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"checkpoint {path} does not exist; give the directory of a Hugging Face checkpoint")
        self.config = config_content(self.path / CONFIG_FILE)
        self.family = family_of(self.config, self.path / CONFIG_FILE)
        self.model: DecoderConfig = decoder_of(self.config, self.path / CONFIG_FILE)  # under a language-model head

    @cached_property
    def tensors(self) -> dict[str, tuple[Path, HeaderEntry]]:
        """Every tensor by name: the file that holds it, its dtype and shape."""
        held = {name: (path, entry) for path in self._files() for name, entry in read_header(path).items()}
        for name, file in self._weight_map().items():
            if name not in held:
                raise UserError(f"{self.path / file} lacks the tensor {name} that the index puts there; copy it again")
        return held

    def sources(self, model: DecoderConfig) -> dict[str, Source]:
        """Where this checkpoint has each parameter of `model`, by the parameter's name."""
        found, prefix = sources(model, self.family), self.family.base_prefix
        if not prefix or any(name.startswith(prefix) for name in self.tensors):
            return found
        # Saved without a head, as the published GPT-2 is.
        return {name: replace(source, tensor=source.tensor.removeprefix(prefix)) for name, source in found.items()}

    def check(self, model: DecoderConfig, new_head: bool = False) -> None:
        """Raises UserError, naming field or tensor, if `model` cannot be loaded from this checkpoint.

        With `new_head` the checkpoint may have any head, or none.
        """
        self._check_architecture(model)
        wanted = {name: s for name, s in self.sources(model).items() if not (new_head and name in _HEADS)}
        for source in wanted.values():
            self._check_tensor(source, model)
        used = {source.tensor for source in wanted.values()}
        allowed = set(_HEADS) if new_head or model.tied_embeddings else set()
        for name in self.tensors:
            if name not in used | allowed and not name.endswith(_BUFFERS):
                raise UserError(
                    f"checkpoint {self.path} has the tensor {name}, which a {self.family.model_type} of its "
                    "config.json does not have; choose a checkpoint whose files and config.json belong together"
                    + (", or a new head (new_head=True)" if name in _HEADS else "")
                )
        if model.tied_embeddings and "lm_head.weight" in self.tensors:
            self._check_tied(self.sources(model)["model.embed_tokens.weight"].tensor)

    def _check_architecture(self, model: DecoderConfig) -> None:
        ours, theirs = (msgspec.to_builtins(m.with_head("scalar")) for m in (model, self.model))
        differing = [f"{k}={theirs[k]!r} (the model has {ours[k]!r})" for k in ours if ours[k] != theirs[k]]
        if model.head == "lm" and model.tied_embeddings != self.model.tied_embeddings:
            differing.append(f"tied_embeddings={self.model.tied_embeddings} (the model has {model.tied_embeddings})")
        if differing:
            raise UserError(
                f"checkpoint {self.path} is of another architecture: {', '.join(differing)}; take the model's "
                "architecture from its config.json or choose another checkpoint"
            )

    def _check_tied(self, embedding: str) -> None:
        """Raises UserError if the stored output embedding differs from `embedding`: transformers would then not tie the
        two, and load another model."""
        (path, ours), (head_path, theirs) = self.tensors[embedding], self.tensors["lm_head.weight"]
        is_alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not is_alike or any(a != b for a, b in zip(_content(path, ours), _content(head_path, theirs), strict=True)):
            raise UserError(
                f"checkpoint {self.path} ties the output embedding to {embedding} (tie_word_embeddings of its "
                f"config.json), but {head_path.name} holds another lm_head.weight; set tie_word_embeddings to false "
                "there, which keeps both, or remove lm_head.weight from the file"
            )

    def _check_tensor(self, source: Source, model: DecoderConfig) -> None:
        if source.tensor not in self.tensors:
            remedy = "choose a complete checkpoint"
            if source.tensor == "score.weight":
                remedy = "it has no scalar head: start with a new one (new_head=True)"
            raise UserError(f"checkpoint {self.path} lacks the tensor {source.tensor}; {remedy}")
        file, entry = self.tensors[source.tensor]
        if entry.shape != source.shape:
            raise UserError(
                f"{file}: {source.tensor} has shape {list(entry.shape)}, but config.json asks for "
                f"{list(source.shape)}; choose a checkpoint whose files and config.json belong together"
            )
        if entry.dtype not in _DTYPES:
            raise UserError(
                f"{file}: {source.tensor} is of dtype {entry.dtype}, which a parameter cannot be; choose a checkpoint "
                f"in one of {', '.join(_DTYPES)}, not a quantized one"
            )

    def _files(self) -> list[Path]:
        if (self.path / WEIGHTS_INDEX_FILE).is_file():
            return [self.path / name for name in sorted(set(self._weight_map().values()))]
        if (self.path / WEIGHTS_FILE).is_file():
            return [self.path / WEIGHTS_FILE]
        others = sorted(p.name for p in self.path.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        why = f" (only {others[0]}, which needs pickle and is not read)" if others else ""
        raise UserError(
            f"checkpoint {self.path} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}{why}; "
            "save it again with save_pretrained(..., safe_serialization=True)"
        )

    def _weight_map(self) -> Mapping[str, str]:
        path = self.path / WEIGHTS_INDEX_FILE
        if not path.is_file():
            return {}
        try:
            weight_map = decode_json(read_bytes(path), _WeightsIndex).weight_map
        except (BadContentError, OSError) as error:
            raise UserError(f"{path} is damaged ({error}); copy the checkpoint again") from None
        for file in set(weight_map.values()):
            check_plain_name(path, file)
        return weight_map


def _content(path: Path, entry: HeaderEntry) -> Iterator[bytes]:
    """The bytes of a tensor, in parts whose sizes depend only on the tensor's size."""
    start, stop = entry.data_offsets
    with open_regular(path) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little") + start)
        for at in range(start, stop, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, stop - at))


def companions_of(directory: Path | str) -> list[Path]:
    """Tokenizer and generation files of a Hugging Face directory that are there."""
    return [Path(directory) / name for name in COMPANION_FILES if (Path(directory) / name).is_file()]


def is_hugging_face(directory: Path | str) -> bool:
    """Whether a checkpoint directory is Hugging Face's, and not one of boxes."""
    return (Path(directory) / CONFIG_FILE).is_file()


def _check_same(directory: Path, model: TransformersConfig) -> None:
    """Raises UserError where the directory is of another architecture. `transformers` checks its tensors later."""
    found = transformers_model(directory)
    if (found.config, found.parameters) != (model.config, model.parameters):
        raise UserError(
            f"checkpoint {directory} is of another architecture than the model; give its calls "
            f"model_type=transformers_model({str(directory)!r}), or choose another checkpoint"
        )


def checkpoint_files(directory: Path | str) -> list[Path]:
    """The files of a checkpoint of either kind that a model is read from. Raises UserError for no checkpoint."""
    directory = Path(directory)
    if not is_hugging_face(directory):
        return [directory / INDEX_FILE, *(directory / saved.file for saved in read_index(directory).files)]
    described = [directory / name for name in (CONFIG_FILE, WEIGHTS_INDEX_FILE)]
    return [path for path in described if path.is_file()] + sorted(directory.glob("*.safetensors"))


def check_checkpoint(directory: Path | str, model: DecoderConfig, new_head: bool = False) -> None:
    """Raises UserError where `model` cannot be loaded from a checkpoint of either kind; reads no tensor."""
    if is_hugging_face(directory) and isinstance(model, TransformersConfig):
        _check_same(Path(directory), model)
    elif is_hugging_face(directory):
        HuggingFaceDirectory(directory).check(model, new_head)
    else:
        check_architecture(read_index(directory), Path(directory), model, ignore_head=new_head)
