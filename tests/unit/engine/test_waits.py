"""How often the host reads from the device while it trains, on `meta`, which takes the way of a GPU."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from realhf.algorithms.functional import token_statistics
from realhf.algorithms.responses import response_positions, response_tokens
from realhf.algorithms.statistics import mean_of
from realhf.api.experiment import OptimizerConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats
from realhf.engine.model import ShardedModel
from realhf.parallel.vocabulary import Logits
from tests.unit.engine.losses import ONE_RANK, tiny

META = torch.device("meta")
CONFIG = tiny()


def loss_of_responses(output: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    positions = response_positions(batch, output.device)
    found = token_statistics(output[positions], batch.packed("seq").values[positions + 1])
    return -found.logprob.sum(), {"accuracy": mean_of(found.is_top), "logprob": mean_of(found.logprob)}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By method, how often a number on the device was read; each is 1."""
    counted: Counter[str] = Counter()

    def patch(name: str, value: object, convert: type) -> None:
        original = getattr(Tensor, name)

        def read(tensor: Tensor) -> object:
            if tensor.device != META:
                return original(tensor)
            counted[name] += 1
            return [value] * tensor.numel() if name == "tolist" and tensor.dim() else convert(value)

        monkeypatch.setattr(Tensor, name, read)

    for name, convert in (
        ("item", float),
        ("tolist", float),
        ("__float__", float),
        ("__int__", int),
        ("__bool__", bool),
    ):
        patch(name, 1, convert)
    return counted


def test_the_host_reads_from_the_device_once_a_mini_batch(reads: Counter[str]) -> None:
    """Losses and statistics of all micro-batches together, and the norm of the gradient."""
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.bfloat16, META, optimizer=OptimizerConfig()))
    prompts, sequences = ([torch.ones(n, dtype=torch.int64, device=META) for _ in range(8)] for n in (3, 9))
    batch = Batch(tuple(range(8)), {"prompt": prompts, "seq": sequences})
    found = {}
    for micro_batches in (1, 2, 8):
        reads.clear()
        stats = model.train_step(batch, "seq", loss_of_responses, response_tokens, micro_batches)
        assert stats["accuracy"] == (micro_batches * 1.0, 48.0)
        found[micro_batches] = dict(reads)
        assert math.isfinite(stats["loss"][0])
    assert found[1] == found[2] == found[8]
    assert found[1].get("tolist") == 1
    assert found[1].get("item") == 1


def test_an_id_beyond_the_vocabulary_has_no_probability_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the host does not look, and the loss is not finite; this CPU plays one."""
    monkeypatch.setattr(Logits, "device", META)
    hidden, weight = torch.ones(3, 4), torch.ones(5, 4)
    found = Logits(hidden, weight).of_tokens(torch.tensor([0, 5, -1]))
    assert found.logprob.isnan().tolist() == [False, True, True]
