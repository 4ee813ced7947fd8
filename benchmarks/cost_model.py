"""The analytic cost model against published step times of H100 clusters, and how fast it costs an option.

Each table is predicted by constants that were fitted to the others alone: no row is evidence of its own fit.

The baseline of an error is that of a model without fitted constants: the vendor's peaks and no launch
costs. The baseline of the speed is ReaL's figure, hundreds of microseconds for one cost.
"""

import time

from lib.common import case, finish, parse_arguments
from lib.fit import (
    MeasuredTable,
    Residual,
    calibration_script,
    load_tables,
    mean_error,
    predict_s,
    residuals,
    step_residuals,
    worst_error,
)
from msgspec import structs

from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import Hardware

MEASURES = (
    "realhf/planning/model",
    "realhf/planning/descriptions/h100.yaml",
    "benchmarks/lib/fit.py",
    "scripts/calibrate_cost_model.py",
)
MEAN_TARGET, WORST_TARGET = 0.15, 0.30
REAL_COST_US = 200.0


def main() -> None:
    arguments = parse_arguments(__doc__)
    calibrate = calibration_script()
    tables, h100 = load_tables(calibrate.TABLES), load_hardware("h100")
    results = []
    for held_out in tables:
        rest = [table for table in tables if table is not held_out]
        rows = calibrate.held_out_residuals(held_out, rest, h100)
        calls, steps = rows[: len(held_out.calls)], rows[len(held_out.calls) :]
        results += errors(f"{held_out.name}, calls", calls, residuals([held_out], peaks(h100)))
        results += errors(f"{held_out.name}, whole steps", steps, step_residuals([held_out], peaks(h100)))
    results.append(speed(tables, h100, repeats=20 if arguments.quick else 200))
    finish("cost_model", results, arguments.json)


def peaks(hardware: Hardware) -> Hardware:
    """The vendor's data sheet."""
    return structs.replace(
        hardware,
        matmul_flops={"bfloat16": 989e12},
        memory_bandwidth=3.35e12,
        intra_node_bandwidth=450e9,
        inter_node_bandwidth=50e9,
        layer_launch_s=0.0,
        decode_launch_s=0.0,
        decode_graph_launch_s=0.0,
        call_overhead_s=0.0,
        sampling_s=0.0,
    )


def errors(name: str, rows: list[Residual], with_peaks: list[Residual]) -> list[dict]:
    """Mean and worst error, beside those of the peaks."""
    results = []
    for kind, measure, target in (("mean", mean_error, MEAN_TARGET), ("worst", worst_error, WORST_TARGET)):
        value, baseline = measure(rows), measure(with_peaks)
        results.append(
            case(f"{name}: {kind} error", value, "of measured", baseline=baseline, ratio=baseline / value,
                 target=target, holds=value <= target)
        )  # fmt: skip
    return results


def speed(tables: list[MeasuredTable], hardware: Hardware, repeats: int) -> dict:
    """Microseconds of one call's cost under one option, over all rows."""
    rows = [(table, row) for table in tables for row in table.calls]
    start = time.perf_counter()
    for _ in range(repeats):
        for table, row in rows:
            predict_s(table, row, hardware)
    value = (time.perf_counter() - start) / repeats / len(rows) * 1e6
    return case("cost of a call under an option", value, "us", baseline=REAL_COST_US, ratio=REAL_COST_US / value,
                target=REAL_COST_US, holds=value <= REAL_COST_US)  # fmt: skip


if __name__ == "__main__":
    main()
