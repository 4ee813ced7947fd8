"""Whether all that compute with a version of a model's parameters have the same values, whatever their layouts, and
whether a training begins with the optimizer states that the one before it made."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.digest import weights_digest
from realhf.base.errors import RunError
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.splits import Split
from realhf.geometry.boxes import Box
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import parameter_count
from realhf.geometry.shards import Placement, held_boxes
from realhf.master.loop import CallRecord
from realhf.models.checkpoint_index import state_owners
from realhf.rundir.run import Run
from realhf.rundir.weights import SavedWeights, is_optimizer_state

_NUMBERS = 2**64
_REMEDY = "go on from the last checkpoint with --resume, without that machine if it happens again"


@dataclass(frozen=True)
class _Values:
    """The values of a call. `whose`: the call, for people; `parts`: the sums of boxes; `sums`: of parameters."""

    whose: str
    parts: Mapping[Box, int]
    sums: Mapping[str, int]


class WeightsWatch:
    """Compares the sums that workers reply with (`realhf.worker.weights`).

    All ranks that hold a part must have the same values in it. All calls that use a version must have the values with
    which it was made: by training, by a copy from another model, by a checkpoint; else those of the first call.
    """

    def __init__(self, run: Run):
        self._run = run
        self._known: dict[str, dict[int, _Values]] = {}  # by model and version
        self._states: dict[str, tuple[int, _Values]] = {}  # by model the steps that they have seen

    def begin_with(
        self, saved: Mapping[str, SavedWeights], step: int, states: Mapping[str, SavedWeights] | None = None
    ) -> None:
        """The versions of the checkpoint after `step`, from which the run goes on. Those of another dtype cannot be
        compared."""

        for model, weights in saved.items():
            if values := self._saved(model, weights, step):
                self._known[model] = {weights.version: values}
        for model, weights in (states or {}).items():
            if values := self._saved(model, weights, step):
                self._states[model] = weights.version, values

    def _saved(self, model: str, weights: SavedWeights, step: int) -> _Values | None:
        setup = self._run.experiment.setups.get(model)
        if setup is None or setup.dtype != weights.dtype:
            return None
        return _Values(f"the checkpoint after step {step}", {}, weights.numbers())

    def newest(self) -> dict[str, SavedWeights]:
        """The newest known version of each model."""
        found = {}
        for model, versions in self._known.items():
            version = max(versions)
            dtype = self._run.experiment.setups[model].dtype
            found[model] = SavedWeights.of(version, dtype, versions[version].sums)
        return found

    def newest_states(self) -> dict[str, SavedWeights]:
        """The newest known optimizer states of each model that was trained."""
        setups = self._run.experiment.setups
        return {
            model: SavedWeights.of(step, setups[model].dtype, values.sums)
            for model, (step, values) in self._states.items()
        }

    def of_step(self, split: Split, step: int, records: Iterable[CallRecord]) -> dict[str, dict[str, str]]:
        """By call the digests of the weights that it used (`weights`) and made (`new_weights`), and of optimizer
        states (`states`, where they were summed up before it, `new_states`). `step`: of training, or how many steps
        there were before an evaluation.

        Raises:
            RunError: values are not those of their version, or differ between ranks.
        """
        graph = self._run.experiment.graphs[split]
        found: dict[str, dict[str, str]] = {}
        calls = [(graph.calls[r.node.call], r) for r in records if r.node.call in graph.calls]
        for call, record in calls:
            used = {worker: reply.used_weights for worker, reply in record.replies.items() if reply.used_weights}
            if used and record.version is not None:
                whose = f"{call.name} of step {step + 1}" if split == "train" else f"{call.name} of {split}"
                found[call.name] = {"weights": self._compared(split, call, record.version, whose, used)}
        for call, record in calls:
            for field, at, whose in (
                ("used_states", record.version, f"{call.name} of step {step + 1}"),
                ("made_states", record.makes, f"the result of {call.name} of step {step + 1}"),
            ):
                if sums := {worker: of for worker, reply in record.replies.items() if (of := getattr(reply, field))}:
                    name = field.replace("used_", "").replace("made_", "new_")
                    found.setdefault(call.name, {})[name] = self._compared_states(call, at, whose, sums)
        for call, record in calls:
            made = {worker: reply.made_weights for worker, reply in record.replies.items() if reply.made_weights}
            if made and record.makes is not None:
                whose = f"the result of {call.name} of step {step + 1}"
                digest = self._compared(split, call, record.makes, whose, made)
                found.setdefault(call.name, {})["new_weights"] = digest
        return found

    def _compared(
        self, split: Split, call: ModelFunctionCallDef, version: int, whose: str, sums: Mapping[int, Sequence[int]]
    ) -> str:
        """The digest of what a call's workers have, after comparing it."""
        model = call.model_name
        layout = self._run.call_plan(split, call).layout
        placement = self._run.placement(model) if layout == self._run.homes[model] else Placement(layout)
        boxes = partial(_boxes, self._run.experiment.graph.models[model], layout, placement.data_parallel)
        expected = self._expected(model, version)
        found = _checked(model, version, whose, _holders(model, whose, sums, boxes), expected)
        if expected is None and sum(box.size for box in found.parts) == parameter_count(
            self._run.experiment.graph.models[model]
        ):
            self._note(model, version, found)
        return weights_digest(found.sums)

    def _compared_states(
        self, call: ModelFunctionCallDef, step: int | None, whose: str, sums: Mapping[int, Sequence[int]]
    ) -> str:
        """The digest of the optimizer states of a training's model after so many steps, after comparing them; None:
        between two trainings of a step, where there is nothing to compare with."""
        model, run = call.model_name, self._run
        dtype, placement = run.experiment.setups[model].dtype, run.placement(model)
        boxes = partial(_state_boxes, run.experiment.graph.models[model], placement, dtype)
        known, expected = self._states.get(model, (step, None))
        expected = expected if known == step else None
        found = _checked(model, step or 0, whose, _holders(model, whose, sums, boxes), expected)
        if step is not None:
            self._states[model] = step, found
        return weights_digest(found.sums)

    def _expected(self, model: str, version: int) -> _Values | None:
        """The known values of a version, None where there are none. A copy of another model's has that one's."""
        graph = self._run.experiment.graph
        if known := self._known.get(model, {}).get(version):
            return known
        follow = next((node for node in graph.follows.values() if node.target == model), None)
        if follow is None or follow.eta != 1 or version < (0 if follow.staleness else 1):
            return None
        return self._known.get(follow.source, {}).get(version)

    def _note(self, model: str, version: int, values: _Values) -> None:
        """Older versions than calls may still use are forgotten."""
        versions = self._known.setdefault(model, {})
        versions[version] = values
        in_use = self._run.plan.max_steps_in_flight + max(map(self._run.experiment.graph.versions_kept, self._known))
        for older in [each for each in versions if each < max(versions) - in_use]:
            del versions[older]


@lru_cache(maxsize=4096)
def _boxes(model: DecoderConfig, layout: Layout, data_parallel: DataParallel, worker: int) -> list[Box]:
    """Those of a worker, in the order in which it sums them up."""
    return sorted(held_boxes(model, layout, worker, data_parallel), key=lambda box: (box.name, box.offset))


@lru_cache(maxsize=4096)
def _state_boxes(model: DecoderConfig, placement: Placement, dtype: DType, worker: int) -> list[Box]:
    """The same of optimizer states, and the number of optimizer steps behind them, which all workers have."""
    owned = state_owners(model, placement.layout, dtype, placement.data_parallel)[worker]
    states = sorted(filter(is_optimizer_state, owned), key=lambda box: (box.name, box.offset))
    return [*states, Box("the number of optimizer steps", (), ())]


def _holders(
    model: str, whose: str, sums: Mapping[int, Sequence[int]], boxes_of: Callable[[int], Sequence[Box]]
) -> dict[Box, dict[int, int]]:
    """The sums of each box, by worker."""
    holders: dict[Box, dict[int, int]] = {}
    for worker, of_boxes in sorted(sums.items()):
        boxes = boxes_of(worker)
        if len(boxes) != len(of_boxes):
            raise RunError(
                f"{whose}: worker {worker} has summed up {len(of_boxes)} parts of {model}, and holds {len(boxes)}; "
                "start master and workers from one version of realhf",
                workers=[worker],
            )
        for box, total in zip(boxes, of_boxes, strict=True):
            holders.setdefault(box, {})[worker] = total
    return holders


def _checked(
    model: str, version: int, whose: str, holders: Mapping[Box, Mapping[int, int]], expected: _Values | None
) -> _Values:
    """The values that workers have. Raises RunError where they differ from each other, or from those expected."""
    parts: dict[Box, int] = {}
    for box, by_worker in holders.items():
        parts[box], *others = by_worker.values()
        if any(other != parts[box] for other in others):
            raise _differing_ranks(whose, model, version, box, by_worker, expected)
    found = _Values(whose, parts, _added_up(parts))
    if expected is None:
        return found
    if differing := [name for name, total in found.sums.items() if expected.sums.get(name, total) != total]:
        raise _differing_values(found, model, version, differing, holders, expected)
    return found


def _added_up(parts: Mapping[Box, int]) -> dict[str, int]:
    """By parameter, modulo 2^64."""
    sums: dict[str, int] = {}
    for box, total in parts.items():
        sums[box.name] = (sums.get(box.name, 0) + total) % _NUMBERS
    return dict(sorted(sums.items()))


def _differing_ranks(
    whose: str, model: str, version: int, box: Box, by_worker: Mapping[int, int], expected: _Values | None
) -> RunError:
    """The wrong one is that which is not as expected, or which most others contradict."""
    totals = list(by_worker.values())
    right = expected.parts.get(box) if expected else None
    right = max(totals, key=totals.count) if right not in totals else right
    wrong = [worker for worker, total in by_worker.items() if total != right]
    others = [worker for worker, total in by_worker.items() if total == right]
    return RunError(
        f"{whose}: {_workers(wrong)} has other values than {_workers(others)} in version {version} of {model}, in "
        f"{box.name}, the part of shape {box.shape} at offset {box.offset}; a memory or a link changed them: {_REMEDY}",
        workers=wrong if totals.count(right or 0) > 1 else [*wrong, *others],
    )


def _differing_values(
    found: _Values,
    model: str,
    version: int,
    names: Sequence[str],
    holders: Mapping[Box, Mapping[int, int]],
    expected: _Values,
) -> RunError:
    wrong = sorted(
        {
            worker
            for box, by_worker in holders.items()
            if box.name in names and expected.parts.get(box) != found.parts[box]
            for worker in by_worker
        }
    )
    more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
    return RunError(
        f"{found.whose} has other values of {model} than version {version} has, which {expected.whose} had: in "
        f"{names[0]}{more}, on {_workers(wrong)}; a memory or a link changed them, or they are of another step: "
        f"{_REMEDY}",
        workers=wrong if len(wrong) == 1 else [],
    )


def _workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
