"""The first parameters of a model's home."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.worker import home
from tests.unit.engine.losses import ONE_RANK, tiny

CONFIG = tiny(num_layers=1, tied_embeddings=False)


class Checkpoint:
    """In float32: 1 + i / 1000 at place i of a vector or of a row, which bfloat16 has not."""

    def read_into(self, tensor: Tensor, box: Box) -> None:
        assert "@" not in box.name
        tensor.copy_((1 + torch.arange(tensor.shape[-1]) / 1000).expand(tensor.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("new_head", [False, True])
def test_an_optimizer_begins_with_the_values_of_the_checkpoint(
    dtype: torch.dtype, new_head: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not with what bfloat16 leaves of them; a head that is new begins with its own."""
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, dtype, optimizer=OptimizerConfig()))
    monkeypatch.setattr(home, "open_checkpoint", lambda *_: Checkpoint())
    setup = SimpleNamespace(checkpoint="there", with_optimizer=False, new_head=new_head)
    graph = SimpleNamespace(models={"actor": CONFIG})
    experiment = SimpleNamespace(setups={"actor": setup}, graph=graph, seed=0)
    run: Any = SimpleNamespace(experiment=experiment, spec=SimpleNamespace(resume_step=0))
    home.fill(model, run, "actor", tmp_path)
    masters = {box.name: tensor for box, tensor in model.masters()}
    if dtype == torch.float32:
        assert not masters
        return
    held = {box.name: tensor for box, tensor in model.residency.held()}
    assert masters.keys() == held.keys()
    for name, tensor in masters.items():
        exact = (1 + torch.arange(tensor.shape[-1]) / 1000).expand(tensor.shape)
        is_new = new_head and name == "lm_head.weight"
        assert torch.equal(held[name], tensor.bfloat16())
        assert torch.equal(tensor, held[name].float() if is_new else exact)
        assert is_new or not torch.equal(tensor, held[name].float())


def test_a_model_that_is_not_trained_has_no_copies() -> None:
    assert ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.bfloat16)).masters() == []
