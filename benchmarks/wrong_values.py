"""Wrong values that stop nothing: whether digests, as the run goes on, or `realhf verify` afterwards name them.

Each fault is drawn by a seed and strikes a small run once, on two workers: a flipped bit in the weights of the actor,
of the reference, in gradients or in what a call reads; a layer left out; a copy of the actor that keeps the weights of
the step before; a random number key used for two samples; mini-batches in another order; the reward of another sample;
an optimizer step left out. It is seen as it happened if the run ends with an error that names its call and step. Else
`realhf verify` executes the steps once more, and its first difference has to name them. A fault after which no bit that
is kept differs is not counted. A run of many steps without a fault has to raise no alarm.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from lib.common import ROOT, argument_parser, case, finish

sys.path.insert(0, str(ROOT))  # for the launcher of the tests, whose processes start in a second
from lib.value_faults import EXPECTED, Campaign, as_row, drawn

from realhf.lifecycle.verify import VerifyRequest, verify
from tests.e2e.forked import ForkedLauncher

MEASURES = (
    "realhf/lifecycle/verify.py",
    "realhf/master/outputs.py",
    "realhf/master/weights.py",
    "realhf/realloc/execute/checksum.py",
    "realhf/report/differences.py",
    "realhf/rundir/outputs.py",
    "realhf/worker/weights.py",
    "benchmarks/jobs/value_fault_*.py",
    "benchmarks/lib/value_faults.py",
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--clean-steps", type=int, default=1000, metavar="N", help="without a fault (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    arguments = parser.parse_args()
    number, steps = (len(EXPECTED), 20) if arguments.quick else (arguments.faults, arguments.clean_steps)
    with tempfile.TemporaryDirectory(prefix="realhf-values-") as name:
        campaign = Campaign(Path(name), ForkedLauncher)
        seen: Counter[str] = Counter()
        for fault in drawn(number, arguments.seed):
            told = campaign.told(fault)
            seen[told.seen] += 1
            print(json.dumps(as_row(told)), file=sys.stderr, flush=True)
        code, said = campaign.run(Path(name) / "clean", None, "--steps", str(steps))
        assert not code, said
        found = verify(
            VerifyRequest(run_dir=Path(name) / "clean", step=steps, launcher=ForkedLauncher), print_nothing
        ).found
    counted = number - seen["no bit changed"]
    named = seen["as it happened"] + seen["by verify"]
    rows = [
        row("faults named rightly", named, named == counted, target=counted),
        *(row(what, seen[what], True) for what in ("as it happened", "by verify", "no bit changed")),
        row(f"differences in {steps} clean steps", len(found), not found),
    ]
    finish("wrong_values", rows, arguments.json)


def row(name: str, number: int, holds: bool, target: int = 0) -> dict:
    return case(name, number, "", baseline=None, ratio=None, target=target, holds=holds)


def print_nothing(_: str) -> None:
    """What `verify` says on its way."""


if __name__ == "__main__":
    main()
