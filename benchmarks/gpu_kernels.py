"""The Triton kernels of `realhf/gpu`, compiled to machine code without a GPU: registers and spilled bytes a thread.

For three generations of GPUs (compute capability 8.0, 9.0 and 10.0) and the head shapes of three models. A register
that spills lies in the GPU's memory: the target is that none does. This proves types, layouts and resources; neither
values (tests/unit/gpu has these, in the interpreter) nor speed.

`--quick` compiles for one generation and shape.
Command: python benchmarks/gpu_kernels.py --json benchmarks/results/gpu_kernels.json
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined: there would be nothing to compile

import torch
import triton
from lib.common import case, finish, parse_arguments
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from realhf.gpu.paged_attention import (
    NUM_STAGES,
    NUM_WARPS,
    attend_constants,
    attend_split,
    join_splits,
)
from realhf.gpu.sums import BLOCK, PRODUCT_STAGES, PRODUCT_WARPS, TILES, add_named_rows, add_products, add_row

MEASURES = ("realhf/gpu",)
CAPABILITIES = (90, 80, 100)
PAGE = 16
ALIGNED = "i32:16"
MOST_REGISTERS = 255
TYPES = {"bfloat16": ("*bf16", 2), "float32": ("*fp32", 4)}
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
DEADLINE_S = 60


class Heads(NamedTuple):
    """The shapes of a model's attention."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int


HEADS = (Heads("Qwen2.5-7B", 28, 4, 128), Heads("Llama-2-7B", 32, 32, 128), Heads("SmolLM2-135M", 9, 3, 64))


class Launch(NamedTuple):
    """How a kernel is compiled: threads in warps, and loads ahead of their use."""

    num_warps: int = NUM_WARPS
    num_stages: int = NUM_STAGES


PLAIN = Launch()


def compiled(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, int], launch: Launch = PLAIN
) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills. Pointers are multiples of 16, as torch allocates, and so are
    numbers of the type ALIGNED."""
    signature = {name: types.get(name, "constexpr" if name in constants else "*fp32") for name in kernel.arg_names}
    aligned = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith(("*", ALIGNED))]
    signature = {name: kind.partition(":")[0] for name, kind in signature.items()}
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in aligned})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch._asdict())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        words = (DISASSEMBLER, "-res-usage", file.name)
        usage = subprocess.run(words, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def kernels(capability: int, heads: Heads, dtype: str) -> Iterator[tuple[str, int, int]]:
    """Name, registers and spilled bytes of both kernels for one generation, model and dtype."""
    pointer, item_bytes = TYPES[dtype]
    types = {
        **dict.fromkeys(("query", "key", "value", "keys", "values", "out"), pointer),
        **dict.fromkeys(("table", "lengths"), "*i32"),
        **dict.fromkeys(("seen", "splits", "query_row", "key_row", "value_row", "table_row"), "i32"),
        "scale": "fp32",
    }
    attending = attend_constants(heads.heads, heads.kv_heads, heads.head_dim, PAGE, item_bytes) | {"IS_SPLIT": True}
    joining = {name: attending[name] for name in ("SPLIT", "HEAD_DIM", "DIM")}
    for name, kernel, constants in (("attend", attend_split, attending), ("join", join_splits, joining)):
        yield f"sm_{capability} {name}, {heads.model}, {dtype}", *compiled(kernel, capability, types, constants)


def sums(capability: int, dtype: str) -> Iterator[tuple[str, int, int]]:
    """As `kernels`, of the sums in one order."""
    pointer, of_gradients = TYPES[dtype][0], "*fp32"
    rows, outs, depth = TILES[getattr(torch, dtype)]
    numbers = dict.fromkeys(("rows", "outs", "width", "x_row", "total_row"), "i32")
    columns = dict.fromkeys(("x", "weight", "bias", "y"), pointer)
    columns |= dict.fromkeys(("width", "x_row", "weight_row"), ALIGNED)
    tile = {"ROWS": rows, "OUTS": outs, "DEPTH": depth, "HAS_BIAS": True}
    products = Launch(PRODUCT_WARPS, PRODUCT_STAGES)
    for name, kernel, types, constants, launch in (
        ("product", add_products, columns, tile, products),
        ("sum of a row", add_row, {"x": of_gradients, "sums": of_gradients}, {"BLOCK": BLOCK}, PLAIN),
        ("sum of rows", add_named_rows,
         {"total": of_gradients, "x": pointer, "order": "*i64", "starts": "*i64"}, {"BLOCK": BLOCK}, PLAIN),
    ):  # fmt: skip
        yield f"sm_{capability} {name}, {dtype}", *compiled(kernel, capability, numbers | types, constants, launch)


def main() -> None:
    arguments = parse_arguments(__doc__)
    capabilities, models = (CAPABILITIES[:1], HEADS[:1]) if arguments.quick else (CAPABILITIES, HEADS)
    chosen = [(capability, heads, dtype) for capability in capabilities for heads in models for dtype in TYPES]
    results, spilled = [], 0
    found = [each for choice in chosen for each in kernels(*choice)]
    found += [each for capability in capabilities for dtype in TYPES for each in sums(capability, dtype)]
    for name, registers, bytes_spilled in found:
        spilled += bytes_spilled
        fits = registers <= MOST_REGISTERS
        results.append(case(name, registers, "registers", baseline=None, ratio=None, target=MOST_REGISTERS, holds=fits))
    words = "spilled by all of them"
    results.append(case(words, spilled, "bytes", baseline=None, ratio=None, target=0, holds=not spilled))
    finish("gpu_kernels", results, arguments.json)


if __name__ == "__main__":
    main()
