"""Run directories with small checkpoints, as a run leaves them."""

from pathlib import Path

import torch

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint_index import finish
from realhf.rundir.checkpoints import RunState, complete, step_folder
from tests.unit.checkpoints import write_pieces

MODEL = DecoderConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=4)


def save(checkpoints: Path, step: int, **statistics: float) -> Path:
    """A good checkpoint of one model after `step` steps of four samples."""
    part = checkpoints / f".step-{step}.part"
    part.mkdir()
    pieces = [
        (Box(spec.name, (0,) * len(spec.shape), spec.shape), torch.full(spec.shape, float(step)))
        for spec in decoder_parameters(MODEL)
    ]
    write_pieces(part / "actor", 0, pieces)
    finish(part / "actor", MODEL, "float32", {0: [box for box, _ in pieces]})
    state = RunState(
        step=step,
        seed=0,
        samples=4 * step,
        num_workers=1,
        plan_sha256="",
        optimizer_steps={"actor": step},
        models={},
        statistics=statistics,
    )
    complete(part, step_folder(checkpoints, step), state, ["actor"])
    return step_folder(checkpoints, step)


def damage(checkpoint: Path) -> None:
    """Changes one bit in the middle of the parameters, and no size."""
    path = checkpoint / "actor/boxes-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content)
