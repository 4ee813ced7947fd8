"""The input columns of a call on a worker."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.dataflow.graph import ModelInterfaceType
from realhf.engine.batch import concatenate
from realhf.worker.model_worker import ModelWorker


@pytest.mark.parametrize(
    ("samples", "micro_batches", "together"),
    [(8, 1, 4), (8, 2, 4), (8, 4, 2), (8, 8, 1), (6, 1, 2), (6, 3, 2), (6, 2, 1), (3, 8, 1)],
)
def test_samples_of_a_prompt_stay_in_one_micro_batch(samples: int, micro_batches: int, together: int) -> None:
    """Four to a prompt, or as many as equal micro-batches of a rank's samples allow."""
    worker: Any = object.__new__(ModelWorker)
    worker._device, worker._reading = torch.device("cpu"), nullcontext()
    worker._graphs = {"train": SimpleNamespace(dataset_keys=("prompt",), producers={}, samples_per_prompt=4)}
    worker._readers = {"train": SimpleNamespace(tokens=lambda step, ids: [{"prompt": [1, 2 + i]} for i in ids])}
    worker._store = SimpleNamespace(add_columns=lambda key, batch, keys: batch)
    worker._run = SimpleNamespace(spec=SimpleNamespace(replay=""))
    request: Any = SimpleNamespace(batch=SimpleNamespace(split="train", step=0), micro_batches=micro_batches)
    call: Any = SimpleNamespace(input_data=("prompt",), interface_type=ModelInterfaceType.INFERENCE)
    batch = worker._inputs(request, call, tuple(range(samples)))
    assert batch.together == together
    assert [value.tolist() for value in batch.data["prompt"]] == [[1, 2 + i] for i in range(samples)]
    assert concatenate([batch, batch]).together == together
