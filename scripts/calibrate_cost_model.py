"""Fits the constants of a GPU's description to published step times and prints what is left unexplained.

python scripts/calibrate_cost_model.py            # fit and print; change nothing
python scripts/calibrate_cost_model.py --write    # also write the constants to the description of h100
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import structs

from realhf.planning.model.descriptions import DESCRIPTIONS, load_hardware
from realhf.planning.model.gaussian import of_covariance
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.uncertainty import Uncertainty, place_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # where the fit is
from lib.fit import (  # noqa: E402
    Constant,
    Fitted,
    MeasuredTable,
    Residual,
    call_error,
    error_beyond_constants,
    fit,
    load_tables,
    mean_error,
    residuals,
    step_residuals,
    worst_error,
)

TABLES = ROOT / "tests" / "data" / "published_step_times.yaml"

# An H100 SXM has peaks of 989 TFLOP/s bf16, 3.35 TB/s and 450 GB/s of NVLink a direction (data sheet); it has a
# 400 Gb/s network link. The priors come from other sources than the tables: "spread" is how far a source is trusted.
CONSTANTS = [
    Constant("matmul_flops[bfloat16]", 700e12, 400e12, 800e12, "of a large product; 780 were published for a tuned one "
             "(gist Chillee/2ec89696)", spread=1.12),
    Constant("memory_bandwidth", 2.9e12, 2.0e12, 3.2e12, "copies reach 85 to 92 % of peak", spread=1.08),
    Constant("intra_node_bandwidth", 330e9, 100e9, 400e9, "rings of NCCL reach 370 GB/s with very large messages "
             "(nccl-tests issue 212)", spread=1.25),
    Constant("inter_node_bandwidth", 44e9, 15e9, 48e9, "collectives reach 46 to 48 GB/s a link (nccl-tests issue 290)",
             spread=1.15),
    Constant("inter_node_send_bandwidth", 40e9, 4e9, 50e9, "single large messages reach 73 to 97 % of a link "
             "(NVIDIA/nccl issue 1272: 18.3 and 24.2 of 25 GB/s)", spread=1.3),
    Constant("intra_node_latency_s", 2e-6, 5e-7, 1e-5, "of a hop; a ring of 8 has 14", spread=1.5),
    Constant("inter_node_latency_s", 1.5e-5, 4e-6, 5e-5, "of a hop; small messages take 30 us there and back",
             spread=1.5),
    Constant("host_bandwidth", 50e9, 20e9, 60e9, "pinned copies over 16 lanes of PCIe 5 reach 50 to 56 of 64 GB/s; no "
             "table moves anything there, so the fit leaves it", spread=1.2),
    Constant("layer_launch_s", 3e-4, 5e-5, 2e-3, "some 40 kernels of 4 to 20 us each", spread=1.7),
    Constant("train_launch_s", 3e-4, 5e-5, 2e-3, "the same, and autograd's records", spread=1.7),
    Constant("decode_launch_s", 4e-4, 5e-5, 2e-3, "the same, with the work on the cache", spread=1.7),
    Constant("decode_graph_launch_s", 1.2e-4, 2e-5, 4e-4, "some 40 kernels of 1 to 5 us on the device", spread=1.7),
    Constant("sampling_s", 1e-3, 1e-4, 5e-3, "host and some passes over the logits of a step", spread=2.0),
    Constant("mini_batch_s", 0.03, 1e-3, 1.0, "packing and statistics of 32 samples a device on the host", spread=1.3),
    Constant("call_overhead_s", 0.3, 0.01, 10.0, "packing, moving and unpacking a batch; messages. Nothing is "
             "published", spread=4.0),
]  # fmt: skip
# Two measurements of one call differ by as much: log(7.3 / 6.8) / sqrt(2), the reward's and the critic's inference of
# the second table.
LEAST_CALL_ERROR = 0.05
UNCERTAINTY = "uncertainty:\n"
DIGITS = 3  # of spreads and correlations


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="write the fitted constants to the description")
    mode.add_argument("--check", action="store_true", help="fit nothing; residuals of the description as it is")
    parser.add_argument("--tables", type=Path, default=TABLES, help="measured tables (YAML)")
    parser.add_argument("--hardware", default="h100", help="the description that is fitted")
    options = parser.parse_args(arguments)
    tables = load_tables(options.tables)
    hardware = load_hardware(options.hardware)
    fitted = hardware if options.check else calibrated(tables, hardware)
    print_constants(fitted)
    print("nothing fitted" if options.check else "the tables that were fitted, no evidence of the model's accuracy:")
    print_residuals(residuals(tables, fitted) + step_residuals(tables, fitted))
    print_errors("calls", residuals(tables, fitted))
    if options.check:
        return 0
    for held_out in tables if len(tables) > 1 else []:
        rest = [table for table in tables if table is not held_out]
        rows = held_out_residuals(held_out, rest, hardware)
        print_residuals(rows)
        print_errors(f"calls of {held_out.name}, fitted without them", rows)
    if options.write:
        path = DESCRIPTIONS / f"{options.hardware}.yaml"
        path.write_text(with_constants(path.read_text(), fitted))
        print(f"written: {path.relative_to(ROOT)}")
    return 0


def calibrated(tables: Sequence[MeasuredTable], hardware: Hardware) -> Hardware:
    """With the constants that fit all tables, how sure they are, and the error that tables which were left out show
    beside, at least `LEAST_CALL_ERROR` (with one table: the description's). Numbers are rounded as they are written."""
    found = fit(tables, hardware, CONSTANTS)
    stated = hardware.sureness
    left_out = [error_beyond_constants(t, _without(t, tables, hardware), CONSTANTS) for t in tables]
    error = stated.call_error
    if len(tables) > 1:
        error = max(LEAST_CALL_ERROR, call_error(*(np.concatenate(each) for each in zip(*left_out, strict=True))))
    exact = of_covariance([constant.name for constant in CONSTANTS], found.covariance)
    uncertainty = Uncertainty(
        spread={name: round(value, DIGITS) for name, value in exact.spread.items()},
        correlation=tuple(tuple(round(value, DIGITS) + 0.0 for value in row) for row in exact.correlation),  # no -0.0
        call_error=error,
        profiled_error=stated.profiled_error,
    )
    return structs.replace(rounded(found.hardware), uncertainty=uncertainty)


def held_out_residuals(held_out: MeasuredTable, rest: Sequence[MeasuredTable], hardware: Hardware) -> list[Residual]:
    """A table's residuals, calls and whole steps, under constants that were fitted to the others."""
    fitted = fit(rest, hardware, CONSTANTS).hardware
    return residuals([held_out], fitted) + step_residuals([held_out], fitted)


def _without(table: MeasuredTable, tables: Sequence[MeasuredTable], hardware: Hardware) -> Fitted:
    return fit([other for other in tables if other is not table], hardware, CONSTANTS)


def rounded(hardware: Hardware) -> Hardware:
    """Three digits: what is written is what was judged."""
    for constant in CONSTANTS:
        hardware = constant.put(hardware, float(f"{constant.get(hardware):.2e}"))
    return hardware


def print_constants(hardware: Hardware) -> None:
    sure = hardware.sureness
    print(f"| {'constant':25} | {'value':8} | +- % | {'prior':8} | +- % | prior from |\n|---|---|---|---|---|---|")
    for c in CONSTANTS:
        spread, before = 100 * sure.spread.get(c.name, 0.0), 100 * math.log(c.spread)
        print(f"| {c.name:25} | {c.get(hardware):.2e} | {spread:4.0f} | {c.prior:.1e}  | {before:4.0f} | {c.why} |")
    print(f"a call beyond its constants: +- {sure.call_error:.1%}")


def print_residuals(rows: Sequence[Residual]) -> None:
    print(f"\n| {'table':18} | {'call':27} | measured s | predicted s | error |\n|---|---|---|---|---|")
    for r in rows:
        print(f"| {r.table:18} | {r.row:27} | {r.measured_s:10.1f} | {r.predicted_s:11.1f} | {r.error:+5.0%} |")
    print()


def print_errors(name: str, rows: Sequence[Residual]) -> None:
    print(f"{name}: mean {mean_error(rows):.1%}, worst {worst_error(rows):.1%}")


def with_constants(text: str, hardware: Hardware) -> str:
    """The description's text with the fitted numbers in the places of the old ones, and its end, how sure they are."""
    for constant in CONSTANTS:
        text = _with_number(text, constant, constant.get(hardware))
    sure = hardware.sureness
    lines = [f"  spread: {{{', '.join(f'{name!r}: {value:g}' for name, value in sure.spread.items())}}}"]
    lines += ["  correlation:", *(f"  - [{', '.join(f'{v:g}' for v in row)}]" for row in sure.correlation)]
    lines += [f"  call_error: {sure.call_error:g}", f"  profiled_error: {sure.profiled_error:g}"]
    return text.partition(UNCERTAINTY)[0] + "\n".join([UNCERTAINTY.strip(), *lines, ""])


def _with_number(text: str, constant: Constant, value: float) -> str:
    field, dtype = place_of(constant.name)
    pattern = rf"^({field}: .*?\b{dtype}: )[^,}}]+" if dtype else rf"^({field}: )\S+"
    text, count = re.subn(pattern, lambda match: f"{match[1]}{_yaml_number(value)}", text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{constant.name} stands {count} times in the description")
    return text


def _yaml_number(value: float) -> str:
    """Scientific notation with a point and a sign, which is what YAML 1.1 takes for a number."""
    return f"{value:.2e}"


if __name__ == "__main__":
    raise SystemExit(main())
