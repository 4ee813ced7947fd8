"""Files that a user names, damaged or written by somebody else: a reader takes them, or says what is wrong and in which
file; nothing else comes out."""

import copy
import json
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from safetensors.torch import load_file

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.data.chat_template import TemplateError
from realhf.data.files.opening import open_rows
from realhf.data.tokenizer import TextTokenizer
from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.hugging_face_files import HuggingFaceDirectory, check_checkpoint
from realhf.models.opening import BoxReader, open_checkpoint
from realhf.planning.clusters import parse_cluster
from realhf.planning.model.descriptions import DESCRIPTIONS, read_hardware
from realhf.planning.model.experience import RunTimes, SeenCall, load_run_times
from realhf.planning.model.lengths import read_lengths
from realhf.planning.model.measured import MeasuredConstant, MeasuredConstants, load_constants
from realhf.planning.model.profile import load_profile, save_profile
from realhf.planning.problem.file import load_problem
from tests.unit.checkpoints import save_model
from tests.unit.data.tokenizers_of_families import write_llama3
from tests.unit.models.families import config_class, oracle
from tests.unit.planning.graphs import TINY
from tests.unit.planning.test_profile import profile

DATA = Path(__file__).resolve().parents[1] / "data"
CHANGES = 60  # of each kind, of each file
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 12, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 0.5, -0.0, 2**31, 2**63, 10**30, 1e308, 1e-320, float("nan"), float("inf"),
    "", "\0", "x", "1e9", "\x1b[2J", "x" * 500, "../../../etc/passwd", "\ud800",
    [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1] * 9,
]  # fmt: skip


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@dataclass(frozen=True)
class Reader:
    """make: writes a good file below a folder and gives its path. read: what is called with that path."""

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]


def written(name: str, value: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(value if isinstance(value, bytes) else msgspec.json.encode(value))
        return folder / name

    return make


def saved_plan(folder: Path) -> Path:
    calls = {
        "actor_train_step": CallPlan(devices=(0, 2), dp=2, micro_batches=2),
        "ref_inference": CallPlan(devices=(0, 1)),
    }
    save_plan(
        ExecutionPlan(num_devices=2, calls=calls, models={"actor": TINY}, notes={"seed": 1}), folder / "plan.json"
    )
    return folder / "plan.json"


def saved_profile(folder: Path) -> Path:
    save_profile(profile(), folder / "profile.json")
    return folder / "profile.json"


def checkpoint(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save_model(folder / "made", TINY, {spec.name: torch.ones(spec.shape) for spec in decoder_parameters(TINY)})
        return folder / "made" / name

    return make


def hugging_face(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        oracle(config_class("llama")(**SIZES), folder, torch.float32)
        if name.endswith(".index.json"):
            (folder / "model.safetensors").rename(folder / "part.safetensors")
            names = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
            (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        return folder / name

    return make


def read_all(reader: BoxReader, model: DecoderConfig) -> None:
    for spec in decoder_parameters(model):
        reader.read(Box(spec.name, (0,) * len(spec.shape), spec.shape))


def read_checkpoint(path: Path) -> None:
    check_checkpoint(path.parent, TINY)
    read_all(open_checkpoint(path.parent, TINY), TINY)


def read_hugging_face(path: Path) -> None:
    model = HuggingFaceDirectory(path.parent).model
    check_checkpoint(path.parent, model)
    read_all(open_checkpoint(path.parent, model), model)


def tokenizer(name: str) -> Callable[[Path], Path]:
    return lambda folder: write_llama3(folder / "tokenizer") / name


def read_tokenizer(path: Path) -> None:
    made = TextTokenizer(path.parent)
    try:
        made.decode(made.encode("a text"))
        made.template.render([{"role": "user", "content": "a text"}])
    except (ValueError, TemplateError) as error:  # of a text, whose place the data set adds
        raise UserError(f"{path}: {error}") from error
    assert {*made.end_tokens, made.begin, made.pad} - {None} <= set(range(made.largest_token + 1))


def read_rows(path: Path) -> None:
    rows = open_rows(str(path))
    for index in range(len(rows)):
        rows.row(index)


CONSTANTS = MeasuredConstants(hardware="cpu", constants={"mini_batch_s": MeasuredConstant(value=0.1, spread=0.2)})
CALLS = (SeenCall(interface="generate", option="dp=2", log_ratio=0.1, noise=0.01),)
READERS = {
    "plan": Reader(saved_plan, load_plan),
    "cluster": Reader(
        written("cluster.yaml", b"groups: [{hardware: h100, nodes: 16, devices_per_node: 8}]\n"),
        lambda path: parse_cluster(str(path)),
    ),
    "hardware": Reader(written("h100.yaml", (DESCRIPTIONS / "h100.yaml").read_bytes()), read_hardware),
    "profile": Reader(saved_profile, load_profile),
    "constants": Reader(written("constants.json", CONSTANTS), load_constants),
    "times of a run": Reader(written("run.json", RunTimes(run="r", profile="p", calls=CALLS)), load_run_times),
    "lengths": Reader(written("lengths.txt", b"12\n7\n3\n"), read_lengths),
    "problem": Reader(written("problem.json", (DATA / "planning_problems/n1_steps3.json").read_bytes()), load_problem),
    "index of a checkpoint": Reader(checkpoint("index.json"), read_checkpoint),
    "boxes of a checkpoint": Reader(checkpoint("boxes-0.safetensors"), read_checkpoint),
    "config.json": Reader(hugging_face("config.json"), read_hugging_face),
    "safetensors": Reader(hugging_face("model.safetensors"), read_hugging_face),
    "index of safetensors": Reader(hugging_face("model.safetensors.index.json"), read_hugging_face),
    "tokenizer.json": Reader(tokenizer("tokenizer.json"), read_tokenizer),
    "tokenizer_config.json": Reader(tokenizer("tokenizer_config.json"), read_tokenizer),
    "generation_config.json": Reader(tokenizer("generation_config.json"), read_tokenizer),
    "rows": Reader(written("rows.jsonl", b'{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n'), read_rows),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def other_values(good: bytes, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Iterator[bytes]:
    """The file with a value replaced, taken away, or put where none was."""
    value, draw = decode(good), random.Random(len(good))
    every = list(places(value))
    for number in range(CHANGES):
        changed = copy.deepcopy(value)
        *path, last = draw.choice(every)
        where = changed
        for key in path:
            where = where[key]
        if number % 6 == 0:
            del where[last]
        elif number % 6 == 1 and isinstance(where, dict):
            where["unknown"] = where[last]
        else:
            where[last] = draw.choice([*VALUES, nested(200)])
        yield encode(changed)


def other_bytes(good: bytes) -> Iterator[bytes]:
    draw = random.Random(len(good))
    yield from (b"", b"\0" * 64, b"[]", b"{}", b"null", b"[" * 10**5, b"{" + good, good + good, b"\xff\xfe" + good)
    for _ in range(CHANGES):
        changed, place = bytearray(good), draw.randrange(min(len(good), 4096))
        match draw.randrange(4):
            case 0:
                del changed[place:]
            case 1:
                changed[place] ^= 1 << draw.randrange(8)
            case 2:
                changed[place:place] = draw.randbytes(draw.randrange(1, 9))
            case _:
                del changed[place : place + draw.randrange(1, 40)]
        yield bytes(changed)


def to_header(value: Any) -> bytes:
    """A safetensors file with this header."""
    header = json.dumps(value).encode()
    return len(header).to_bytes(8, "little") + header + bytes(200_000)


def header_of(content: bytes) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


KINDS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    ".json": (json.loads, as_json),
    ".yaml": (yaml.safe_load, lambda value: yaml.safe_dump(value).encode(errors="replace")),
    ".safetensors": (header_of, to_header),
    ".jsonl": (lambda content: [*map(json.loads, content.splitlines())], lambda rows: b"\n".join(map(as_json, rows))),
    ".txt": (
        lambda content: content.decode().split(),
        lambda lines: "\n".join(map(str, lines)).encode(errors="replace"),
    ),
}


@pytest.fixture
def _bounded_memory() -> Iterator[None]:
    """Whoever asks for tens of gigabytes gets an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_bounded_memory")
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    path = reader.make(tmp_path)
    reader.read(path)
    good, texts = path.read_bytes(), []
    for content in [*other_bytes(good), *other_values(good, *KINDS[path.suffix])]:
        path.write_bytes(content)
        try:
            reader.read(path)
        except UserError as error:
            texts.append(str(error))
    assert all(path.name in text or str(path.parent) in text for text in texts)
    assert len(texts) > CHANGES // 2, "damage is mostly seen"
