"""The parts of an experiment: models and how they are trained, data, evaluation, the settings of `@auto`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

from realhf.api.backends import NATIVE, implementation_of
from realhf.architecture.compute import Computation, ComputeConfig, Reproducible
from realhf.architecture.model import DType
from realhf.architecture.transformers_config import BACKEND as TRANSFORMERS
from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, check_fields
from realhf.base.options import TRAINING, Common, Option, Settings
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.interface import Nulls
from realhf.dataflow.pools import Pool

LearningRateSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Settings):
    """AdamW with a linear warm-up, then a schedule over all optimizer steps of the run.

    Its ranges are wide: they refuse values that give only NaN, or no change.
    """

    WHERE = "optimizer: "

    HEADING = TRAINING

    lr: Annotated[float, Common("learning rate after the warm-up", range=(1e-20, 1e3))] = 1e-4
    beta1: Annotated[float, Option("AdamW: decay of the mean of gradients", range=(0, 1 - 1e-9))] = 0.9
    beta2: Annotated[float, Option("AdamW: decay of the mean of their squares", range=(0, 1 - 1e-9))] = 0.95
    eps: Annotated[float, Option("AdamW: added to the root of the mean square", range=(1e-30, 1e3))] = 1e-8
    weight_decay: Annotated[
        float, Option("AdamW: decay of the parameters, times the learning rate", range=(0, 1e3))
    ] = 0.0
    warmup_steps: Annotated[
        int, Option("optimizer steps in which the learning rate rises from 0", range=(0, 10**9))
    ] = 0
    schedule: Annotated[LearningRateSchedule, Option("course of the learning rate after the warm-up")] = "linear"
    final_lr_ratio: Annotated[
        float, Option("learning rate at the end, as a share of the highest (linear, cosine)", range=(0, 1))
    ] = 0.1
    max_grad_norm: Annotated[
        float, Option("gradients of a larger norm are scaled to this one", range=(1e-12, 1e12))
    ] = 1.0
    fp32_gradients: Annotated[
        bool, Option("sum gradients in float32 over micro-batches and ranks, whatever the dtype")
    ] = True
    offload_states: Annotated[
        bool | None, Option("keep optimizer states in host memory between steps (default: as the plan says)")
    ] = None

    def run_with(self, computation: Computation) -> "OptimizerConfig":
        """As it is run: its states lie where the model's computation says."""
        return dataclasses.replace(self, offload_states=computation.offload_states)


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """Where a model's weights come from, and how it is trained.

    checkpoint: a directory that a run wrote (`RUN_DIR/checkpoints/latest/MODEL`), or a Hugging Face checkpoint
        (config.json, safetensors). Without one the weights are random, from the experiment's seed.
    new_head: takes the trunk from the checkpoint and makes a new head (a reward model from a language model).
    with_optimizer: takes the optimizer's states and step from the checkpoint too. Training goes on where it was, with a
        schedule over the steps made and those to come; the data set is read from the beginning.
    backend: a name of `realhf.api.backends`: "native", the engine of this project; "megatron", which has
        megatron-core compute the layers in passes with gradients, on GPUs; "transformers", for models that
        `transformers_model` describes.
    compute: choices that change time and memory, not the result; the plan makes those that are left open.
    follows: makes the parameters of a model that is not trained follow those of a trained one:
        `Follow("actor", eta=0.01, every_steps=1)`.
    reproducible: that of the experiment, which overrides it.
    """

    checkpoint: str | None = None
    new_head: bool = False
    with_optimizer: bool = False
    optimizer: OptimizerConfig | None = None
    dtype: DType = "float32"
    backend: str = NATIVE
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    follows: Follow | None = None
    reproducible: Reproducible = "plan"

    def __post_init__(self) -> None:
        files = ("index.json", "config.json")
        if self.checkpoint is not None and not any((Path(self.checkpoint) / file).is_file() for file in files):
            raise UserError(
                f"checkpoint {self.checkpoint}: neither index.json nor config.json there; give the directory of a "
                "model's checkpoint, which a finished run has under RUN_DIR/checkpoints/latest/MODEL, or that of a "
                "Hugging Face checkpoint"
            )
        if self.with_optimizer and (self.checkpoint is None or self.new_head or self.optimizer is None):
            raise UserError(
                f"with_optimizer=True takes the optimizer's states from a checkpoint of the same model: give "
                f"checkpoint ({self.checkpoint}) and optimizer, without new_head ({self.new_head}), or leave it out"
            )
        implementation_of(self.backend)
        compute = self.compute
        if self.backend == TRANSFORMERS and (compute.sequence_parallel or compute.recomputation not in (None, "off")):
            raise UserError(
                f"backend={TRANSFORMERS!r} knows data_parallel of {self.compute} alone; leave sequence_parallel and "
                "recomputation out"
            )
        if self.compute.data_parallel == "fsdp" and self.backend == "megatron":
            raise UserError(
                "data_parallel='fsdp' gathers parameters for the decoder of this project, and backend='megatron' "
                "computes with another; choose backend='native' or data_parallel='zero1'"
            )


class KeyLengths(NamedTuple):
    """The tokens of a key a row: mean, largest number, and the mean of their squares, which attention grows with."""

    mean: float
    longest: int
    mean_square: float

    @classmethod
    def constant(cls, tokens: int) -> "KeyLengths":
        return cls(float(tokens), tokens, float(tokens) ** 2)


@dataclass(frozen=True, kw_only=True)
class KeyExtent:
    """The tokens of a key over all rows: mean and largest number a row, the mean of their squares, and the largest id;
    with the places of both largest (`FILE, line N`)."""

    mean: float
    mean_square: float
    longest: int
    longest_at: str
    largest: int
    largest_at: str


@dataclass(frozen=True, kw_only=True)
class DatasetExtent:
    """The content of a data set: its rows, its keys that are tokens, and the largest id of its tokenizer.

    Rows that are too long count in `dropped` or, where their prompts are cut, in `truncated`; `rows` has none of the
    dropped. `columns` are those of the file, for whoever reads rows by name, and `nulls` has each of them. `first`: the
    first of the rows by its columns, and the tokens of its keys.
    """

    path: str
    rows: int
    keys: Mapping[str, KeyExtent]
    tokenizer: str
    largest_token: int
    dropped: int = 0
    truncated: int = 0
    columns: tuple[str, ...] = ()
    first: tuple[dict[str, Any], Mapping[str, Sequence[int]]] | None = field(default=None, compare=False, repr=False)
    nulls: Mapping[str, Nulls] = field(default_factory=dict)


@runtime_checkable
class Dataset(Protocol):
    """Rows of per-sample data, read from files that every worker can see. Implementations are in `realhf.data`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that every row has."""

    def check(self) -> DatasetExtent:
        """Reads every line once, on the launcher; returns the content.

        Raises:
            UserError: naming the file, the line and the remedy.
        """

    def lengths(self) -> dict[str, KeyLengths]:
        """The tokens of every key, for the planner. Raises as `check` does."""

    def describe(self) -> str:
        """A line for the user: file, rows, the columns that are read, lengths, what is left out. Raises as `check`."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Calls on held-out rows before the first step, every `every_steps` steps, and after the last step.

    Each call runs in the layout of a call of the same model in the training graph, if possible of the same interface
    type. All rows of `dataset` are evaluated, each once, in batches of at most `batch_size` samples. An experiment has
    one, or several by name, all with one `every_steps`.
    """

    rpcs: Sequence[ModelFunctionCallDef]
    dataset: Dataset
    batch_size: int
    every_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class AutoSettings:
    """The arguments of `@auto`."""

    batch_size: int
    nodelist: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    launcher: str | None = None
    max_steps_in_flight: int = 2
    search_evaluations: int | None = None
    pools: Mapping[str, Pool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size} must be at least 1")
        check_fields("@auto: ", self, {"nodes": DEVICES, "gpus_per_node": DEVICES})


SETTINGS_ATTRIBUTE = "__realhf_auto__"
