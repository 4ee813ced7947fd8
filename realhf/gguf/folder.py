"""Writes a GGUF file's model as a Hugging Face directory, one tensor in memory at a time. No torch here."""

import json
import os
from pathlib import Path

import numpy as np

from realhf.architecture.hugging_face import write_config
from realhf.base.files import open_regular, write_atomically
from realhf.base.safetensors_header import safetensors_header
from realhf.gguf.architecture import decoder_of, in_order, tensors_of
from realhf.gguf.file import GGUFFile
from realhf.gguf.tokenizer import tokenizer_files


class GGUFModel:
    """A GGUF file that has been checked: it can be written as a Hugging Face directory.

    Raises:
        UserError: naming what cannot be read.
    """

    def __init__(self, path: Path):
        self.file = GGUFFile(path)
        self.model = decoder_of(self.file)
        self._tensors = tensors_of(self.file, self.model)
        self._companions = tokenizer_files(self.file, self.model.vocab_size)

    def write(self, directory: Path) -> list[Path]:
        """Writes config.json, model.safetensors and the tokenizer's files into a directory that is there; returns the
        files. F32, F16 and BF16 keep their bits, blocks become F32.

        Raises:
            OSError: the disk is full, or fails.
        """
        kept = {
            name: kind if (kind := tensor.type) in ("F16", "BF16") else "F32" for name, tensor in self._tensors.items()
        }
        header, order = safetensors_header({name: (kept[name], self._tensors[name].shape) for name in kept})
        with open_regular(directory / "model.safetensors", "xb") as file:
            file.write(header)
            for name in order:
                file.write(self._content(name))
            file.flush()
            os.fsync(file.fileno())
        config = write_config(self.model, "float32")
        texts = {"config.json": json.dumps(config, indent=2).encode() + b"\n", **self._companions}
        for name, text in texts.items():
            write_atomically(directory / name, text)
        return sorted(directory.iterdir())

    def _content(self, name: str) -> memoryview:
        """The bytes of a parameter, in Hugging Face's order of rows."""
        content = in_order(self.file, self.model, name, self.file.read(self._tensors[name]))
        return np.ascontiguousarray(content).data.cast("B")
