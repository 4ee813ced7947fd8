"""The models of a script: what their parameters' annotations name, with their options and their methods."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import tyro

from realhf.api.backends import BACKEND_OPTION, NATIVE
from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.api.model_source import ModelSource
from realhf.api.script.columns import Columns, Symbolic
from realhf.api.script.config import (
    SEQUENCES,
    Distributions,
    Generate,
    Logprobs,
    Measure,
    OwnMethod,
    OwnRule,
    Rows,
    Score,
    ScriptCall,
    Term,
    Update,
    Values,
)
from realhf.api.script.data import ScriptData
from realhf.api.script.functions import BoundLoss, LossFunction, Named, check_in_script
from realhf.api.script.lines import script_error
from realhf.api.script.symbols import SymbolicColumns
from realhf.api.script.trace import Request, ScriptParameter
from realhf.api.script.views import View
from realhf.architecture.compute import ComputeConfig
from realhf.architecture.model import DType, Head
from realhf.base.errors import UserError
from realhf.base.options import NEEDED, Common, Option
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelInterfaceType
from realhf.dataflow.protocols import THREE_D_PROTO, TransferProtocol

# What a method reads: columns of the step, or a parameter that is data, which stands for its columns in a script.
Data = Columns | ScriptData

# The methods of models that train none.
READING = ("generate", "logprobs", "distributions", "values", "score", "compute_loss")

ROLLOUT = "give the result of generate, or a tensor function's that was given it"


@dataclass(frozen=True, kw_only=True)
class ScriptModel(OptimizerConfig, ScriptParameter):
    """A model of a script. Its fields are options of the command line, by the name of the parameter:
    `--actor.model DIR --actor.lr 1e-6`. Those of the optimizer hold if the script trains the model. A model of values
    or rewards that the script trains gets a new head anyway where the checkpoint is a language model. `follows`: see
    `ModelSetup`.
    """

    HEAD: ClassVar[Head]

    HEADING = NEEDED
    WHERE = ""

    model: Annotated[
        str, Option("run directory, Hugging Face checkpoint or GGUF file (default: that of --model)", metavar="DIR")
    ] = ""
    new_head: Annotated[bool, Option("put a new head on the checkpoint's layers")] = False
    with_optimizer: Annotated[bool, Option("take the optimizer's states of the run as well")] = False
    backend: Annotated[str, BACKEND_OPTION] = NATIVE
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    follows: Annotated[Follow | None, tyro.conf.Suppress] = None

    def setup(self, name: str, source: ModelSource, dtype: DType, *, trains: bool) -> ModelSetup:
        """The setup of the model `name` in an experiment.

        Raises:
            UserError: it scores without training, and there are no weights for its head.
        """
        lacks_head = self.HEAD == "scalar" and source.head == "lm" and not self.new_head
        if lacks_head and not trains:
            raise UserError(
                f"the model {name!r} gives scores, and {source.checkpoint} is a language model, without a head for "
                f"them; train one (realhf run reward --model {source.checkpoint} --data PAIRS), and give that run"
            )
        names = (one.name for one in dataclasses.fields(OptimizerConfig))
        return ModelSetup(
            checkpoint=source.checkpoint,
            new_head=self.new_head or lacks_head,
            with_optimizer=self.with_optimizer,
            optimizer=OptimizerConfig(**{name: getattr(self, name) for name in names}) if trains else None,
            dtype=dtype,
            backend=self.backend,
            compute=self.compute,
            follows=self.follows,
        )

    def save(self, path: str) -> None:
        """In a live program: writes the model as it is now, as a Hugging Face directory. Raises UserError where `path`
        exists."""
        self._trace.save(self._name, path)

    def _columns(self, given: Any, method: str) -> SymbolicColumns:
        if isinstance(given, SymbolicColumns):
            self._trace.check_columns(given)
            return given
        what = repr(given) if isinstance(given, Symbolic | ScriptModel) else f"a {type(given).__name__}"
        raise script_error(f"{self._name}.{method} reads columns of the step, and was given {what}; {ROLLOUT}")

    def _infer(
        self, request: Request, kind: type[ScriptCall], read: SymbolicColumns, needs: Sequence[str], **settings: Any
    ) -> Columns:
        """An inference call on the columns `needs` of `read`; all, where a tensor function made them."""
        trace, view = self._trace, read._view
        read._needs(needs, f"{request.model}.{request.method}", ROLLOUT)
        if not read._origin.is_open:
            view = View(tuple(pair for pair in view.columns if pair[0] in needs))
        suffix = request.name or read._origin.suffix
        request = trace.named(dataclasses.replace(request, name=suffix))
        keys = trace.keys(request)
        config = kind(batch=view, outputs=tuple(keys.values()), reports=trace.read(view), **settings)
        trace.add(request, config, in_reading_order(view))
        return trace.result(request, keys)

    def _update(
        self,
        term: tuple[Any, Any, float],
        also: Sequence[tuple[Any, Any, float]] = (),
        *,
        epochs: int | None,
        mini_batches: int | None,
        max_kl: float | None,
        name: str,
    ) -> Any:
        trace, terms = self._trace, [self._term("update", *one) for one in (term, *also)]
        if trace.is_evaluation:
            self._measure(terms[0], name)
            return None
        if len(terms) > 1 and any(one.rows == "pairs" for one in terms):
            raise script_error(
                f"{self._name}.update has several losses, one of them on pairs, whose two sequences make a batch of "
                "their own; update on the pairs in a step of their own script, or on rollouts and examples together"
            )
        first, *others = terms
        numbers = tuple(number for one in terms for number in trace.read(one.batch))
        is_new = first.rows == "rollout" and not trace.has_rollout_statistics
        config = Update(
            **vars(first),
            also=tuple(others),
            reports=("rollout", *numbers) if is_new else numbers,
            epochs=epochs or 0,
            max_kl=max_kl,
            prefix=self._name,
        )
        request = Request(
            model=self._name,
            method="update",
            kind=TRAIN_STEP,
            name=name,
            mini_batches=mini_batches or trace.mini_batches,
        )
        trace.add(trace.named(request), config, [key for one in terms for key in in_reading_order(one.batch)])
        return trace.report()

    def _measure(self, term: Term, name: str) -> None:
        """In an evaluation: the loss of rows of the data, in place of an update."""
        if term.rows == "rollout":
            return
        request = Request(model=self._name, method="update", kind=INFERENCE, name=name)
        config = Measure(**vars(term), reports=self._trace.read(term.batch), prefix=self._name)
        self._trace.add(request, config, in_reading_order(term.batch))

    def compute_loss(self, batch: Data, loss: BoundLoss | LossFunction, *, name: str = "") -> Any:
        """The statistics that an update on `batch` would give before its step, of the same loss; trains nothing. Their
        names begin with `name`, by default with `computed`.

        Source: `compute_loss` of HybridFlow (Sheng et al., 2025), for pretraining data; here for any rows.
        """
        trace, begin = self._trace, name or "computed"
        for call in trace.calls:
            made = call.interface_impl
            if call.model_name == self._name and isinstance(made, Measure) and made.name == begin:
                raise script_error(
                    f"{self._name}.compute_loss gives statistics that begin with {begin!r}, and those of {call.name} "
                    "do too; give one of the calls another name, such as name='second'"
                )
        term = self._term("compute_loss", batch, loss)
        if trace.is_evaluation and term.rows == "rollout":  # as of an update
            return None
        trace.look(term.batch)
        request = trace.named(Request(model=self._name, method="compute_loss", kind=INFERENCE, name=name))
        trace.add(request, Measure(**vars(term), prefix=self._name, name=begin), in_reading_order(term.batch))
        return trace.report()

    def _term(self, method: str, batch: Any, loss: Any, coef: float = 1.0) -> Term:
        read = self._columns(batch, method)
        if isinstance(loss, LossFunction):
            loss = loss()
        if not isinstance(loss, BoundLoss):
            raise script_error(
                f"{self._name}.{method} needs a loss, and was given a {type(loss).__name__}; mark one with "
                f"loss_function and call it with its hyperparameters: {method}(batch, my_loss(hp))"
            )
        check_in_script(loss.function)
        known = dict(read._view.columns)
        rows: Rows = next((kind for kind in SEQUENCES if all(name in known for name in SEQUENCES[kind])), "rollout")
        needs = {"rollout": ("prompt", "seq"), "examples": ("tokens", "prompt_length"), "pairs": ("prompt",)}[rows]
        read._needs(needs, f"{self._name}.{method}", "give a rollout, or data of the kind Examples or Pairs")
        return Term(loss, batch=read._view, rows=rows, temperature=read._origin.temperature or 1.0, coef=coef)


@dataclass(frozen=True, kw_only=True)
class Policy(ScriptModel):
    """A language model: it generates, gives log-probabilities, and learns."""

    HEAD: ClassVar[Head] = "lm"

    def generate(self, prompts: Data, options: GenerationOptions, *, name: str = "") -> Columns:
        """Responses to `prompts`: the columns `prompt`, `seq` (prompt and response) and `logprob` [response], of the
        drawn tokens under the whole distribution at the temperature of `options`.

        A second call of the model needs a `name`, which the keys of its columns begin with in the dataflow graph; it
        draws other random numbers.
        """
        trace, read = self._trace, self._columns(prompts, "generate")
        if read._view.function is not None or "prompt" not in dict(read._view.columns):
            raise script_error(f"{self._name}.generate reads the prompts of the data; {read!r} is not data")
        if not isinstance(options, GenerationOptions):
            raise script_error(
                f"{self._name}.generate needs GenerationOptions, or hyperparameters derived from them, and was given "
                f"a {type(options).__name__}"
            )
        made = Request(model=self._name, method="generate", kind=GENERATE, outputs=("seq", "logprob"), name=name)
        request = trace.named(made)
        keys, prompt = trace.keys(request), View((("prompt", dict(read._view.columns)["prompt"]),))
        settings: dict[str, Any] = {}
        if trace.is_evaluation:
            settings["samples_per_prompt"] = 1
            if options.temperature:
                settings["temperature"] = trace.temperature
        ended = trace.with_end(options)
        config = Generate.by(ended, batch=prompt, outputs=tuple(keys.values()), name=request.name, **settings)
        trace.add(request, config, prompt.keys)
        found = trace.result(request, keys, kept=prompt)
        temperature = options.temperature or 1.0
        origin = dataclasses.replace(found._origin, temperature=temperature, generated_by=config)
        return trace.columns(found._view, origin)

    def logprobs(self, batch: Data, *, key: str = "ref_logprob", per_token: bool = False, name: str = "") -> Columns:
        """Log-probabilities of a rollout's response tokens, at its temperature: the column `key` [response].

        Of `Pairs` the columns `chosen_KEY` and `rejected_KEY`: sums over the tokens of each answer [1], or with
        `per_token` [answer].
        """
        read = self._columns(batch, "logprobs")
        known = dict(read._view.columns)
        is_pairs = "seq" not in known and all(side in known for side in SEQUENCES["pairs"])
        columns = tuple(f"{side}_{key}" for side in SEQUENCES["pairs"]) if is_pairs else (key,)
        request = Request(model=self._name, method="logprobs", kind=INFERENCE, outputs=columns, name=name)
        rows: Rows = "pairs" if is_pairs else "rollout"
        settings = {"rows": rows, "temperature": read._origin.temperature or 1.0, "per_token": per_token}
        return self._infer(request, Logprobs, read, ("prompt", *SEQUENCES[rows]), **settings)

    def distributions(self, rollout: Columns, *, top_k: int = 0, name: str = "") -> Columns:
        """The distributions that a rollout's response tokens are predicted with, at its temperature: the column
        `teacher_logprob` [response, vocab].

        With `top_k` the columns `teacher_logprob` [response, top_k + 1] and `teacher_token` [response, top_k]: of the
        most likely tokens, and of all others together. The model that generated has to have the same vocabulary.
        """
        vocab_size = self._trace.architectures[self._name].vocab_size
        if not 0 <= top_k < vocab_size:
            raise script_error(
                f"{self._name}.distributions: top_k={top_k} must be from 0 (the whole vocabulary) to below "
                f"vocab_size={vocab_size}; give a smaller one"
            )
        columns = ("teacher_logprob", "teacher_token")[: 2 if top_k else 1]
        request = Request(model=self._name, method="distributions", kind=INFERENCE, outputs=columns, name=name)
        read = self._columns(rollout, "distributions")
        settings = {"temperature": read._origin.temperature or 1.0, "top_k": top_k}
        return self._infer(request, Distributions, read, ("prompt", "seq"), **settings)

    def update(
        self,
        batch: Data,
        loss: BoundLoss | LossFunction,
        *,
        also: Sequence[tuple[Data, BoundLoss | LossFunction, float]] = (),
        epochs: int | None = None,
        mini_batches: int | None = None,
        max_kl: float | None = None,
        name: str = "",
    ) -> Any:
        """Trains on `batch`: a rollout, `Examples` or `Pairs`, or what a tensor function made of them. Returns nothing;
        in a live program the statistics (`realhf.live.columns.Report`).

        `also` lists further losses with a coefficient, on rows of their own; each mini-batch makes one optimizer
        step on the sum of all. `epochs` and `max_kl` are by default those of the loss's hyperparameters (see
        `Update`), the number of mini-batches that of the experiment.
        """
        return self._update(
            (batch, loss, 1.0), also, epochs=epochs, mini_batches=mini_batches, max_kl=max_kl, name=name
        )


@dataclass(frozen=True, kw_only=True)
class Teacher(Policy):
    """A language model that others learn from: `--teacher DIR`, which has to be given; `teacher` is the name of the
    parameter."""

    model: Annotated[
        str,
        Common("run directory or Hugging Face checkpoint of the model to learn from", metavar="DIR", group=NEEDED),
        tyro.conf.arg(name=""),
    ] = ""

    def distributions(self, rollout: Columns, *, top_k: int = 0, name: str = "") -> Columns:
        if not self.model:
            raise script_error(f"there is no teacher; give --{self._name} DIR, a model with the student's vocabulary")
        return super().distributions(rollout, top_k=top_k, name=name)


@dataclass(frozen=True, kw_only=True)
class ValueModel(ScriptModel):
    """A model with a scalar head: a value for every token of a response."""

    HEAD: ClassVar[Head] = "scalar"

    def values(self, rollout: Columns, *, key: str = "value", name: str = "") -> Columns:
        """The column `value` [response], of the states that predict the tokens of the response."""
        request = Request(model=self._name, method="values", kind=INFERENCE, outputs=(key,), name=name)
        return self._infer(request, Values, self._columns(rollout, "values"), ("prompt", "seq"))

    def update(
        self,
        batch: Data,
        loss: BoundLoss | LossFunction,
        *,
        epochs: int | None = None,
        mini_batches: int | None = None,
        name: str = "",
    ) -> Any:
        """Trains on `batch`; see `Policy.update`."""
        return self._update((batch, loss, 1.0), epochs=epochs, mini_batches=mini_batches, max_kl=None, name=name)


@dataclass(frozen=True, kw_only=True)
class RewardModel(ValueModel):
    """A model with a scalar head that scores a whole sequence at its last token, or with `per_token` each token of the
    response."""

    per_token: Annotated[bool, tyro.conf.Suppress] = False

    def score(self, rollout: Columns, *, key: str = "reward", name: str = "") -> Columns:
        """The column `reward` [1], or with `per_token` [response]."""
        request = Request(model=self._name, method="score", kind=INFERENCE, outputs=(key,), name=name)
        read = self._columns(rollout, "score")
        mean = "_".join(filter(None, (read._origin.suffix, self._name, "mean")))
        statistics = (mean,) if self._trace.is_evaluation else ()
        needs = ("prompt", "seq") if self.per_token else ("seq",)
        return self._infer(request, Score, read, needs, per_token=self.per_token, statistics=statistics)


def in_reading_order(view: View) -> list[str]:
    """The keys of a view, prompts and sequences first: by the first sequence samples are balanced over ranks."""
    first = [key for name, key in view.columns if name in ("prompt", "seq", "tokens", *SEQUENCES["pairs"])]
    return list(dict.fromkeys((*first, *view.keys)))


@dataclass(frozen=True)
class ModelMethod:
    """See `model_method`."""

    kind: ModelInterfaceType
    outputs: tuple[str, ...]
    function: Named
    protocol: TransferProtocol = THREE_D_PROTO
    uses_model: bool = True
    method: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "method", name)

    def __get__(self, model: ScriptModel | None, owner: type) -> Any:
        return self if model is None else partial(self._call, model)

    def _call(self, model: ScriptModel, /, batch: Data, *arguments: Any, name: str = "", **keywords: Any) -> Columns:
        check_in_script(self.function)
        request = Request(
            model=model._name,
            method=self.method,
            kind=self.kind,
            outputs=self.outputs,
            name=name,
            protocol=self.protocol,
            mini_batches=model._trace.mini_batches if self.kind is TRAIN_STEP else 1,
        )
        read = model._columns(batch, self.method)
        return model._infer(
            request,
            OwnMethod if self.uses_model else OwnRule,
            read,
            [name for name, _ in read._view.columns],
            function=self.function,
            makes=self.outputs,
            arguments=arguments,
            keywords=tuple(keywords.items()),
        )


def model_method(
    kind: ModelInterfaceType,
    *,
    outputs: Sequence[str] = (),
    function: Named | None = None,
    protocol: TransferProtocol = THREE_D_PROTO,
    uses_model: bool = True,
) -> Any:
    """A further method of a model, in a class derived from `Policy`, `ValueModel` or `RewardModel`.

    In a script it is called with columns and any other values, and gives the columns `outputs`. On the workers
    `function(model, batch, context, *values) -> CallResult` runs (`realhf.engine.interface`; a train_step gets the
    list of mini-batches). Used as a decorator it takes the function below it; or `function` is MODULE:NAME of one that
    imports torch. A transfer `protocol` says which device gets which part of the batch (HybridFlow, section 4.1);
    protocols other than 3D_PROTO are for functions with `uses_model=False`.
    """
    made = partial(ModelMethod, kind, tuple(outputs), protocol=protocol, uses_model=uses_model)
    return made if function is None else made(function)
