"""Writes the inputs and outputs of a call, which runs have recorded, for a notebook: `realhf verify --dump`."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from realhf.base.errors import UserError
from realhf.data.recorded import read_recorded
from realhf.data.rows import rows_of
from realhf.dataflow.graph import DataflowGraph
from realhf.rundir.run import Run


def keys_of(graph: DataflowGraph, call: str) -> list[str]:
    """The keys that a run has to record for `dump`. Raises UserError if there is no such call."""
    if call not in graph.calls:
        raise UserError(f"--call {call}: the run has no such call; choose from {', '.join(graph.calls)}")
    definition = graph.calls[call]
    return [*(key for key in definition.input_data if key in graph.producers), *definition.output_data]


def dump(run: Run, call: str, step: int, rollouts: Mapping[str, Path], folder: Path) -> None:
    """Writes FOLDER/NAME/KEY.safetensors for each of the `rollouts` folders by name, with the keys that it has, and
    FOLDER/KEY.safetensors for the inputs from the data set.

    A file has `values` [elements, ...] of all samples end to end, their `ids` and `lengths`, ascending by id.
    """
    graph, rows = run.experiment.graph, rows_of(run, "train")
    definition, ids = graph.calls[call], range(rows.samples(step - 1))
    of_rows = rows.tokens(step - 1, ids)
    for key in (key for key in definition.input_data if key in graph.dataset_keys):
        _write(folder / f"{key}.safetensors", {i: np.array(of_rows[i][key], np.int64) for i in ids})
    for name, source in rollouts.items():
        for key in keys_of(graph, call):
            producer = call if key in definition.output_data else graph.producers[key]
            with contextlib.suppress(UserError):  # that run has not recorded it
                found = read_recorded(source, step - 1, producer, key)
                _write(folder / name / f"{key}.safetensors", {i: each.value for i, each in sorted(found.items())})


def _write(path: Path, values: Mapping[int, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(value) for value in values.values()])
    save_file({"values": np.concatenate([*values.values()]), "ids": np.array([*values]), "lengths": lengths}, path)
