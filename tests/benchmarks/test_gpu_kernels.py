"""The kernels for GPUs compile without one."""

import json

from tests.e2e.runs import benchmark


def test_no_register_spills() -> None:
    result = json.loads(benchmark("gpu_kernels", "--quick").splitlines()[-1])
    assert {row["case"]: (row["unit"], row["holds"]) for row in result["results"]} == {
        "sm_90 attend, Qwen2.5-7B, bfloat16": ("registers", True),
        "sm_90 join, Qwen2.5-7B, bfloat16": ("registers", True),
        "sm_90 attend, Qwen2.5-7B, float32": ("registers", True),
        "sm_90 join, Qwen2.5-7B, float32": ("registers", True),
        **{
            f"sm_90 {name}, {dtype}": ("registers", True)
            for name in ("product", "sum of a row", "sum of rows")
            for dtype in ("bfloat16", "float32")
        },
        "spilled by all of them": ("bytes", True),
    }
    assert all(0 < row["value"] < 255 for row in result["results"][:-1])
