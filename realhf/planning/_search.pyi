"""Types of the C++ module (csrc/search/bindings.cpp)."""

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, overload

class Evaluation(TypedDict):
    step_time: float
    peak_bytes: float
    feasible: bool
    cost: float

class Solution(TypedDict):
    choice: list[int]
    step_s: float
    peak_bytes: float
    feasible: bool
    cost: float
    lower_bound_s: float
    proven: bool
    all_evaluations: int
    full_evaluations: int
    early_rejections: int
    trace: list[tuple[float, float]]

class Progress:
    @property
    def evaluations(self) -> int: ...
    @property
    def cost(self) -> float: ...
    def stop(self) -> None: ...

class Problem:
    def __init__(self, tables: dict[str, Any]) -> None: ...
    def evaluate(self, plan: Sequence[int]) -> Evaluation: ...
    def trace(
        self, plan: Sequence[int], steps: int, order: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, float, float, list[int]]]: ...
    def device_needs(self, plan: Sequence[int]) -> list[tuple[float, float, float]]: ...
    def solve(
        self,
        *,
        seed: int,
        evaluations: int,
        seconds: float,
        threads: int,
        single_moves: bool,
        proves: bool,
        starts: Sequence[Sequence[int]],
        progress: Progress,
    ) -> Solution: ...
    def lower_bound(self, chosen: Sequence[int], limit: float = ...) -> float: ...
    def smallest_plan(self, seed: int) -> list[int]: ...

LayoutRow = tuple[int, int, int, int, int, int, int]

class Table:
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, place: int) -> float: ...
    @overload
    def __getitem__(self, places: slice) -> list[float]: ...
    def __setitem__(self, place: int, number: float) -> None: ...
    def __iter__(self) -> Iterator[float]: ...
    def divide(self, by: float) -> None: ...

def reallocation_table(
    sizes: dict[str, Any],
    sources: Sequence[LayoutRow],
    targets: Sequence[LayoutRow],
    *,
    within_node: tuple[float, float],
    across_nodes: tuple[float, float],
    devices_per_node: int,
    most_sent: int,
    threads: int,
) -> Table: ...

class OsdpSolution(TypedDict):
    feasible: bool
    batch: int
    step_s: float
    lower_bound_s: float
    proven: bool
    cuts: list[int]
    slices: list[list[int]]
    smallest_fixed_bytes: int
    states: int

MOST_SLICES: int

def solve_osdp(
    operators: Sequence[Sequence[tuple[int, int, Sequence[tuple[float, int, bool]]]]],
    memory_bytes: int,
    bytes_per_sample: int = 0,
    seconds_per_sample: float = 0.0,
    min_batch: int = 1,
    max_batch: int = 1,
    time_limit_s: float = 1.0,
) -> OsdpSolution: ...
