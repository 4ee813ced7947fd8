"""Checkpoints: written under one layout, read under another; damaged ones are refused with the reason."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import (
    STEPS_KEY,
    finish,
    initial_optimizer_steps,
    of_kind,
    staging_directory,
    state_owners,
)
from tests.unit.checkpoints import checkpoint_owners, save_model, write_boxes, write_pieces
from tests.unit.realloc.layouts import layouts, models

MODEL = DecoderConfig(
    hidden_size=24, intermediate_size=36, num_layers=5, num_heads=6, num_kv_heads=6, vocab_size=48, tied_embeddings=True
)
KINDS = ("", "exp_avg", "exp_avg_sq")


def layout(dp: int, tp: int, pp: int, first: int = 0) -> Layout:
    return Layout(DeviceMesh(first, dp * tp * pp), ParallelStrategy(dp, tp, pp))


def random_state(model: DecoderConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Parameters in `dtype`, states beside them in float32."""
    generator = torch.Generator().manual_seed(1)
    state = {
        of_kind(Box(spec.name, (), ()), kind).name: torch.randn(
            spec.shape, generator=generator, dtype=torch.float64
        ).to(torch.float32 if kind else dtype)
        for spec in decoder_parameters(model)
        for kind in KINDS
    }
    return {name: tensor.abs() if name.endswith("@exp_avg_sq") else tensor for name, tensor in state.items()}


def slice_of(state: dict[str, torch.Tensor], box: Box) -> torch.Tensor:
    slices = (slice(offset, offset + extent) for offset, extent in zip(box.offset, box.shape, strict=True))
    return state[box.name][tuple(slices)]


def save(directory: Path, model: DecoderConfig, where: Layout, state: dict[str, torch.Tensor]) -> None:
    """What all ranks of `where` do, one after the other, each with the boxes of its own as views of one arena."""
    owners = checkpoint_owners(model, where, KINDS)
    for rank in where.mesh.devices:
        boxes = [of_kind(box, kind) for box in device_boxes(model, where, rank) for kind in KINDS]
        arenas = {
            d: torch.cat([slice_of(state, b).flatten() for b in boxes if state[b.name].dtype == d])
            for d in {state[b.name].dtype for b in boxes}
        }
        held, used = [], dict.fromkeys(arenas, 0)
        for box in boxes:
            dtype = state[box.name].dtype
            held.append((box, arenas[dtype][used[dtype] : used[dtype] + box.size].view(box.shape)))
            used[dtype] += box.size
        write_boxes(directory, rank, owners[rank], held)
    name = str(state["model.norm.weight"].dtype).removeprefix("torch.")
    finish(directory, model, name, owners, {"step": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (layout(1, 2, 1), layout(1, 3, 1)),
        (layout(2, 3, 2, first=4), layout(1, 2, 4)),
        (layout(2, 1, 5), layout(1, 1, 1)),
    ],
)
def test_saved_under_one_layout_read_under_another(
    tmp_path: Path, saved: Layout, loaded: Layout, dtype: torch.dtype
) -> None:
    state = random_state(MODEL, dtype)
    save(tmp_path / "step3", MODEL, saved, state)
    reader = CheckpointReader(tmp_path / "step3")
    assert reader.index.metadata == {"step": 3}
    assert set(reader.names()) == set(state)
    reader.check_architecture(MODEL)
    for device in loaded.mesh.devices:
        for box in device_boxes(MODEL, loaded, device):
            for kind in KINDS:
                wanted = slice_of(state, of_kind(box, kind))
                assert torch.equal(reader.read(of_kind(box, kind)), wanted)
                assert reader.read(of_kind(box, kind)).dtype == wanted.dtype
                into = torch.zeros(wanted.shape[::-1], dtype=torch.float64).permute(*range(wanted.dim())[::-1])
                reader.read_into(into, of_kind(box, kind))
                assert torch.equal(into, wanted.double())
    assert [path.name for path in tmp_path.iterdir()] == ["step3"]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_owners_write_every_element_once_from_what_they_hold(data: st.DataObject) -> None:
    model = data.draw(models())
    where = data.draw(layouts(model))
    owners = state_owners(model, where, "float32")
    written = {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in decoder_parameters(model)}
    written |= {f"{name}@{kind}": zeros.clone() for name, zeros in written.items() for kind in KINDS if kind}
    for device, boxes in owners.items():
        held = device_boxes(model, where, device)
        for box in boxes:
            parameter = Box(box.name.partition("@")[0], box.offset, box.shape)
            assert any(parameter == parameter.intersect(one) for one in held)
            slice_of(written, box).add_(1)
    assert all((count == 1).all() for count in written.values())


def test_replicas_share_the_writing() -> None:
    model = DecoderConfig(hidden_size=32, intermediate_size=32, num_layers=8, num_heads=4, num_kv_heads=4, vocab_size=8)
    sizes = [sum(box.size for box in boxes) for boxes in state_owners(model, layout(4, 1, 1), "float32").values()]
    assert max(sizes) < 1.1 * sum(sizes) / 4


def test_one_process_saves_a_whole_model(tmp_path: Path) -> None:
    state = random_state(MODEL)
    save_model(tmp_path / "whole", MODEL, state)
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "whole/boxes-0.safetensors").items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    box = Box("model.layers.3.mlp.down_proj.weight", (2, 5), (7, 11))
    assert torch.equal(CheckpointReader(tmp_path / "whole").read(box), state[box.name][2:9, 5:16])


def test_steps_of_an_optimizer_that_was_saved_or_not(tmp_path: Path) -> None:
    state = random_state(MODEL)
    save_model(tmp_path / "with", MODEL, state, {STEPS_KEY: 7})
    save_model(tmp_path / "without", MODEL, {name: t for name, t in state.items() if "@" not in name})
    setup = ModelSetup(checkpoint=str(tmp_path / "with"), optimizer=OptimizerConfig())
    assert initial_optimizer_steps(setup) == 0
    assert initial_optimizer_steps(replace(setup, with_optimizer=True)) == 7
    lacking = replace(setup, checkpoint=str(tmp_path / "without"), with_optimizer=True)
    with pytest.raises(UserError, match="without holds no optimizer states; start from its parameters"):
        initial_optimizer_steps(lacking)


def test_unfinished_is_no_checkpoint_and_a_later_save_replaces(tmp_path: Path) -> None:
    first, second = random_state(MODEL), {name: tensor + 1 for name, tensor in random_state(MODEL).items()}
    target = tmp_path / "latest"
    save(target, MODEL, layout(1, 2, 1), first)
    owners = checkpoint_owners(MODEL, layout(4, 1, 1), KINDS)
    whole = [(Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor) for name, tensor in second.items()]
    for rank in range(4):  # an attempt under another layout that nobody finishes
        write_boxes(target, rank, owners[rank], whole)
    box = Box("model.norm.weight", (0,), (24,))
    assert torch.equal(CheckpointReader(target).read(box), first[box.name])
    save(target, MODEL, layout(1, 2, 1), second)
    assert torch.equal(CheckpointReader(target).read(box), second[box.name])
    assert sorted(path.name for path in target.iterdir()) == [
        "boxes-0.safetensors",
        "boxes-1.safetensors",
        "index.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_several_boxes_of_a_parameter_in_a_file(tmp_path: Path) -> None:
    """As ZeRO-1 shards give them: the end of a row, whole rows, the beginning of one."""
    state, where = random_state(MODEL, torch.bfloat16), layout(3, 2, 1)
    for name in list(state):
        state.update({f"{name}@master": state[name].float()} if "@" not in name else {})
    owners = state_owners(MODEL, where, "bfloat16")
    assert any(len(set(boxes)) > len({box.name for box in boxes}) for boxes in owners.values())
    for rank, boxes in owners.items():
        write_pieces(tmp_path / "step", rank, [(box, slice_of(state, box)) for box in boxes])
    finish(tmp_path / "step", MODEL, "bfloat16", owners)
    reader = CheckpointReader(tmp_path / "step")
    assert set(reader.names()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(reader.read(Box(name, (0,) * tensor.dim(), tuple(tensor.shape))), tensor)
    reader.check_content()
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == [
        *(f"boxes-{rank}.safetensors" for rank in range(6)),
        "index.json",
    ]
    path = tmp_path / "step/boxes-4.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"boxes-4\.safetensors has other content than when it was saved"):
        CheckpointReader(tmp_path / "step").check_content()


def test_a_replacement_that_dies_between_its_renames_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, target = random_state(MODEL), tmp_path / "latest"
    box = Box("model.norm.weight", (0,), (24,))
    save_model(target, MODEL, state)
    rename = Path.rename

    def die(path: Path, to: Path) -> None:
        if to == target:
            raise KeyboardInterrupt
        rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save_model(target, MODEL, {name: tensor + 1 for name, tensor in state.items()})
    assert not target.exists()
    assert torch.equal(CheckpointReader(target).read(box), state[box.name])
    save_model(target, MODEL, {name: tensor + 2 for name, tensor in state.items()})
    assert torch.equal(CheckpointReader(target).read(box), state[box.name] + 2)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_file_that_is_not_what_the_index_says_is_named(tmp_path: Path) -> None:
    target = tmp_path / "step"
    save(target, MODEL, layout(1, 1, 1), random_state(MODEL))
    text = (target / "index.json").read_text()
    index = json.loads(text)
    entry = next(box for box in index["files"][0]["boxes"] if box["name"] == "model.norm.weight")
    entry["shape"] = [12]
    (target / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"has model\.norm\.weight in shape \[24\], not \[12\]"):
        CheckpointReader(target).read(Box("model.norm.weight", (0,), (12,)))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def keep_a_stub(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_model(path: Path) -> None:
    small = DecoderConfig(hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=4)
    save_model(path.parent.parent / "small", small, {n: t for n, t in random_state(small).items() if "@" not in n})
    (path.parent.parent / "small/boxes-0.safetensors").replace(path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (Path.unlink, "missing"),
        (cut, "truncated"),
        (keep_a_stub, "truncated"),
        (empty, "truncated"),
        (of_another_model, "holds other boxes"),
    ],
)
def test_finish_refuses_damaged_files(tmp_path: Path, damage: Callable[[Path], None], text: str) -> None:
    target = tmp_path / "step"
    state, where = random_state(MODEL), layout(1, 2, 1)
    owners = checkpoint_owners(MODEL, where, KINDS)
    whole = [(Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor) for name, tensor in state.items()]
    for rank, boxes in owners.items():
        write_boxes(target, rank, boxes, whole)
    damage(staging_directory(target) / "boxes-1.safetensors")
    with pytest.raises(UserError, match=rf"boxes-1\.safetensors.*{text}"):
        finish(target, MODEL, "float32", owners)
    assert not target.exists()


def test_finish_checks_dtype_and_that_nothing_is_left_out(tmp_path: Path) -> None:
    owners = checkpoint_owners(MODEL, layout(1, 1, 1))
    whole = [(box, torch.zeros(box.shape)) for box in owners[0]]
    write_boxes(tmp_path / "step", 0, owners[0], whole)
    with pytest.raises(UserError, match="is F32, not BF16"):
        finish(tmp_path / "step", MODEL, "bfloat16", owners)
    with pytest.raises(ValueError, match=r"do not cover model\.norm\.weight"):
        finish(tmp_path / "step", MODEL, "float32", {0: [box for box in owners[0] if box.name != "model.norm.weight"]})
    with pytest.raises(ValueError, match="exactly once"):
        finish(tmp_path / "step", MODEL, "float32", {0: owners[0], 1: owners[0][:1]})


def test_a_rank_cannot_write_what_it_does_not_hold(tmp_path: Path) -> None:
    half = Box("model.norm.weight", (0,), (12,))
    with pytest.raises(ValueError, match="is asked for, but this rank has"):
        write_boxes(tmp_path / "step", 5, [Box("model.norm.weight", (6,), (12,))], [(half, torch.zeros(12))])


def test_reader_names_what_is_wrong(tmp_path: Path) -> None:
    target = tmp_path / "step"
    save(target, MODEL, layout(1, 2, 2), random_state(MODEL))
    with pytest.raises(UserError, match="does not exist"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no parameter lm_head\.weight"):
        CheckpointReader(target).read(Box("lm_head.weight", (0, 0), (48, 24)))
    with pytest.raises(UserError, match=r"does not hold all of model\.norm\.weight"):
        CheckpointReader(target).read(Box("model.norm.weight", (0,), (25,)))
    index = json.loads((target / "index.json").read_text())

    def rewrite(**changes: object) -> None:
        (target / "index.json").write_text(json.dumps({**index, **changes}))

    rewrite(format="realhf-checkpoint/2")
    with pytest.raises(UserError, match=r"realhf-checkpoint/2.*reads 'realhf-checkpoint/1'"):
        CheckpointReader(target)
    rewrite(surprise=1)
    with pytest.raises(UserError, match=r"index\.json is damaged.*surprise"):
        CheckpointReader(target)
    rewrite(files=[{**index["files"][0], "file": "../../elsewhere"}])
    with pytest.raises(UserError, match="not a plain name"):
        CheckpointReader(target)
    first = index["files"][0]["boxes"][0]
    for changed in ({"offset": [-1, *first["offset"][1:]]}, {"offset": [0, 0, 0]}):
        rewrite(files=[{**index["files"][0], "boxes": [{**first, **changed}]}])
        with pytest.raises(UserError, match=rf"index\.json is damaged \({first['name']} has offset \["):
            CheckpointReader(target)
    for content in (b'{"format": "realhf-checkpoint/1", "metadata": ' + b"[" * 100_000, b'{"format": "\xff"}'):
        (target / "index.json").write_bytes(content)
        with pytest.raises(UserError, match=r"index\.json is damaged \(.*(nested too deeply|can't decode byte)"):
            CheckpointReader(target)
    (target / "index.json").write_text('{"format": ')
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        CheckpointReader(target)
    rewrite()
    cut(target / "boxes-2.safetensors")
    with pytest.raises(UserError, match=r"boxes-2\.safetensors has \d+ bytes, not \d+: it is truncated"):
        CheckpointReader(target)
    (target / "boxes-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"boxes-2\.safetensors is missing"):
        CheckpointReader(target)
    (target / "index.json").unlink()
    with pytest.raises(UserError, match=r"no complete checkpoint"):
        CheckpointReader(target)


@pytest.mark.parametrize(
    ("name", "value", "dtype", "rule"),
    [
        ("model.layers.3.mlp.down_proj.weight", math.nan, torch.float32, "which no model can compute with"),
        ("model.layers.3.mlp.down_proj.weight", -math.inf, torch.float32, "which no model can compute with"),
        ("model.layers.3.mlp.down_proj.weight@exp_avg", math.inf, torch.float32, "which no model can compute with"),
        ("model.layers.3.mlp.down_proj.weight@exp_avg_sq", -0.5, torch.float32, "but a mean of squares is not below 0"),
        ("model.layers.3.mlp.down_proj.weight", 3.4e38, torch.bfloat16, "which is beyond bfloat16"),
    ],
)
def test_a_value_that_no_model_can_have(tmp_path: Path, name: str, value: float, dtype: torch.dtype, rule: str) -> None:
    """Only the rank that loads it sees it, and names where in the whole tensor it is, whoever saved which part."""
    state = random_state(MODEL)
    state[name][5, 30] = value
    save(tmp_path / "step", MODEL, layout(1, 2, 1), state)
    reader = CheckpointReader(tmp_path / "step")
    reader.read_into(torch.empty(24, 30, dtype=dtype), Box(name, (0, 0), (24, 30)))
    with pytest.raises(UserError) as error:
        reader.read_into(torch.empty(4, 18, dtype=dtype), Box(name, (4, 18), (4, 18)))
    (file,) = (path for path in (tmp_path / "step").glob("boxes-*") if str(path) in str(error.value))
    shown = f"{torch.tensor(value).item()}"
    assert str(error.value) == f"{file}: {name} holds {shown} at [5, 30], {rule}; use another checkpoint"


def test_a_file_whose_header_is_overwritten_is_named(tmp_path: Path) -> None:
    target = tmp_path / "step"
    save(target, MODEL, layout(1, 1, 1), random_state(MODEL))
    path = target / "boxes-0.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    with pytest.raises(UserError, match=r"boxes-0\.safetensors cannot be read"):
        CheckpointReader(target).read(Box("model.norm.weight", (0,), (24,)))


def test_architecture(tmp_path: Path) -> None:
    save(tmp_path / "lm", MODEL, layout(1, 1, 1), random_state(MODEL))
    reader = CheckpointReader(tmp_path / "lm")
    reward = MODEL.with_head("scalar")
    reader.check_architecture(reward, ignore_head=True)
    with pytest.raises(UserError, match=r"head='lm' \(the model has 'scalar'\), tied_embeddings=True"):
        reader.check_architecture(reward)
    small = DecoderConfig(
        hidden_size=24, intermediate_size=36, num_layers=4, num_heads=6, num_kv_heads=6, vocab_size=48
    )
    with pytest.raises(UserError, match=r"num_layers=5 \(the model has 4\)"):
        reader.check_architecture(small, ignore_head=True)


def test_index_and_planner_do_without_torch() -> None:
    code = "import sys, realhf.models.checkpoint_index, realhf.realloc.plan.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
