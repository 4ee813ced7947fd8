"""An experiment with what follows from it: the user's code is asked for each part once, and each fact is derived once.

A plan may have rollouts made by older weights in an experiment that asks for none itself: then a copy of the trained
model generates, which follows it some steps behind.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from realhf.api.backends import NATIVE
from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings, Evaluation, ModelSetup, OptimizerConfig
from realhf.architecture.compute import Reproducible
from realhf.architecture.transformers_config import check_backend
from realhf.base.errors import UserError
from realhf.base.numbers import STALENESS, check_range
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.pools import Pool
from realhf.dataflow.splits import SET_NAME, Split


@dataclass(frozen=True, eq=False)
class ResolvedExperiment:
    """An experiment under `@auto`, made where it enters the system and handed down.

    source: the object of the user's class.
    staleness: its rollouts are made by weights so many training steps older, as a copy of the trained model keeps them.
    what_if: calls with other architectures, and the keys of their data set; the graph is made of these.

    Parts are made when they are asked for first; that raises UserError for what is wrong with them.
    """

    source: Any
    staleness: int = 0
    what_if: tuple[Sequence[ModelFunctionCallDef], Sequence[str]] | None = None

    @property
    def seed(self) -> int:
        return int(self.source.seed)

    @property
    def steps(self) -> int:
        return int(self.source.steps)

    @property
    def reproducible(self) -> Reproducible:
        """What results are the same bit by bit: runs of one plan, or those of every layout."""
        chosen: Reproducible = getattr(self.source, "reproducible", "plan")
        if chosen not in get_args(Reproducible):
            raise UserError(f"reproducible={chosen!r} is not known; choose from {', '.join(get_args(Reproducible))}")
        return chosen

    @property
    def threads(self) -> int | None:
        """Threads of a worker without a GPU: one where sums may not depend on their number; None: any number."""
        return 1 if self.reproducible == "layout" else None

    @cached_property
    def settings(self) -> AutoSettings:
        """Those of `@auto`; a field `batch_size` of the experiment overrides that of the decorator."""
        settings: AutoSettings = getattr(self.source, SETTINGS_ATTRIBUTE)
        batch_size = getattr(self.source, "batch_size", None)
        return replace(settings, batch_size=batch_size) if batch_size is not None else settings

    @cached_property
    def calls(self) -> list[ModelFunctionCallDef]:
        """The experiment's own calls. Raises UserError as the user's code does."""
        return list(self.source.rpcs)

    @cached_property
    def dataset(self) -> Any:
        """A `Dataset`. Workers read those of `realhf.data` alone, which have more methods."""
        return self.source.dataset

    @cached_property
    def evaluations(self) -> dict[Split, Evaluation]:
        """The evaluations by their splits, in the order in which they are made.

        Raises UserError for a name that statistics cannot begin with, and for evaluations at different steps.
        """
        made: Evaluation | Mapping[str, Evaluation] | None = getattr(self.source, "evaluation", None)
        if not isinstance(made, Mapping):
            return {"evaluation": made} if made else {}
        for name, one in made.items():
            if not re.fullmatch(SET_NAME, name):
                raise UserError(f"evaluation: the name {name!r} has other characters than letters, digits, - and _")
            if one.every_steps != (first := next(iter(made.values()))).every_steps:
                raise UserError(
                    f"evaluation: every_steps={one.every_steps} of {name!r} is not {first.every_steps}, that of "
                    f"{next(iter(made))!r}; all sets are evaluated after the same steps, so give them one number"
                )
        return {f"evaluation/{name}": one for name, one in made.items()}

    @cached_property
    def setups(self) -> dict[str, ModelSetup]:
        """The setup of every model, with defaults for those that the experiment does not mention, and with the copies
        for stale rollouts.

        Raises:
            UserError: a setup for a model that no call uses, a trained model without an optimizer, a model of another
                dtype than the one it follows, or a backend that does not compute the model's architecture.
        """
        setups = _setups(self.calls, self._given)
        for model, follow in self._copies.items():
            copied = setups[follow.source]
            setups[model] = replace(copied, optimizer=None, with_optimizer=False, follows=follow)
        if self.reproducible == "layout":
            return {name: _reproducible(name, setup) for name, setup in setups.items()}
        return setups

    @cached_property
    def graph(self) -> DataflowGraph:
        """The dataflow graph. A copy is confined to the pool of its model.

        Raises:
            UserError: as `DataflowGraph`; no trained model generates, or a copy's name is taken.
        """
        settings: AutoSettings | None = getattr(self.source, SETTINGS_ATTRIBUTE, None)
        given: Mapping[str, Pool] = getattr(self.source, "pools", settings.pools if settings else {})
        pools = {**given, **{copy: given[of.source] for copy, of in self._copies.items() if of.source in given}}
        follows = {name: setup.follows for name, setup in self._given.items() if setup.follows is not None}
        calls, keys = self.what_if or (self.calls, self.dataset.keys)
        return DataflowGraph(self._with_copies(calls), keys, follows | self._copies, pools)

    @cached_property
    def graphs(self) -> dict[Split, DataflowGraph]:
        """The graph of training, and those of evaluations."""
        graphs: dict[Split, DataflowGraph] = {"train": self.graph}
        for split, evaluation in self.evaluations.items():
            graphs[split] = DataflowGraph(self._marked(evaluation.rpcs), evaluation.dataset.keys)
        return graphs

    def stale(self, staleness: int) -> "ResolvedExperiment":
        """The experiment with rollouts by weights so many steps older; itself where that is so."""
        if staleness == self.staleness:
            return self
        return self._others.setdefault(staleness, replace(self, staleness=staleness))

    @cached_property
    def _others(self) -> "dict[int, ResolvedExperiment]":
        """Those that `stale` has made."""
        return {}

    @cached_property
    def _given(self) -> Mapping[str, ModelSetup]:
        """The setups that the experiment mentions."""
        return getattr(self.source, "models", {})

    @cached_property
    def _copies(self) -> dict[str, Follow]:
        """The copies that generate for stale rollouts, by name."""
        check_range("staleness", self.staleness, *STALENESS)
        if not self.staleness:
            return {}
        trained = {call.model_name for call in self.calls if call.trains}
        generating = [call.model_name for call in self.calls if call.generates and call.model_name in trained]
        if not generating:
            raise UserError(
                f"staleness {self.staleness} is for generation by a model that the experiment trains, and it has no "
                "such call (a copy may generate already, by the experiment's own staleness); leave out --staleness and "
                "--staleness-up-to"
            )
        return {f"{model}_rollout": Follow(model, eta=1.0, staleness=self.staleness) for model in generating}

    def _with_copies(self, calls: Sequence[ModelFunctionCallDef]) -> list[ModelFunctionCallDef]:
        """The calls, under their names, where copies of trained models generate in place of these."""
        copy_of = {follow.source: copy for copy, follow in self._copies.items()}
        if taken := {call.model_name for call in calls} & self._copies.keys():
            raise UserError(
                f"staleness {self.staleness} makes a model {min(taken)!r}, and the experiment has one of this name; "
                "give that another name, or take a staleness of 0"
            )
        return self._marked(
            replace(call, name=call.name, model_name=copy_of[call.model_name])
            if call.generates and call.model_name in copy_of
            else call
            for call in calls
        )

    def _marked(self, calls: Iterable[ModelFunctionCallDef]) -> list[ModelFunctionCallDef]:
        """The calls, which say whether their results depend on the layout."""
        return [replace(call, reproducible=self.reproducible == "layout") for call in calls]


def _reproducible(name: str, setup: ModelSetup) -> ModelSetup:
    """The setup of a model whose results do not depend on the layout. Raises UserError for what depends on it."""
    says, compute, optimizer = f"model {name!r} under reproducible='layout': ", setup.compute, setup.optimizer
    if setup.backend != NATIVE:
        raise UserError(
            f"{says}backend={setup.backend!r} adds up in orders of its own; choose backend={NATIVE!r}, or leave "
            "reproducible out"
        )
    if setup.dtype not in ("float32", "bfloat16"):
        raise UserError(f"{says}its kernels have no dtype {setup.dtype}; choose float32 or bfloat16")
    if compute.data_parallel == "fsdp" or compute.sequence_parallel or (optimizer and not optimizer.fp32_gradients):
        raise UserError(
            f"{says}data_parallel='fsdp', sequence_parallel and fp32_gradients=False add up in orders of the layout; "
            "leave them out"
        )
    fixed = replace(compute, data_parallel="zero1", sequence_parallel=False)
    return replace(setup, compute=fixed, reproducible="layout")


def _setups(calls: Sequence[ModelFunctionCallDef], given: Mapping[str, ModelSetup]) -> dict[str, ModelSetup]:
    """Those `given`, and defaults. Raises as `ResolvedExperiment.setups`."""
    setups, with_models = dict(given), [call for call in calls if not call.runs_beside]
    used = {call.model_name for call in with_models}
    for name in setups:
        if name not in used:
            raise UserError(f"models: {name!r} is used by no call; the calls use {', '.join(sorted(used))}")
    trained = {call.model_name for call in with_models if call.trains}
    for call in with_models:
        default = ModelSetup(optimizer=OptimizerConfig() if call.model_name in trained else None)
        setup = setups.setdefault(call.model_name, default)
        if call.trains and setup.optimizer is None:
            raise UserError(f"{call.name} trains {call.model_name!r}, which has no optimizer; give one in models")
        check_backend(f"model {call.model_name!r}", call.config, setup.backend)
    for name, setup in setups.items():
        if setup.follows is not None and setup.follows.source in setups:
            _check_follow(name, setup, setups[setup.follows.source])
    return setups


def _check_follow(name: str, setup: ModelSetup, source: ModelSetup) -> None:
    assert setup.follows is not None
    eta, says = setup.follows.eta, f"model {name!r} follows {setup.follows.source!r}"
    if setup.dtype != source.dtype:
        raise UserError(f"{says} but has dtype {setup.dtype}, not {source.dtype}; give both models one dtype")
    if setup.dtype == "bfloat16" and eta < 2**-8:
        raise UserError(
            f"{says} with eta={eta:g} in bfloat16, where changes below 1/256 of a value are lost, so that hardly any "
            "would remain; use dtype='float32', or a larger eta less often (every_steps)"
        )
