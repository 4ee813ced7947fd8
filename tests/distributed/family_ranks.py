"""What a rank does with a family's checkpoint. Apart from the test, because ranks need not load transformers."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.checkpoint_index import state_owners
from realhf.models.hugging_face_files import HuggingFaceDirectory
from realhf.models.hugging_face_weights import HuggingFaceReader
from realhf.parallel.groups import GroupTable, ParallelGroups
from tests.unit.checkpoints import write_boxes
from tests.unit.engine.losses import next_token_loss, random_batch, split_like, trained_tokens

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    compute: Computation = field(default_factory=Computation)

    @property
    def layout(self) -> Layout:
        strategy = ParallelStrategy(self.dp, self.tp, self.pp)
        return Layout(DeviceMesh(0, strategy.size), strategy)

    def owners(self, config: DecoderConfig) -> dict[int, list[Box]]:
        """Which rank writes which boxes of the parameters."""
        return state_owners(config, self.layout, "float64", self.compute.data_parallel, with_optimizer=False)


@dataclass
class Outcome:
    """What one rank saw: logits of its samples and the gradient's norm on the last stage, its parameters after."""

    logits: list[np.ndarray]
    grad_norm: float | None
    parameters: list[tuple[Box, np.ndarray]]


def run_cases(rank: int, root: str, cases: dict[str, Case]) -> dict[str, Outcome]:
    table = GroupTable(dict.fromkeys(case.layout for case in cases.values()), rank)
    return {
        name: _run(name, case, table.groups(case.layout), Path(root))
        for name, case in cases.items()
        if rank in case.layout.mesh.devices
    }


def _run(name: str, case: Case, groups: ParallelGroups, root: Path) -> Outcome:
    config = HuggingFaceDirectory(root / case.family).model
    model = ShardedModel(
        ModelSpec(
            config,
            groups,
            torch.float64,
            optimizer=OPTIMIZER,
            total_optimizer_steps=10,
            compute=case.compute,
        )
    )
    reader = HuggingFaceReader(root / case.family, config)
    for box, tensor in model.residency.held():
        reader.read_into(tensor, box)
    model.residency.written()
    owned = case.owners(config)[groups.rank]
    write_boxes(root / "saved" / name, groups.rank, owned, model.residency.held())  # as loaded
    batch = random_batch(config, SAMPLES, lengths=(2, 20)).split(case.dp)[groups.dp_index]
    logits = model.forward(batch, "tokens", split_like, 2).get("output", [])
    stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, 2)
    grad_norm = stats["grad_norm"][0] if stats else None
    parameters = [(box, local.numpy().copy()) for box, local in model.residency.held()]
    return Outcome([x.numpy() for x in logits], grad_norm, parameters)
