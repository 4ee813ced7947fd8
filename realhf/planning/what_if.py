"""Hypothetical changes to an experiment, such as larger models and longer sequences, that only a plan needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from realhf.api.computation import open_choices
from realhf.api.experiment import ModelSetup
from realhf.architecture.model import DType
from realhf.architecture.named import architecture
from realhf.base.errors import UserError
from realhf.base.numbers import SAMPLES, STALENESS, TOKENS, check_range
from realhf.base.options import Common, Option, Options
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.planning.model.features import FEATURES, WITHOUT, EngineFeatures, differences, of_setup, with_features
from realhf.planning.model.lengths import LengthDistribution, read_lengths

ROLES = {"actor": ("actor", "reference", "ref"), "critic": ("critic", "reward", "cost")}

# The setting of ReaL's and HybridFlow's measurements, where architectures are replaced and nothing else is said.
DEFAULT_TOKENS = 1024
NO_STALENESS = "0"
WHAT_IF = "what if (the experiment stays as it is; no data set is read)"
DEFAULT_DTYPE: DType = "bfloat16"
_MOST_DIGITS = 20  # that are read of a number: one with more is too large anyway


@dataclass(frozen=True, kw_only=True)
class WhatIf(Options):
    """`model_types` gives model names another architecture; None leaves the experiment's own value.

    `features` are names of `realhf.planning.model.features.FEATURES`: what an engine would have or lack, for all
    models.

    Raises:
        UserError: a number out of its range, or an unknown feature.
    """

    model_types: Mapping[str, str] = field(default_factory=dict)
    HEADING = WHAT_IF

    prompt_tokens: Annotated[
        int | None, Option("length of the prompts (default with other architectures: 1024)", range=TOKENS)
    ] = None
    new_tokens: Annotated[
        int | None, Option("length of the responses (default with other architectures: 1024)", range=TOKENS)
    ] = None
    response_lengths: Annotated[
        Path | None, Option("responses of different lengths: a file with the tokens of one a line, cut at --new-tokens")
    ] = None
    batch_size: Annotated[int | None, Option("samples a step", range=SAMPLES)] = None
    dtype: Annotated[DType | None, Option("dtype of all models (default with other architectures: bfloat16)")] = None
    staleness: int = 0
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("--staleness", self.staleness, *STALENESS)
        with_features(self.features)

    @cached_property
    def responses(self) -> LengthDistribution | None:
        """The distribution of `response_lengths`. Raises UserError if the file has none."""
        return read_lengths(self.response_lengths) if self.response_lengths else None

    @property
    def reads_data(self) -> bool:
        """Whether the lengths of prompts are those of the experiment's data set."""
        return not self.model_types and self.prompt_tokens is None

    def with_defaults(self) -> "WhatIf":
        """Replaced architectures come with the lengths and the dtype of published measurements. Raises UserError as
        `responses`."""
        if not self.model_types:
            return self
        longest = self.responses.longest if self.responses else DEFAULT_TOKENS
        return replace(
            self,
            prompt_tokens=self.prompt_tokens or DEFAULT_TOKENS,
            new_tokens=self.new_tokens or longest,
            dtype=self.dtype or DEFAULT_DTYPE,
        )

    def engine(self, setup: ModelSetup | None = None, *, saves: bool = False) -> EngineFeatures:
        """What the engine in question does for a model of this setup (None: of the default one), in a run that writes
        checkpoints on the way or not."""
        return replace(with_features(self.features, of_setup(setup or ModelSetup())), copies_checkpoints=saves)

    def open_choices(self, setup: ModelSetup) -> tuple[str, ...]:
        """What a plan may choose of the computation of a model of this setup: what neither it nor `features` fixes."""
        named = {FEATURES[name.removeprefix(WITHOUT)][0] for name in self.features}
        return tuple(choice for choice in open_choices(setup) if choice not in named)

    def unlike(self, setups: Iterable[ModelSetup]) -> list[str]:
        """By what that differs from what the engine does for models of these setups, in the command line's names."""
        found = {name: None for setup in setups for name in differences(self.engine(setup), of_setup(setup))}
        return list(found)

    def apply(self, calls: Sequence[ModelFunctionCallDef]) -> list[ModelFunctionCallDef]:
        """The calls with the other architectures under their own heads.

        Raises:
            UserError: no call uses such a model, or an architecture is not known.
        """
        used = list(dict.fromkeys(call.model_name for call in calls if call.model_name))
        for name in self.model_types:
            if name not in used:
                raise UserError(f"--model-type {name}=...: no call uses such a model; there are {', '.join(used)}")
        types = {name: architecture(value) for name, value in self.model_types.items()}
        return [
            replace(call, model_type=types[call.model_name].with_head(call.config.head))
            if call.model_name in types
            else call
            for call in calls
        ]


@dataclass(frozen=True, kw_only=True)
class WhatIfRequest:
    """The words in which somebody asks what a plan would be, beside the options of `WhatIf`; lists are separated by
    commas."""

    HEADING = WHAT_IF

    clusters: Annotated[
        str | None,
        Common(
            "HARDWARE-NODESxDEVICES (h100-16x8) or a .yaml file; several with commas are compared",
            flag="--cluster",
            metavar="NAME",
        ),
    ] = None
    actor: Annotated[
        str | None, Common("architecture of actor and reference (llama3-70b, config.json)", metavar="ARCH")
    ] = None
    critic: Annotated[str | None, Common("architecture of critic and reward model", metavar="ARCH")] = None
    model_types: Annotated[
        tuple[str, ...],
        Common("architecture of one model, before that of its role", flag="--model-type", metavar="NAME=ARCH"),
    ] = ()
    stalenesses: Annotated[
        str,
        Option(
            "rollouts may use weights K updates older; several with commas are compared",
            flag="--staleness",
            metavar="K",
        ),
    ] = NO_STALENESS
    features: Annotated[
        str,
        Option(
            f"plan for an engine with these as well, or with no- before the name without: {', '.join(FEATURES)}",
            metavar="NAMES",
        ),
    ] = ""
    given: WhatIf = field(default_factory=WhatIf)

    def cases(self, calls: Sequence[ModelFunctionCallDef]) -> list[WhatIf]:
        """One for each staleness, in ascending order.

        Raises:
            UserError: a word of another form, or an experiment with these calls has no model of a role.
        """
        try:
            stalenesses = sorted({int(word[:_MOST_DIGITS]) for word in self.stalenesses.split(",")})
        except ValueError:
            raise UserError(f"--staleness {self.stalenesses} must be whole numbers, separated by commas") from None
        features = tuple(name.strip() for name in self.features.split(",") if name.strip())
        case = replace(self.given, model_types=self._model_types(calls), features=features)
        return [replace(case, staleness=staleness) for staleness in stalenesses]

    def _model_types(self, calls: Sequence[ModelFunctionCallDef]) -> dict[str, str]:
        used = list(dict.fromkeys(call.model_name for call in calls if call.model_name))
        types: dict[str, str] = {}
        for role, value in (("actor", self.actor), ("critic", self.critic)):
            if value is None:
                continue
            names = [name for name in used if name in ROLES[role]]
            if not names:
                raise UserError(
                    f"--{role} {value}: no model is named {' or '.join(ROLES[role])}; the experiment has "
                    f"{', '.join(used)}, so give --model-type NAME={value}"
                )
            types |= dict.fromkeys(names, value)
        for pair in self.model_types:
            name, separator, value = pair.partition("=")
            if not (name and separator and value):
                raise UserError(f"--model-type {pair}: write it NAME=ARCHITECTURE, for example {used[0]}=llama3-70b")
            types[name] = value
        return types


def keys_without_producer(calls: Sequence[ModelFunctionCallDef]) -> tuple[str, ...]:
    """The keys that calls read and none of them writes: those of a data set."""
    written = {key for call in calls for key in call.output_data}
    return tuple(dict.fromkeys(key for call in calls for key in call.input_data if key not in written))
