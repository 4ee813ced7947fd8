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

MEASURES = ("realhf/gpu",)
CAPABILITIES = (90, 80, 100)
PAGE = 16
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


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, int]) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills. Pointers are multiples of 16, as torch allocates."""
    signature = {name: types.get(name, "constexpr" if name in constants else "*fp32") for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in pointers})
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
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


def main() -> None:
    arguments = parse_arguments(__doc__)
    capabilities, models = (CAPABILITIES[:1], HEADS[:1]) if arguments.quick else (CAPABILITIES, HEADS)
    chosen = [(capability, heads, dtype) for capability in capabilities for heads in models for dtype in TYPES]
    results, spilled = [], 0
    for name, registers, bytes_spilled in (found for choice in chosen for found in kernels(*choice)):
        spilled += bytes_spilled
        fits = registers <= MOST_REGISTERS
        results.append(case(name, registers, "registers", baseline=None, ratio=None, target=MOST_REGISTERS, holds=fits))
    words = "spilled by all of them"
    results.append(case(words, spilled, "bytes", baseline=None, ratio=None, target=0, holds=not spilled))
    finish("gpu_kernels", results, arguments.json)


if __name__ == "__main__":
    main()
