"""Fits the constants of a GPU's description to published step times and prints what is left unexplained.

python scripts/calibrate_cost_model.py            # fit and print; change nothing
python scripts/calibrate_cost_model.py --write    # also write the constants to the description of h100
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from realhf.planning.model.descriptions import DESCRIPTIONS, load_hardware
from realhf.planning.model.fit import (
    Constant,
    MeasuredTable,
    Residual,
    fit,
    load_tables,
    mean_error,
    residuals,
    step_residuals,
    worst_error,
)
from realhf.planning.model.hardware import Hardware

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "data" / "published_step_times.yaml"

# Peaks of an H100 SXM (vendor's data sheet): 989 TFLOP/s bf16, 3.35 TB/s, 450 GB/s of NVLink and, in
# the machines measured, a 400 Gb/s network link a device and direction.
CONSTANTS = [
    Constant("matmul_flops[bfloat16]", 500e12, 250e12, 750e12, "25 to 76 % of peak; large products of "
             "cuBLAS reach 70 %", spread=1.3),
    Constant("memory_bandwidth", 2.6e12, 1.6e12, 3.1e12, "48 to 93 % of peak; copies reach 90 %", spread=1.2),
    Constant("intra_node_bandwidth", 300e9, 100e9, 400e9, "NVLink: rings of NCCL reach 80 % of peak", spread=1.5),
    Constant("inter_node_bandwidth", 20e9, 5e9, 48e9, "the network: at most 96 % of peak; a point-to-point "
             "message on few channels reaches half", spread=1.7),
    Constant("layer_launch_s", 3e-4, 5e-5, 1e-3, "some 40 kernels of 3 to 20 us"),
    Constant("decode_launch_s", 4e-4, 5e-5, 1e-3, "the same, with the work on the cache"),
    Constant("decode_graph_launch_s", 8e-5, 2e-5, 3e-4, "some 40 kernels of 1 to 5 us each on the device"),
    Constant("sampling_s", 1e-3, 1e-4, 5e-3, "host and some passes over the logits of a step"),
    Constant("call_overhead_s", 0.3, 0.01, 2.0, "packing, moving and unpacking a batch; messages", spread=3.0),
]  # fmt: skip


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
    fitted = hardware if options.check else rounded(fit(tables, hardware, CONSTANTS))
    print_constants(fitted)
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


def held_out_residuals(held_out: MeasuredTable, rest: Sequence[MeasuredTable], hardware: Hardware) -> list[Residual]:
    """A table's residuals under constants that were fitted to the others."""
    return residuals([held_out], fit(rest, hardware, CONSTANTS))


def rounded(hardware: Hardware) -> Hardware:
    """Three digits: what is written is what was judged."""
    for constant in CONSTANTS:
        hardware = constant.put(hardware, float(f"{constant.get(hardware):.2e}"))
    return hardware


def print_constants(hardware: Hardware) -> None:
    print(f"| {'constant':22} | {'value':8} | {'prior':8} | {'bounds':19} | why |\n|---|---|---|---|---|")
    for c in CONSTANTS:
        bounds = f"{c.low:.1e} to {c.high:.1e}"
        print(f"| {c.name:22} | {c.get(hardware):.2e} | {c.prior:.1e}  | {bounds:19} | {c.why} |")


def print_residuals(rows: Sequence[Residual]) -> None:
    print(f"\n| {'table':18} | {'call':27} | measured s | predicted s | error |\n|---|---|---|---|---|")
    for r in rows:
        print(f"| {r.table:18} | {r.row:27} | {r.measured_s:10.1f} | {r.predicted_s:11.1f} | {r.error:+5.0%} |")
    print()


def print_errors(name: str, rows: Sequence[Residual]) -> None:
    print(f"{name}: mean {mean_error(rows):.1%}, worst {worst_error(rows):.1%}")


def with_constants(text: str, hardware: Hardware) -> str:
    """The description's text with the fitted numbers in the places of the old ones."""
    for constant in CONSTANTS:
        text = _with_number(text, constant, constant.get(hardware))
    return text


def _with_number(text: str, constant: Constant, value: float) -> str:
    field, dtype = constant.place
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
