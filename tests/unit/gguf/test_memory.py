"""A conversion holds one tensor, and the load of what it wrote the model in its dtype and one tensor."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np

from realhf.gguf.folder import GGUFModel
from tests.unit.gguf.files import SIZES, quantized, write_file

ROWS = 8192
TENSOR_BYTES = ROWS * SIZES["hidden_size"] * 4  # the largest, in float32
SLACK_BYTES = 2**22

# RLIMIT_DATA counts all memory but mapped files; torch's mapping, which counts, is there after the first read.
LOAD = """
import resource, sys
from pathlib import Path
import torch
from realhf.architecture.hugging_face import config_content, decoder_of
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.opening import open_checkpoint

folder, allowed = Path(sys.argv[1]), int(sys.argv[2])
model = decoder_of(config_content(folder / "config.json"))
made = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in decoder_parameters(model)}
boxes = {name: Box(name, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in made.items()}
reader = open_checkpoint(folder, model)
reader.read_into(made["model.norm.weight"], boxes["model.norm.weight"])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + allowed
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for name, tensor in made.items():
    reader.read_into(tensor, boxes[name])
print(sum(tensor.nbytes for tensor in made.values()))
"""


def write_wide(path: Path) -> Path:
    """A model of one layer with five equal large tensors, in Q8_0."""
    hidden = SIZES["hidden_size"]
    large = np.random.default_rng(0).normal(size=(ROWS, hidden)).astype(np.float32)
    fields = {"block_count": 1, "embedding_length": hidden, "feed_forward_length": ROWS, "attention.head_count": 4}
    shapes = {"token_embd": (ROWS, hidden), "output": (ROWS, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.ffn_{name}": (ROWS, hidden) for name in ("gate", "up")} | {"blk.0.ffn_down": (hidden, ROWS)}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,)}
    tensors = {}
    for name, shape in shapes.items():
        values = large.reshape(-1)[: np.prod(shape)].reshape(shape)
        tensors[f"{name}.weight"] = quantized(values, "Q8_0" if len(shape) == 2 else "F32")
    return write_file(path, "llama", {f"llama.{key}": value for key, value in fields.items()}, tensors)


def test_a_conversion_and_a_load_hold_one_tensor(tmp_path: Path) -> None:
    file = write_wide(tmp_path / "wide.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    tracemalloc.start()  # numpy's arrays count
    try:
        GGUFModel(file).write(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert TENSOR_BYTES < peak < TENSOR_BYTES + SLACK_BYTES
    assert (folder / "model.safetensors").stat().st_size > 5 * TENSOR_BYTES
    words = [sys.executable, "-c", LOAD, str(folder), str(TENSOR_BYTES + SLACK_BYTES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5 * TENSOR_BYTES // 2
