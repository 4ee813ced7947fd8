"""Bit sums of the parameters and optimizer states here: the worker's part of `realhf.master.weights`."""

from realhf.engine.backend import EngineModel
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import decoder_parameters
from realhf.realloc.execute.checksum import ParameterSums
from realhf.rundir.run import Run
from realhf.rundir.weights import is_optimizer_state


class WeightSums:
    """The sums of each model here, by layout. Values that nothing has written since are summed up again in every
    `RunSpec.verify_reallocations_every`-th step, to notice a memory that changes them."""

    def __init__(self, run: Run):
        self._shapes = {
            name: {spec.name: spec.shape for spec in decoder_parameters(architecture)}
            for name, architecture in run.experiment.graph.models.items()
        }
        self._every = run.spec.verify_reallocations_every
        self._summing: dict[tuple[str, Layout], ParameterSums] = {}
        self._known: dict[tuple[str, Layout], tuple[object, tuple[int, ...]]] = {}
        self._states: dict[str, ParameterSums] = {}
        self._states_since: dict[str, int] = {}  # the period in which they were summed up last

    def are_known(self, name: str, layout: Layout, model: EngineModel, step: int) -> bool:
        """Whether `of` need not sum up anything."""
        known = self._known.get((name, layout))
        return known is not None and known[0] == self._state(model, step)

    def of(self, name: str, layout: Layout, model: EngineModel, step: int) -> tuple[int, ...]:
        """The sum of every box, in the order of their names and offsets."""
        if not self.are_known(name, layout, model, step):
            model.residency.check_here()
            if (name, layout) not in self._summing:  # the views stay: memory comes and goes below them
                parts = sorted(model.residency.held(), key=lambda part: (part[0].name, part[0].offset))
                self._summing[name, layout] = ParameterSums(parts, self._shapes[name])
            self._known[name, layout] = self._state(model, step), self._summing[name, layout]()
        return self._known[name, layout][1]

    def are_states_due(self, name: str, step: int) -> bool:
        """Whether the optimizer states have to be summed up before a training too, not after it alone."""
        return self._states_since.get(name) != self._period(step)

    def of_states(self, name: str, model: EngineModel, step: int) -> tuple[int, ...]:
        """The sum of every box of optimizer states that this rank writes into checkpoints, in the order of their names
        and offsets, and behind them the number of optimizer steps."""
        if name not in self._states:
            parts = [(box, tensor) for box, tensor in model.state() if is_optimizer_state(box)]
            shapes = {box.name: self._shapes[name][box.name.partition("@")[0]] for box, _ in parts}
            self._states[name] = ParameterSums(sorted(parts, key=lambda part: (part[0].name, part[0].offset)), shapes)
        self._states_since[name] = self._period(step)
        return *self._states[name](), model.optimizer_steps

    def _state(self, model: EngineModel, step: int) -> object:
        return model.residency.changes, self._period(step)

    def _period(self, step: int) -> int:
        return step // self._every if self._every else 0
