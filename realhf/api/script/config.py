"""The kinds of model function calls; see `realhf.algorithms.script` for what they do on the workers.

A script makes them by the methods of its models. An experiment that lists its calls gives them as `interface_impl`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, Literal, Self, get_args

from realhf.api.generation import GenerationOptions
from realhf.api.script.functions import BoundLoss, Named
from realhf.api.script.views import INPUTS, View
from realhf.base.errors import UserError
from realhf.dataflow.interface import InterfaceConfig

_ROOM = "realhf.algorithms.script"

Rows = Literal["rollout", "examples", "pairs"]
# The columns that hold the sequences of each kind of rows.
SEQUENCES: dict[Rows, tuple[str, ...]] = {
    "rollout": ("seq",),
    "examples": ("tokens",),
    "pairs": ("chosen", "rejected"),
}
# The statistics that a call may give beside its own: of the rollouts that it reads, and by number of a tensor function.
Report = Literal["rollout"] | int


@dataclass(frozen=True, kw_only=True)
class ScriptCall(InterfaceConfig):
    """What all kinds of calls have.

    batch: the columns that the call reads: all of its inputs by their keys, `inputs(prompt="question")`, or the result
        of a tensor function.
    outputs: the keys of what it makes, in the order of `columns`; those left out have the column's name.
    reports: the statistics that it gives beside its own, of the rollouts and of tensor functions; None: all. Another
        call may read the same, and a statistic of two calls gets their models' names.
    """

    columns: ClassVar[tuple[str, ...]] = ()

    batch: View = INPUTS
    outputs: tuple[str, ...] = ()
    reports: tuple[Report, ...] | None = None

    @property
    def output_data(self) -> tuple[str, ...]:
        """The keys that the call makes."""
        return (*self.outputs, *self.columns[len(self.outputs) :])

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return _sequence_keys([(self.batch, SEQUENCES["rollout"])])


def _sequence_keys(read: Iterable[tuple[View, Sequence[str]]]) -> tuple[str, ...]:
    """The keys of the columns with these names; none for one rollout, which the planner takes for granted."""
    keys = [
        key for view, names in read for name, key in view.columns or zip(names, names, strict=True) if name in names
    ]
    return () if keys == ["seq"] else tuple(keys)


@dataclass(frozen=True, kw_only=True)
class Generate(GenerationOptions, ScriptCall):
    """GENERATE: `prompt` -> `seq` (prompt and response) and `logprob` [response], of the whole distribution at the
    temperature of the draw.

    `--record` also takes `drawn_logprob` (of the distribution that tokens are drawn from, which `top_k` and `top_p`
    truncate), `margin` and `logits`; see `realhf.engine.interface.GenerationOutput`.

    name: empty for the first call of a model; each name has random numbers of its own.
    statistic: the name of the mean length of the responses; empty: none.
    """

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:GenerateInterface"
    recordable: ClassVar[tuple[str, ...]] = ("seq", "logprob", "drawn_logprob", "margin", "logits")
    columns: ClassVar[tuple[str, ...]] = ("seq", "logprob")

    name: str = ""
    statistic: str = ""

    @classmethod
    def by(cls, options: GenerationOptions, **settings: Any) -> Self:
        """The call that draws by `options`, or hyperparameters derived from them, with further `settings`."""
        drawing = {one.name: getattr(options, one.name) for one in fields(GenerationOptions)}
        return cls(**drawing | settings)


@dataclass(frozen=True, kw_only=True)
class SampledAccuracy(Generate):
    """GENERATE: how often the response to `prompt` is exactly `answer`: the same text, and then the end token.

    Texts are compared because one text can be cut into tokens in several ways; `tokenizer` turns both into text.

    Statistics: `statistic` (a share from 0 to 1) and `STATISTIC_response_length` (tokens). No outputs.
    """

    implementation: ClassVar[str] = f"{_ROOM}.accuracy:SampledAccuracyInterface"
    recordable: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[str, ...]] = ()

    statistic: str = "accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_token < 0:
            raise UserError(
                f"eos_token={self.eos_token}: an answer is right only with its end token; give that of the tokenizer"
            )
        if not Path(self.tokenizer).is_file():
            raise UserError(
                f"tokenizer={self.tokenizer!r}: no such file, and answers are compared as text; give the path of the "
                "model's tokenizer.json"
            )


@dataclass(frozen=True, kw_only=True)
class Logprobs(ScriptCall):
    """INFERENCE: log-probabilities at `temperature`: of the response tokens of rollouts (`prompt`, `seq`) the column
    `ref_logprob` [response]; of pairs (`prompt`, `chosen`, `rejected`) `chosen_ref_logprob` and `rejected_ref_logprob`,
    sums over the tokens of each answer [1], or with `per_token` [answer]."""

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:LogprobsInterface"

    rows: Rows = "rollout"
    temperature: float = 1.0
    per_token: bool = False

    @property
    def output_data(self) -> tuple[str, ...]:
        sides = [f"{side}_" for side in SEQUENCES["pairs"]] if self.rows == "pairs" else [""]
        return self.outputs or tuple(f"{side}ref_logprob" for side in sides)

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return _sequence_keys([(self.batch, SEQUENCES[self.rows])])


@dataclass(frozen=True, kw_only=True)
class Distributions(ScriptCall):
    """INFERENCE: `prompt`, `seq` -> the distributions at `temperature` that predict the tokens of the response, as
    log-probabilities in at least float32: `teacher_logprob` [response, vocab].

    top_k: 0, or how many tokens are named, the most likely ones: `teacher_logprob` [response, top_k + 1], whose last
        is that of all others together, and `teacher_token` [response, top_k].
    """

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:DistributionsInterface"

    temperature: float = 1.0
    top_k: int = 0

    @property
    def output_data(self) -> tuple[str, ...]:
        return self.outputs or ("teacher_logprob", "teacher_token")[: 2 if self.top_k else 1]

    def wide_bytes(self, key: str, vocab_size: int) -> int:
        is_logprob = key == self.output_data[0]
        return 4 * (self.top_k + 1 if self.top_k else vocab_size) if is_logprob else 8 * self.top_k


@dataclass(frozen=True, kw_only=True)
class Values(ScriptCall):
    """INFERENCE: `prompt`, `seq` -> `value` [response], of the states that predict the tokens of the response."""

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:ValuesInterface"
    columns: ClassVar[tuple[str, ...]] = ("value",)


@dataclass(frozen=True, kw_only=True)
class Score(ScriptCall):
    """INFERENCE: `seq` -> `reward` [1], the value of the sequence at its last token.

    per_token: `prompt`, `seq` -> `reward` [response], the values at the tokens of the response; their sum is its score.
    statistics: the names of the mean of the scores and of their squares, as far as they are given.
    """

    implementation: ClassVar[str] = f"{_ROOM}.rollouts:ScoreInterface"
    columns: ClassVar[tuple[str, ...]] = ("reward",)

    per_token: bool = False
    statistics: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Term:
    """A loss on some of the rows of an update.

    rows: rollouts (`prompt`, `seq`), examples (`tokens`, `prompt_length`, and where there is one `loss_mask`), or pairs
        (`prompt`, `chosen`, `rejected`).
    temperature: at which the rollouts were drawn; 0: that of the loss's hyperparameters, else 1.
    coef: multiplies the loss where it stands beside that of an update.
    """

    loss: BoundLoss = field(kw_only=False)
    batch: View = INPUTS
    rows: Rows = "rollout"
    temperature: float = 0.0
    coef: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.loss, BoundLoss):
            raise UserError(
                f"an update was given a {type(self.loss).__name__} for a loss; mark a function with loss_function, and "
                "call it with its hyperparameters: Update(my_loss(hp))"
            )
        if self.rows not in get_args(Rows):
            raise UserError(f"rows={self.rows!r} is not known; choose one of {', '.join(get_args(Rows))}")
        temperature = self.temperature or self.loss.setting("temperature", 1.0) or 1.0
        object.__setattr__(self, "temperature", temperature)


@dataclass(frozen=True, kw_only=True)
class Update(Term, ScriptCall):
    """TRAIN_STEP: one optimizer step a mini-batch on the sum of a loss and the further ones in `also`, which may be of
    other rows.

    Statistics: `loss`, `grad_norm` and `lr`, with `prefix` in front of them; of rollouts also `reward_mean`, `kl`,
    `kl_per_sequence`, `response_length`, `entropy`, as far as the columns allow.

    epochs: how often it goes through the mini-batches; 0: as often as the loss's hyperparameters say, else once.
    max_kl: an update of a policy on rollouts stops after the first optimizer step in whose pass the policy was further
        than this from the rollout's: KL(old || new), the mean over tokens of new / old - 1 - log(new / old). None: as
        the loss's hyperparameters say, else never.
    """

    implementation: ClassVar[str] = f"{_ROOM}.update:UpdateInterface"

    also: tuple[Term, ...] = ()
    epochs: int = 0
    max_kl: float | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "epochs", self.epochs or self.loss.setting("epochs", 1))
        if self.max_kl is None:
            object.__setattr__(self, "max_kl", self.loss.setting("max_kl", None))

    @property
    def terms(self) -> tuple[Term, ...]:
        """All losses, this one first."""
        return (self, *self.also)

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return _sequence_keys((term.batch, SEQUENCES[term.rows]) for term in self.terms)

    def computed_samples(self, samples: int, dp: int, mini_batches: int) -> int:
        """Where hyperparameters say how many groups of a step are in the loss (`groups_per_step`), and nothing else is
        trained on: those of the rank with the most, if they lie anywhere in the step with the same probability.

        Their number on a rank is hypergeometric, taken as normal here, and the largest of several is Blom's (1958).
        """
        wanted: int = self.loss.setting("groups_per_step", 0)
        together: int = self.loss.setting("samples_per_prompt", 1)
        parts = dp * mini_batches
        groups = samples * parts // together
        if self.also or not 0 < wanted < groups:
            return samples
        variance = wanted / parts * (1 - 1 / parts) * (groups - wanted) / (groups - 1)
        largest = NormalDist().inv_cdf((dp - 0.375) / (dp + 0.25)) * math.sqrt(dp / (dp - 1)) if dp > 1 else 0.0
        return min(samples, math.ceil((wanted / parts + largest * math.sqrt(variance)) * together))


@dataclass(frozen=True, kw_only=True)
class Measure(Term, ScriptCall):
    """INFERENCE: the loss of an update, without an optimizer step, as the statistic `loss`, with `prefix` in front of
    it. For rollouts it also gives the statistics that `Update` gives.

    name: what all of its statistics begin with, those of the loss, the rollouts and tensor functions too.
    """

    implementation: ClassVar[str] = f"{_ROOM}.update:MeasureInterface"

    prefix: str = ""
    name: str = ""

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return _sequence_keys([(self.batch, SEQUENCES[self.rows])])


@dataclass(frozen=True, kw_only=True)
class OwnMethod(ScriptCall):
    """A method of the user's: `function(model, batch, context, *arguments) -> CallResult` with the columns `makes` (see
    `model_method`)."""

    implementation: ClassVar[str] = f"{_ROOM}.own_method:OwnMethodInterface"

    function: Named
    makes: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return _sequence_keys([(self.batch, (*SEQUENCES["rollout"], *SEQUENCES["pairs"]))])


@dataclass(frozen=True, kw_only=True)
class OwnRule(OwnMethod):
    """An own method that does not use its model."""

    uses_model: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Fetch(ScriptCall):
    """INFERENCE beside the devices: writes the columns of `batch` for a live program, into `folder`/step-N. No outputs.

    title: the name of the files, of each call of a round another.
    """

    implementation: ClassVar[str] = "realhf.worker.program_values:FetchInterface"
    uses_model: ClassVar[bool] = False
    runs_beside: ClassVar[bool] = True

    folder: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Given(Fetch):
    """INFERENCE beside the devices: reads a column that a live program has written into `folder`/step-N."""

    implementation: ClassVar[str] = "realhf.worker.program_values:GivenInterface"
