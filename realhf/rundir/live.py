"""The experiment of a live program, which has the calls that the program has made so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.resolved import ResolvedExperiment
from realhf.api.script.functions import load
from realhf.api.script.program import Program, program_class
from realhf.base.code_files import load_program
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.splits import Split
from realhf.rundir.calls_file import ProgramGraph


@dataclass(frozen=True, eq=False)
class LiveExperiment(ResolvedExperiment):
    """`graph` is the program's outline, for which the plan is made; `graphs` has the program's calls.

    calls_file: the file that its calls are written into.
    """

    calls_file: Path = field(kw_only=True)

    @cached_property
    def program(self) -> ProgramGraph:
        return ProgramGraph(self.graph, self.calls_file, reproducible=self.reproducible == "layout")

    @cached_property
    def graphs(self) -> dict[Split, DataflowGraph]:
        return {"train": self.program}


def load_live(file: str, words: Sequence[str], declared: dict[str, str], values: dict[str, Any]) -> Program:
    """The declarations of a program as another process has made them; loads the program's functions from its `file`
    ("" for none), whose command line has `words`. `declared` has by name the class of each declaration. Raises
    UserError."""
    if file:
        load_program(file, words)
    cls = program_class({name: load(kind) for name, kind in declared.items()}, 1)
    made: Program = msgspec.convert(values, type=cls)
    return made
