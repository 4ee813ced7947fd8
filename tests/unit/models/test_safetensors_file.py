"""The writer against the library's reader and hashlib."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from realhf.models.checkpoint_index import read_header
from realhf.models.safetensors_file import write_safetensors


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    content = {
        "odd": torch.arange(5, dtype=torch.bfloat16),  # of 10 bytes: what follows must still be aligned
        "wide": torch.randn(3, 7, dtype=torch.float64),
        "float#1,2": torch.randn(2, 2, 2),
        "half": torch.ones(1, dtype=torch.float16),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "file.safetensors"
    digest = write_safetensors(path, content)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert read_header(path)["float#1,2"].shape == (2, 2, 2)
