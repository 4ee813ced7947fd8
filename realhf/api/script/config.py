"""Settings of the calls that a script makes; see `realhf.algorithms.script` for what they do on the workers."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from realhf.api.generation import GenerationOptions
from realhf.api.script.functions import BoundLoss, Named
from realhf.api.script.views import View
from realhf.dataflow.interface import InterfaceConfig

_ROOM = "realhf.algorithms.script"

Rows = Literal["rollout", "examples", "pairs"]
# The columns that hold the sequences of each kind of rows.
SEQUENCES: dict[Rows, tuple[str, ...]] = {
    "rollout": ("seq",),
    "examples": ("tokens",),
    "pairs": ("chosen", "rejected"),
}


@dataclass(frozen=True, kw_only=True)
class ScriptCall(InterfaceConfig):
    """What all calls of a script have.

    view: the columns that the call reads.
    outputs: pairs (column, key) of what it makes.
    reports: numbers of the tensor functions whose statistics this call gives; another call may evaluate them too.
    sequences: keys whose tokens the model reads, where these are not a prompt and its response.
    """

    view: View
    outputs: tuple[tuple[str, str], ...] = ()
    reports: tuple[int, ...] = ()
    sequences: tuple[str, ...] = ()

    @property
    def sequence_keys(self) -> tuple[str, ...]:  # type: ignore[override]  # of each call, not of the class
        return self.sequences


@dataclass(frozen=True, kw_only=True)
class Generate(GenerationOptions, ScriptCall):
    """GENERATE: `prompt` -> `seq` and `logprob` [response], of the whole distribution at the rollout's temperature.

    `name` is that of the call, empty for the first one of a model; each name has random numbers of its own.
    """

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:GenerateInterface"
    recordable: ClassVar[tuple[str, ...]] = ("seq", "logprob", "margin", "logits")

    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Logprobs(ScriptCall):
    """INFERENCE: log-probabilities at `temperature`: of the response tokens of rollouts, one column [response];
    of pairs two columns, sums over the tokens of each answer [1], or with `per_token` [answer]."""

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:LogprobsInterface"

    rows: Rows = "rollout"
    temperature: float = 1.0
    per_token: bool = False


@dataclass(frozen=True, kw_only=True)
class Values(ScriptCall):
    """INFERENCE: values of the states that predict the response tokens, [response]."""

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:ValuesInterface"


@dataclass(frozen=True, kw_only=True)
class Score(ScriptCall):
    """INFERENCE: the value of `seq` at its last token, [1]. `statistic` is the name of its mean; empty: none."""

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:ScoreInterface"

    statistic: str = ""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A loss on some of the rows of an update. `coef` multiplies it; `is_scalar` is the kind of the model's head."""

    view: View
    rows: Rows
    loss: BoundLoss
    temperature: float = 1.0
    coef: float = 1.0
    is_scalar: bool = False


@dataclass(frozen=True, kw_only=True)
class Update(ScriptCall):
    """TRAIN_STEP: one optimizer step a mini-batch on the sum of all terms, which may be of different rows.

    `model` is its name, in front of the statistics `loss`, `grad_norm` and `lr`. Of rollouts there are also
    `reward_mean`, `kl`, `kl_per_sequence`, `response_length`, `entropy`, as far as the columns allow. With `max_kl` the
    call stops after the first optimizer step in whose pass the policy was further than that from the rollout's:
    KL(old || new), the mean over tokens of new / old - 1 - log(new / old).
    """

    implementation: ClassVar[str] = f"{_ROOM}.update:UpdateInterface"

    model: str
    terms: tuple[Term, ...]
    epochs: int = 1
    max_kl: float | None = None
    rollout_statistics: bool = False


@dataclass(frozen=True, kw_only=True)
class OwnMethod(ScriptCall):
    """A method of the user's: `function(model, batch, context, *arguments) -> CallResult | columns` (see
    `model_method`)."""

    implementation: ClassVar[str] = f"{_ROOM}.own_method:OwnMethodInterface"

    function: Named
    arguments: tuple[Any, ...] = field(default=())
    keywords: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class OwnRule(OwnMethod):
    """An own method that does not use its model."""

    uses_model: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ScoreTexts(ScriptCall):
    """INFERENCE beside the devices: `prompt`, `seq` -> `reward` [1] (and `valid` [1]) by functions on texts.

    `reward` is a `realhf.algorithms.text_reward.config.TextReward`, which lies above the API; `name` is that of the
    call, in front of the names of its statistics.
    """

    implementation: ClassVar[str] = f"{_ROOM}.texts:ScoreTextsInterface"
    uses_model: ClassVar[bool] = False
    runs_beside: ClassVar[bool] = True

    reward: Any
    name: str = ""

    @property
    def seconds_per_sample(self) -> float:
        return float(self.reward.seconds_per_sample)

    @property
    def processes_per_worker(self) -> int:
        return int(self.reward.processes_per_worker)

    def check_columns(self, columns: Collection[str]) -> None:
        self.reward.check_columns(columns)


@dataclass(frozen=True, kw_only=True)
class Measure(ScriptCall):
    """INFERENCE: the loss of an update on rows that it does not learn from, as the statistic MODEL_loss, with those
    that the loss gives."""

    implementation: ClassVar[str] = f"{_ROOM}.update:MeasureInterface"

    model: str
    term: Term
