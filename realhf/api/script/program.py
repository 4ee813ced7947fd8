"""The declarations of a live program as an experiment: its models, data and rewards, and an outline of a round."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings, ModelSetup
from realhf.api.generation import GenerationOptions
from realhf.api.script.config import Fetch
from realhf.api.script.data import Prompts, ScriptData
from realhf.api.script.experiment import ScriptExperiment
from realhf.api.script.functions import loss_function
from realhf.api.script.models import Policy, RewardModel, ScriptModel, ValueModel
from realhf.api.script.trace import Trace
from realhf.base.errors import UserError
from realhf.dataflow.graph import INFERENCE, ModelFunctionCallDef

# Any loss will do: the planner counts the pass, and no worker computes an outline.
_LOSS = loss_function("realhf.algorithms.sft.functions:sft")


@dataclass(frozen=True, kw_only=True)
class Program(ScriptExperiment):
    """The experiment of a live program.

    trained: the models that the program trains.
    generation: the options of its first rollouts, by which memory and times are planned.
    """

    trained: tuple[str, ...] = ()
    generation: GenerationOptions = field(default_factory=lambda: GenerationOptions(max_new_tokens=1))

    @cached_property
    def rpcs(self) -> Sequence[ModelFunctionCallDef]:
        """One call of each kind that a round may have: what the plan is made of."""
        trace = Trace(self.architectures, self.mini_batches, self._tokenizer, self._end_tokens)
        models: dict[str, Any] = {name: model.in_trace(trace, name) for name, model in self._models.items()}
        (data, first), *_ = self._of_kind(ScriptData).items()
        rows: Any = trace.dataset(data, self._datasets[data].keys)
        others = {name: model for name, model in models.items() if name not in self.trained}
        if isinstance(first, Prompts):
            policies = [name for name, model in models.items() if isinstance(model, Policy)]
            if not policies:
                raise UserError(f"no policy answers the prompts of {first.data}; declare one with cluster.policy")
            drawing = min(policies, key=lambda name: name not in self.trained)
            rows = models[drawing].generate(rows, self.generation)
            others = {name: model for name, model in models.items() if name != drawing}
        for name, model in others.items():
            _infer(model, rows, name, is_rollout=isinstance(first, Prompts))
        trace.calls.append(
            ModelFunctionCallDef(
                name="fetch",
                interface_type=INFERENCE,
                interface_impl=Fetch(batch=rows._view, folder=""),
                input_data=rows._view.keys,
            )
        )
        for name in self.trained:
            models[name].update(rows, _LOSS())
        return trace.calls

    @cached_property
    def models(self) -> Mapping[str, ModelSetup]:
        return {
            name: model.setup(name, self._sources[name], self.dtype, trains=name in self.trained)
            for name, model in self._models.items()
        }

    @property
    def evaluation(self) -> None:
        """The program measures by calls of its own."""

    @classmethod
    def evaluates_only(cls) -> bool:
        return False

    @classmethod
    def untrained(cls) -> frozenset[str]:
        return frozenset()

    def _of_kind(self, kind: type[Any]) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, kind)}


def _infer(model: ScriptModel, rows: Any, name: str, *, is_rollout: bool) -> None:
    match model:
        case _ if not is_rollout:
            model.compute_loss(rows, _LOSS(), name=name)
        case RewardModel():
            model.score(rows, key=f"{name}_score")
        case ValueModel():
            model.values(rows, key=f"{name}_value")
        case Policy():
            model.logprobs(rows, key=f"{name}_logprob")


def program_class(kinds: Mapping[str, type[Any]], batch_size: int) -> type[Program]:
    """The class of a program that has declared a model, a data set or a reward of these kinds under each name."""
    fields: list[Any] = [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()]
    made = dataclasses.make_dataclass(
        "LiveProgram", fields, bases=(Program,), namespace={"__module__": __name__}, frozen=True, kw_only=True
    )
    setattr(made, SETTINGS_ATTRIBUTE, AutoSettings(batch_size=batch_size))
    return made
