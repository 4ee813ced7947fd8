"""Saves a model with its optimizer's states from all ranks of its layout, where no master coordinates them."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from realhf.engine.model import ShardedModel
from realhf.models.checkpoint import DTYPE_NAME, write_pieces
from realhf.models.checkpoint_index import STEPS_KEY, finish, state_owners


def save_state(
    directory: Path | str, model: ShardedModel, metadata: Mapping[str, Any] | None = None, *, hashed: bool = False
) -> None:
    """Every rank of the layout calls it; when it returns on one, `directory` is complete on the disk.

    Every rank writes what it alone updates, so that nothing is gathered. `metadata` is kept beside the
    optimizer's step, its configuration and the length of its schedule. `ShardedModel.load_state` reads it back.

    Raises:
        UserError: a file is not what its rank should have written; a checkpoint of that name stays as it was.
    """
    assert model.trainer is not None, "a model without an optimizer has no state to save"
    groups, optimizer = model.groups, model.trainer.optimizer
    write_pieces(directory, groups.rank, model.state(), hashed=hashed)
    _meet(model)
    if groups.rank == groups.layout.mesh.first:
        dtype = DTYPE_NAME[model.parameters.flat.dtype]
        schedule = {"optimizer": asdict(optimizer.config), "total_optimizer_steps": optimizer.total_steps}
        content = {STEPS_KEY: optimizer.step_count, **schedule, **(metadata or {})}
        owners = state_owners(model.config, groups.layout, dtype, model.parameters.data_parallel)
        finish(directory, model.config, dtype, owners, content)
    _meet(model)


def _meet(model: ShardedModel) -> None:
    """Returns when all ranks of the layout are here."""
    if model.groups.model is not None:
        dist.all_reduce(torch.zeros(1, device=model.parameters.flat.device), group=model.groups.model)
