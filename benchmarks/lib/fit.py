"""Measured step times of a cluster, the cost model's residuals on them, and the constants that fit them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

import msgspec
import numpy as np

from realhf.architecture.model import DType
from realhf.base.code_files import load_code_file
from realhf.base.files import decode_yaml, read_file
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.interface import InterfaceConfig
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.call import CallModel, features_during
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.timings import Timings
from realhf.planning.model.workload import Workload

_NUDGE = 1e-4  # of a logarithm, for slopes
_DAMPING, _DAMPING_STEP = 1e-2, 5  # of Levenberg's first step, and what it is changed by
_SMALL_STEP, _MOST_STEPS = 1e-7, 60  # of logarithms: the end
_LEAST_VARIANCE = 1e-12


def calibration_script() -> ModuleType:
    """`scripts/calibrate_cost_model.py` as a module."""
    return load_code_file(Path(__file__).parents[2] / "scripts" / "calibrate_cost_model.py")


class MeasuredCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row: seconds of one call. `micro_batches` are per pipeline stage; a strategy is given if not the table's."""

    call: str
    model_type: str
    interface: ModelInterfaceType
    micro_batches: int
    seconds: float
    cuda_graphs: bool = False
    strategy: ParallelStrategy | None = None

    def __str__(self) -> str:
        if self.interface is not GENERATE:
            return self.call
        return f"{self.call}, {'CUDA graphs' if self.cuda_graphs else 'eager'}"


class MeasuredTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls that were measured on one cluster, by default with one strategy on all devices; `step_s`: whole steps of
    calls that ran one after the other. Micro-batches are ReaL's: an inference or a generation runs the pipeline anew
    for each of `micro_batches`, with one a stage (`EngineFeatures.drains_pipelines`)."""

    name: str
    nodes: int
    devices_per_node: int
    dp: int
    tp: int
    pp: int
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    mini_batches: int
    dtype: DType
    features: EngineFeatures
    calls: tuple[MeasuredCall, ...]
    step_s: dict[Literal["graphs", "eager"], float] = {}

    def strategy(self, row: MeasuredCall) -> ParallelStrategy:
        return row.strategy or ParallelStrategy(self.dp, self.tp, self.pp)

    def in_flight(self, row: MeasuredCall) -> int:
        """Micro-batches of a data-parallel rank: those per stage x pp, twice that in pipelined training."""
        pp = self.strategy(row).pp
        return row.micro_batches * pp * (2 if row.interface is TRAIN_STEP and pp > 1 else 1)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A measured and a predicted time. `error` is predicted / measured - 1."""

    table: str
    row: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Constant:
    """A number of the description that is fitted: within bounds, and near `prior` where the rows leave it open. `name`:
    a field, or `matmul_flops[DTYPE]`. `spread`: exp of the standard deviation of the number's logarithm. `why`: where
    the prior comes from."""

    name: str
    prior: float
    low: float
    high: float
    why: str
    spread: float = 2.0

    def get(self, hardware: Hardware) -> float:
        return hardware.constant(self.name)

    def put(self, hardware: Hardware, value: float) -> Hardware:
        return hardware.with_constants({self.name: value})


@dataclass(frozen=True)
class Fitted:
    """The most probable constants, in `hardware`, and the covariance [constants, constants] of their logarithms:
    Laplace's approximation, the inverse of the least squares' normal matrix at the optimum."""

    hardware: Hardware
    covariance: np.ndarray


def load_tables(path: str | Path) -> list[MeasuredTable]:
    """Reads measured tables. Raises UserError if the file is missing or no list of tables; the text names the field."""
    kind, remedy = "list of measured tables", "give a file such as tests/data/published_step_times.yaml"
    return read_file(path, lambda data: decode_yaml(data, list[MeasuredTable]), kind, remedy)


@dataclass(frozen=True, kw_only=True)
class _NoInterface(InterfaceConfig):
    """A measured call has no implementation here."""

    implementation: ClassVar[str] = "measured:elsewhere"


def predict_s(table: MeasuredTable, row: MeasuredCall, hardware: Hardware) -> float:
    """Seconds of a row's call by the analytic model."""
    call = ModelFunctionCallDef(
        model_name=row.call,
        model_type=row.model_type,
        interface_type=row.interface,
        interface_impl=_NoInterface(),
        mini_batches=table.mini_batches if row.interface is TRAIN_STEP else 1,
    )
    lengths = Workload(prompt_tokens=table.prompt_tokens, new_tokens=table.new_tokens)
    engine = replace(table.features, cuda_graphs=row.cuda_graphs, drains_pipelines=True).on(hardware)
    features = features_during(call, lengths, engine)
    taken = CallModel(
        call=call,
        samples=call.mini_batch_size(table.batch_size),
        lengths=lengths,
        dtype=table.dtype,
        features=features,
        timings=Timings(model=call.config, dtype=table.dtype, hardware=hardware, features=features),
        cluster=Cluster(num_nodes=table.nodes, devices_per_node=table.devices_per_node, hardware=hardware),
        hardware=hardware,
    )
    return taken.seconds(table.strategy(row), table.in_flight(row))


def residuals(tables: Sequence[MeasuredTable], hardware: Hardware) -> list[Residual]:
    """Every row of every table."""
    return [
        Residual(table=table.name, row=str(row), measured_s=row.seconds, predicted_s=predict_s(table, row, hardware))
        for table in tables
        for row in table.calls
    ]


def step_residuals(tables: Sequence[MeasuredTable], hardware: Hardware) -> list[Residual]:
    """Whole steps, against the sum of the predicted calls: they run one after the other on the same devices."""
    result = []
    for table in tables:
        for mode, measured_s in table.step_s.items():
            rows = [row for row in table.calls if row.interface != GENERATE or row.cuda_graphs == (mode == "graphs")]
            predicted_s = sum(predict_s(table, row, hardware) for row in rows)
            row = f"whole step, {mode}"
            result.append(Residual(table=table.name, row=row, measured_s=measured_s, predicted_s=predicted_s))
    return result


def mean_error(rows: Sequence[Residual]) -> float:
    return sum(abs(row.error) for row in rows) / len(rows)


def worst_error(rows: Sequence[Residual]) -> float:
    return max(abs(row.error) for row in rows)


def fit(
    tables: Sequence[MeasuredTable],
    hardware: Hardware,
    constants: Sequence[Constant],
    *,
    row_error: float = 0.08,
    iterations: int = _MOST_STEPS,
) -> Fitted:
    """The constants that fit the rows best; the same for the same input.

    The most probable ones, if a row's logarithm is off by `row_error` and a constant's by log(spread) from its prior
    (standard deviations): least squares by Gauss-Newton steps with Levenberg's damping, clipped to the bounds.
    """
    low, high, prior = (np.log([getattr(c, name) for c in constants]) for name in ("low", "high", "prior"))
    spread = np.log([c.spread for c in constants])

    def described(x: np.ndarray) -> Hardware:
        values = map(float, np.exp(x))
        return hardware.with_constants({c.name: value for c, value in zip(constants, values, strict=True)})

    def misfit(x: np.ndarray) -> np.ndarray:
        return np.concatenate([log_errors(tables, described(x)) / row_error, (x - prior) / spread])

    def slopes(x: np.ndarray, at_x: np.ndarray) -> np.ndarray:
        nudged = np.eye(len(x)) * _NUDGE
        return np.stack([(misfit(x + d) - at_x) / _NUDGE for d in nudged], axis=1)  # [rows + constants, constants]

    x, damping = np.clip(prior, low, high), _DAMPING
    now = misfit(x)
    for _ in range(iterations):
        jacobian = slopes(x, now)
        slope = jacobian.T @ now
        # A constant that its bound holds stays there.
        free = ~(((x <= low) & (slope > 0)) | ((x >= high) & (slope < 0)))
        normal = jacobian.T @ jacobian
        step = np.zeros_like(x)
        regular = normal[np.ix_(free, free)] + damping * np.diag(np.diag(normal)[free])
        step[free] = -np.linalg.solve(regular, slope[free])
        candidate = np.clip(x + step, low, high)
        then = misfit(candidate)
        if then @ then < now @ now:
            x, now, damping = candidate, then, damping / _DAMPING_STEP
        else:
            damping *= _DAMPING_STEP
        if np.abs(step).max() < _SMALL_STEP:
            break
    jacobian = slopes(x, now)
    return Fitted(described(x), np.linalg.inv(jacobian.T @ jacobian))


def log_errors(tables: Sequence[MeasuredTable], hardware: Hardware) -> np.ndarray:
    """Of every row log(predicted / measured), [rows]."""
    return np.array([math.log(row.predicted_s / row.measured_s) for row in residuals(tables, hardware)])


def error_beyond_constants(
    held_out: MeasuredTable, fitted: Fitted, constants: Sequence[Constant]
) -> tuple[np.ndarray, np.ndarray]:
    """(log errors [rows], their standard deviations [rows] as far as the constants' spread explains them) on a table
    that the constants were not fitted to."""
    tables, hardware = [held_out], fitted.hardware
    errors = log_errors(tables, hardware)
    slopes = [
        (log_errors(tables, c.put(hardware, c.get(hardware) * math.exp(_NUDGE))) - errors) / _NUDGE for c in constants
    ]
    jacobian = np.stack(slopes, axis=1)  # [rows, constants]
    return errors, np.sqrt(np.einsum("rc,cd,rd->r", jacobian, fitted.covariance, jacobian))


def call_error(errors: np.ndarray, explained: np.ndarray) -> float:
    """The most probable standard deviation of what errors [rows] have beside the `explained` one: normal, independent,
    of mean 0, looked for from 0 to 1 in steps of 0.001."""
    candidates = np.arange(1000)[:, None] / 1000
    variance = explained**2 + candidates**2 + _LEAST_VARIANCE  # [candidates, rows]
    surprise = (errors**2 / variance + np.log(variance)).sum(1)  # twice the negative logarithm of the likelihood
    return float(candidates[surprise.argmin(), 0])
