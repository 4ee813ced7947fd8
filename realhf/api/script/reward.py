"""The reward of a script: functions on texts, or a reward model, as the options say."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import tyro

from realhf.api.backends import BACKEND_OPTION, NATIVE
from realhf.api.script.columns import Columns
from realhf.api.script.functions import load
from realhf.api.script.lines import script_error
from realhf.api.script.models import ROLLOUT, RewardModel, in_reading_order
from realhf.api.script.symbols import SymbolicColumns
from realhf.api.script.trace import Request, ScriptParameter
from realhf.api.script.views import View
from realhf.architecture.compute import ComputeConfig
from realhf.base.errors import UserError
from realhf.base.options import NEEDED, Common, Option
from realhf.dataflow.graph import INFERENCE
from realhf.rewards.pool import FunctionOptions

_TEXT_REWARD = "realhf.algorithms.text_reward.config:TextReward"  # by its name: it lies above the API


@dataclass(frozen=True, kw_only=True)
class Reward(FunctionOptions, ScriptParameter):
    """What scores responses: functions on texts (`--reward FILE.py:FUNCTION`, which may be repeated, with `=WEIGHT`
    behind it), or a reward model (`--reward.model DIR`); `reward` is the name of the parameter.
    """

    functions: Annotated[
        tuple[str, ...],
        Common(
            "function of texts that scores responses, or ready:NAME; may be repeated, with =WEIGHT behind each",
            metavar="FILE.py:FUNCTION",
            group=NEEDED,
        ),
        tyro.conf.arg(name=""),
        tyro.conf.UseAppendAction,
    ] = ()
    model: Annotated[
        str,
        Common(
            "reward model in place of functions: a run directory or Hugging Face checkpoint",
            metavar="DIR",
            group=NEEDED,
        ),
    ] = ""
    new_head: Annotated[bool, Option("put a new head on the reward model's layers", group=NEEDED)] = False
    per_token: Annotated[
        bool, Option("the reward model scores each token of a response, not the last one alone", group=NEEDED)
    ] = False
    backend: Annotated[str, BACKEND_OPTION] = NATIVE
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.functions and self.model:
            raise UserError(
                f"the reward has functions ({', '.join(self.functions)}) and the model {self.model}; give one kind"
            )
        if self.functions and self.per_token:
            raise UserError(
                f"per_token=True is for a reward model, and the reward has functions ({', '.join(self.functions)}); "
                "leave it out: a function that returns a list with a number for each token is taken so"
            )

    def with_default(self, functions: tuple[str, ...]) -> Self:
        """With these functions, where the options name neither functions nor a model."""
        return self if self.functions or self.model else dataclasses.replace(self, functions=functions)

    def as_model(self, name: str) -> RewardModel:
        """The model that scores. Raises UserError where the options name neither a model nor functions."""
        if not self.model:
            raise UserError(
                f"there is no reward; give --{name} FILE.py:FUNCTION, a function of texts, or --{name}.model DIR, a "
                "reward model; a task (`realhf data --list`) brings its own"
            )
        names = ("model", "new_head", "per_token", "backend", "compute")
        return RewardModel(**{name: getattr(self, name) for name in names})

    def score(self, rollout: Columns, *, key: str = "reward", name: str = "") -> Columns:
        """The column `reward` [1], or [response] where a function gives each token a value; with `on_error="drop"` also
        `valid` [1], 0 for samples that are to count nowhere."""
        trace, parameter = self._in_script
        if not isinstance(rollout, SymbolicColumns) or rollout._view.function is not None:
            raise script_error(f"{parameter}.score reads a rollout, and was given {rollout!r}; {ROLLOUT}")
        trace.check_columns(rollout)
        rollout._needs(("prompt", "seq"), f"{parameter}.score", ROLLOUT)
        columns = (key, "valid") if self.on_error == "drop" else (key,)
        made_name = name or rollout._origin.suffix
        request = trace.named(Request(model=parameter, method="score", kind=INFERENCE, outputs=columns, name=made_name))
        view = View(tuple(pair for pair in rollout._view.columns if pair[0] in ("prompt", "seq")))
        keys, made = trace.keys(request), rollout._origin.generated_by
        ends = {} if made is None else {"eos_token": made.end_token, "stop_strings": made.stop_strings}
        config = load(_TEXT_REWARD)(
            batch=view,
            outputs=tuple(keys.values()),
            reports=(),
            prefix=request.name,
            rewards=self.functions,
            tokenizer=trace.tokenizer,
            **ends,
            **{one.name: getattr(self, one.name) for one in dataclasses.fields(FunctionOptions)},
        )
        trace.add(request, config, in_reading_order(view))
        return trace.result(request, keys)


def models_of_rewards(rewards: dict[str, Reward]) -> dict[str, Any]:
    """By parameter the reward models, of those rewards that are models."""
    return {name: reward.as_model(name) for name, reward in rewards.items() if not reward.functions}
