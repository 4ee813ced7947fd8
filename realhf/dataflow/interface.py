"""How an experiment names the code of an algorithm without importing it.

The launcher, the planner and the master never import torch. An experiment therefore lists `InterfaceConfig` objects,
which only name the implementation; the model workers load it.
"""

import ast
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from realhf.base.errors import UserError

# The dtypes of per-sample tensors: outputs of calls, which are stored and sent to other workers.
SampleDType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]

# The fields of every line of metrics.jsonl; no statistic may have one of these names.
RESERVED_STATISTICS = frozenset(
    {"step", "time_s", "tokens", "tokens_per_s", "calls", "peak_bytes", "of_steps", "num_workers", "plan"}
)


@dataclass(frozen=True)
class Nulls:
    """The rows of a data set in which a column is null or missing, and the place of the first one ("" without any)."""

    rows: int
    of_rows: int
    first_at: str


# Statistic of a generate call whose KV cache has a given room: sequences that lost their place, on a rank on average.
PREEMPTIONS = "preemptions"


@dataclass(frozen=True, kw_only=True)
class InterfaceConfig:
    """The settings of an interface; subclass it, add fields, and name the implementation.

    `implementation` is `module:Class`, where the module is an installed one or a file beside the
    experiment's (`my_reward:MyReward` for my_reward.py). The class is made once per call on every
    worker of the call's mesh with this configuration as its only argument, and has one or more of
    the methods `generate`, `inference` and `train_step` (see `realhf.engine.interface`).
    """

    implementation: ClassVar[str]

    recordable: ClassVar[tuple[str, ...]] = ()
    """Further outputs that its calls can make if the run records them (`--record`)."""

    uses_model: ClassVar[bool] = True
    """Whether its methods use the model. False is for rules over the data alone: its calls may have any transfer
    protocol (`ModelFunctionCallDef.protocol`), and the planner counts no pass through the model for them."""

    runs_beside: ClassVar[bool] = False
    """Whether its calls run on the host's processors beside the calls of the devices: for rules that wait for other
    programs or compute on texts. Such a configuration has `uses_model = False`, and its calls have no model."""

    @property
    def read_files(self) -> tuple[str, ...]:
        """Files of the user's that its calls read, such as functions; a run does not go on with others than it began
        with. A property of that name overrides it."""
        return ()

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        """For the planner: the input keys whose tokens the model reads; empty: a prompt and its response. A class
        attribute or a property of that name overrides it."""
        return ()

    @property
    def epochs(self) -> int:
        """How often its train_step goes through the mini-batches of a step; a field or a property of that name
        overrides it. The learning rate's schedule and the planner count `mini_batches` x `epochs` optimizer steps."""
        return 1

    @property
    def samples_per_prompt(self) -> int:
        """How many responses its generate makes for each prompt; a field or a property of that name overrides it."""
        return 1

    @property
    def seconds_per_sample(self) -> float:
        """For the planner, of a call that runs beside the devices: how long one process works on a sample. A field
        (with a default) or a property of that name overrides it."""
        return 0.0

    @property
    def processes_per_worker(self) -> int:
        """For the planner, of a call that runs beside the devices: on how many samples a worker works at once. A field
        (with a default) or a property of that name overrides it."""
        return 1

    def computed_samples(self, samples: int, dp: int, mini_batches: int) -> int:
        """How many of the `samples` that each of `dp` data-parallel ranks has of a mini-batch train_step computes at
        once, as many as the rank with the most is expected to have in the loss. A rank that has more computes them in
        further micro-batches. A method of that name overrides it."""
        return samples

    def wide_bytes(self, key: str, vocab_size: int) -> int:
        """For the planner: bytes of a response token in the output `key` where it has many numbers for each, as a
        distribution over the vocabulary does; 0: it has one number. A method of that name overrides it."""
        return 0

    def check_columns(self, columns: Collection[str]) -> None:
        """On the launcher, before a process starts: whether the columns that the rows of the data set have are those
        that its calls read by name (`Context.rows`). Raises UserError."""

    def check_row(self, row: dict[str, Any], tokens: Mapping[str, Sequence[int]]) -> None:
        """On the launcher, before a process starts: whether its calls can work with the first row of the training data,
        by its columns; `tokens` are those of the data set's keys. Raises UserError."""

    def check_nulls(self, nulls: Mapping[str, Nulls]) -> None:
        """As `check_columns`, by column: whether its calls can do with the rows that have no value there."""


def check_implementation(call: str, config: InterfaceConfig, method: str) -> None:
    """Looks for the class that implements `config` and for its `method`, without importing the module.

    If the source does not show them (a compiled module, an imported class), errors are found when the workers start.

    Raises:
        UserError: `implementation` is no `module:Class`, or there is no such module, class or method.
    """
    name, implementation = type(config).__name__, getattr(config, "implementation", None)
    module, _, cls = str(implementation).partition(":")
    if not (module and cls):
        raise UserError(
            f"{call}: {name} has implementation={implementation!r}; give it the class attribute "
            'implementation: ClassVar[str] = "module:Class"'
        )
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a package above it
        found = None
    if found is None:
        raise UserError(
            f"{call}: {name} is implemented in a module {module!r}, which is not there; put the file "
            f"{module.rpartition('.')[2]}.py beside the experiment's, or install the package"
        )
    if not (found.origin and found.origin.endswith(".py")):
        return
    tree = source_tree(call, found.origin)
    bound = bound_names(tree)
    if bound & ANY_NAME:
        return
    classes = {statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef)}
    if cls not in bound:
        raise UserError(lacks_class(call, config, found.origin, classes))
    if cls in classes and f".{method}" not in bound and not _may_have(method, cls, classes):
        raise UserError(lacks_method(call, config, found.origin, method))


def lacks_class(call: str, config: InterfaceConfig, file: str | None, classes: Collection[str]) -> str:
    """The error for a module that lacks the class of `config`."""
    name, cls = type(config).__name__, type(config).implementation.partition(":")[2]
    return (
        f"{call}: {name} is implemented by {cls!r} in {file}, which has no such class; it has "
        f"{', '.join(sorted(classes)) or 'none'}; correct {name}.implementation"
    )


def lacks_method(call: str, config: InterfaceConfig, file: str | None, method: str) -> str:
    """The error for a class without the method that its call needs."""
    cls = type(config).implementation.partition(":")[2]
    return f"{call}: {cls} in {file} has no method {method}, which the call's interface_type needs; define it"


def source_tree(what: str, file: str) -> ast.Module:
    """The syntax tree of a module's source. Raises UserError, which begins with `what`: it cannot be imported."""
    try:
        return ast.parse(Path(file).read_bytes())
    except SyntaxError as error:
        raise UserError(f"{what}: {file}:{error.lineno}: cannot be imported: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {file}: cannot be imported: {type(error).__name__}: {error}") from None


# A module that uses one of these may have names that its source does not show.
ANY_NAME = {"*", "__getattr__", "globals", "setattr", "exec"}


def bound_names(tree: ast.AST) -> set[str]:
    """All names that a piece of source binds anywhere (`.NAME` for an attribute), and the uses in it of `ANY_NAME`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(f".{name}")
            case ast.Name(id=name) if name in ANY_NAME:
                names.add(name)
    return names


def _may_have(method: str, cls: str, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a class of the module may have a method: it or its bases bind the name, or come from elsewhere.

    Decorators and metaclasses may add any name.
    """
    if cls not in classes:
        return cls != "object"
    definition = classes[cls]
    if definition.decorator_list or definition.keywords or method in bound_names(definition):
        return True
    others = {name: found for name, found in classes.items() if name != cls}
    return any(not isinstance(base, ast.Name) or _may_have(method, base.id, others) for base in definition.bases)
