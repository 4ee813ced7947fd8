"""Executes a step of a run once more on this machine, from the nearest checkpoint before it, and compares what the
run recorded: the weights of every call, its outputs, statistics, optimizer states. Names the first thing that differs.
Changes nothing in the run.

examples:
  realhf verify runs/mine --step 12
  realhf verify runs/mine --step 12 --num-workers 1 --tolerance 1e-4
  realhf verify runs/mine --step 12 --call actor_generate --dump generated
"""

import argparse
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, check_range
from realhf.cli.output import Output, wide_output
from realhf.lifecycle.verify import Verdict, VerifyRequest, verify
from realhf.rundir.run import MAX_STEPS

MOST_SHOWN = 10


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")
    command.add_argument("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    command.add_argument("--plan", type=Path, help="execute it under this plan.json (default: under its own)")
    command.add_argument("--num-workers", type=int, metavar="M", help="execute it on M workers, under a plan for them")
    command.add_argument("--call", default="", metavar="C", help="compare this call alone, such as actor_generate")
    command.add_argument("--dump", type=Path, metavar="DIR", help="write the inputs and outputs of --call in the step")
    command.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="numbers may differ by X, relative to the larger one and 1; digests are not compared then (default 0)",
    )


def execute(arguments: argparse.Namespace) -> int:
    check_range("--step", arguments.step, 1, MAX_STEPS, "steps")
    check_range("--tolerance", arguments.tolerance, 0, 1, "")
    if arguments.num_workers is not None:
        check_range("--num-workers", arguments.num_workers, *DEVICES, "workers")
    if arguments.dump is not None:
        if not arguments.call:
            raise UserError(f"--dump {arguments.dump} writes what one call reads and makes; name it with --call")
        if arguments.dump.exists() and (not arguments.dump.is_dir() or any(arguments.dump.iterdir())):
            raise UserError(f"--dump {arguments.dump} exists and is not empty; give a new folder")
    request = VerifyRequest(
        run_dir=arguments.run_dir,
        step=arguments.step,
        plan=arguments.plan,
        num_workers=arguments.num_workers,
        tolerance=arguments.tolerance,
        call=arguments.call,
        dump=arguments.dump,
    )
    verdict = verify(request, Output(stderr=True).say)
    out = wide_output()
    for line in told(verdict, request):
        out.say(line)
    return 1 if verdict.found else 0


def told(verdict: Verdict, request: VerifyRequest) -> list[str]:
    """The verdict for people."""
    steps = f"step {request.step}" if verdict.compared == 1 else f"steps {verdict.first} to {request.step}"
    if not verdict.found:
        lines = [f"{steps}: nothing differs" + (f" by more than {request.tolerance:g}" if request.tolerance else "")]
    else:
        more = len(verdict.found) - MOST_SHOWN
        lines = [*map(str, verdict.found[:MOST_SHOWN]), *([f"and {more} more in this step"] if more > 0 else [])]
    if verdict.largest and (request.tolerance or not verdict.found):
        lines.append(f"the largest difference of numbers: {verdict.largest}")
    return lines
