"""Converts a checkpoint between Hugging Face's format and boxes, or from GGUF, in one process without a GPU.

`python -m realhf.models.convert` is what `realhf convert` runs: the command line itself does not load torch.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import torch

from realhf.api.model_source import model_source
from realhf.architecture.hugging_face import config_content, family_of
from realhf.architecture.model import DecoderConfig, DType
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.digest import weights_digest
from realhf.base.errors import UserError
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters, parameter_count
from realhf.gguf.cache import find_gguf
from realhf.gguf.folder import GGUFModel
from realhf.models.checkpoint import CheckpointReader, snapshot, write_snapshot
from realhf.models.checkpoint_index import finish, staged, staging_directory
from realhf.models.hugging_face_files import CONFIG_FILE, HuggingFaceDirectory, companions_of, is_hugging_face
from realhf.models.hugging_face_weights import HuggingFaceReader, in_parts, write_hugging_face
from realhf.models.opening import open_checkpoint
from realhf.realloc.execute.checksum import ParameterSums

# In a checkpoint of boxes: the files that came with the weights, for converting back.
COMPANION_FOLDER = "hugging_face"

_DTYPES: dict[str, DType] = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float32"}

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion. `dtype` None keeps the source's (float16 becomes float32); `like` is a Hugging Face directory whose
    config.json and tokenizer the result gets."""

    source: str
    target: str
    dtype: DType | None = None
    like: str | None = None
    max_file_bytes: int = 5 * 10**9


def convert(conversion: Conversion, say: Say) -> None:
    """Converts in the direction that the source determines, and reports every step to `say`.

    Raises:
        UserError: the source cannot be read, or the target exists. Files written before are removed.
    """
    if Path(conversion.target).exists():
        raise UserError(f"{conversion.target} exists already; give a new directory, or remove it first")
    try:
        if (file := find_gguf(Path(conversion.source))) is not None:
            from_gguf(file, conversion, say)
        elif is_hugging_face(conversion.source):
            to_boxes(conversion, say)
        else:
            to_hugging_face(conversion, say)
    except BaseException:
        shutil.rmtree(staging_directory(Path(conversion.target)), ignore_errors=True)
        raise


def from_gguf(file: Path, conversion: Conversion, say: Say) -> None:
    """From a GGUF file to a Hugging Face directory."""
    if conversion.dtype is not None or conversion.like is not None:
        raise UserError(
            f"{file}: --dtype and --like are not for GGUF files, whose numbers and tokenizer are kept; leave them out, "
            "and convert the directory again"
        )
    model, target = GGUFModel(file), Path(conversion.target)
    _describe(f"{file}: GGUF {model.file.fields['general.architecture']}", model.model, say)
    with staged(target, ()) as staging:
        files = model.write(staging)
        for path in files:
            say(f"wrote {path.name}, {path.stat().st_size:,} bytes")
    say(f"{target}: Hugging Face {family_of(config_content(target / CONFIG_FILE)).model_type}")


def to_boxes(conversion: Conversion, say: Say) -> None:
    """From a Hugging Face directory to a checkpoint of boxes."""
    source, target = HuggingFaceDirectory(conversion.source), Path(conversion.target)
    has_values = "score.weight" in source.tensors
    model = source.model.with_head("scalar") if has_values else source.model
    _describe(f"{source.path}: Hugging Face {source.family.model_type}", model, say)
    reader = HuggingFaceReader(source.path, model)
    dtype = conversion.dtype or _dtype(source, model)
    shapes = {spec.name: spec.shape for spec in decoder_parameters(model)}
    owners: dict[int, list[Box]] = {}
    for rank, names in enumerate(in_parts(shapes, getattr(torch, dtype).itemsize, conversion.max_file_bytes)):
        boxes = {name: Box(name, (0,) * len(shapes[name]), shapes[name]) for name in names}
        say(f"reading {len(names)} parameters, from {names[0]} to {names[-1]}, as {dtype}")
        owners[rank] = list(boxes.values())
        held = [(box, reader.read(box).to(getattr(torch, dtype))) for box in boxes.values()]
        write_snapshot(target, rank, snapshot(held, copied=False))
    finish(target, model, dtype, owners, {"converted_from": str(source.path)})
    folder = target / COMPANION_FOLDER
    folder.mkdir()
    for path in [source.path / CONFIG_FILE, *companions_of(source.path)]:
        say(f"copying {path.name}")
        shutil.copyfile(path, folder / path.name)
    say(f"{target}: checkpoint of {len(owners)} file{'s' if len(owners) > 1 else ''}, {dtype}")


def to_hugging_face(conversion: Conversion, say: Say) -> None:
    """From a checkpoint of boxes to a Hugging Face directory."""
    source = model_source(conversion.source)
    reader, target = CheckpointReader(str(source.checkpoint)), Path(conversion.target)
    model = source.architecture
    reader.check_architecture(model)  # a field that this version does not know
    _describe(f"{reader.directory}: checkpoint of boxes", model, say)
    states = sum("@" in name for name in reader.names())
    if states:
        say(f"leaving out {states} optimizer states, which the format has no place for")
    own = reader.directory / COMPANION_FOLDER
    of_run = Path(source.tokenizer) if source.tokenizer else own
    like = Path(conversion.like) if conversion.like else own if is_hugging_face(own) else of_run
    has_like = is_hugging_face(like)
    if conversion.like and not has_like:
        raise UserError(f"--like {like}: no config.json there; give the directory of a Hugging Face checkpoint")
    companions = companions_of(like)
    if not companions:
        say("no tokenizer to copy; --like DIR takes one from there")
    dtype = conversion.dtype or reader.index.dtype
    if isinstance(model, TransformersConfig):
        from realhf.models.transformers_models import write_directory  # transformers may not be installed

        files = write_directory(target, model, dtype, reader.read_into, companions)
        say(f"read back, weights {_compared(reader, target, model, dtype)}")
        say(f"{target}: written by transformers, {', '.join(path.name for path in files)}")
        return
    files = write_hugging_face(
        target,
        model,
        dtype,
        reader.read_into,
        like=config_content(like / CONFIG_FILE) if has_like else None,
        companions=companions,
        max_file_bytes=conversion.max_file_bytes,
    )
    for path in files:
        say(f"wrote {path.name}, {path.stat().st_size:,} bytes")
    family = family_of(config_content(target / CONFIG_FILE)).model_type
    say(f"read back, weights {_compared(reader, target, model, dtype)}")
    say(f"{target}: Hugging Face {family}, {dtype}")


def _compared(reader: CheckpointReader, target: Path, model: DecoderConfig, dtype: DType) -> str:
    """Reads a directory that was written, and compares it with the checkpoint that it was made from.

    Returns:
        the digest of its weights, as `metrics.jsonl` has it of a run's.

    Raises:
        UserError: a parameter differs; the directory is removed.
    """
    shapes, sums = {spec.name: spec.shape for spec in decoder_parameters(model)}, dict[str, int]()
    written = open_checkpoint(target, model)
    for name, shape in shapes.items():
        box, tensors = Box(name, (0,) * len(shape), shape), []
        for each in (reader, written):
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            each.read_into(tensors[-1], box)
        own, sums[name] = ParameterSums([(box, tensor) for tensor in tensors], shapes)()
        if own != sums[name]:
            shutil.rmtree(target)
            raise UserError(
                f"{target}: {name} has other values than in {reader.directory}, from which it was written; a disk or a "
                "memory changed them: convert again"
            )
    return weights_digest(sums)


def _dtype(source: HuggingFaceDirectory, model: DecoderConfig) -> DType:
    """The one dtype of all parameters, as which boxes keep them. Raises UserError where there are several."""
    tensors = {part.tensor: source.tensors[part.tensor][1].dtype for part in source.sources(model).values()}
    of_dtype = {_DTYPES[dtype]: (name, dtype) for name, dtype in tensors.items()}
    if len(of_dtype) > 1:
        (first, first_dtype), (second, second_dtype) = list(of_dtype.values())[:2]
        raise UserError(
            f"{source.path} has tensors of several dtypes ({first} is {first_dtype}, {second} is {second_dtype}), and "
            f"a checkpoint of boxes has one; choose it by --dtype, of {', '.join(get_args(DType))}"
        )
    return next(iter(of_dtype))


def _describe(what: str, model: DecoderConfig, say: Say) -> None:
    head = "scalar head" if model.head == "scalar" else "tied embeddings" if model.tied_embeddings else "untied"
    say(f"{what}, {parameter_count(model):,} parameters, {model.num_layers} layers, {head}")


def main() -> int:
    """Runs the conversion given as JSON; returns 0, or 2 where the input was wrong."""
    torch.set_num_threads(1)
    try:
        convert(msgspec.json.decode(sys.argv[1], type=Conversion), lambda line: print(line, flush=True))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
