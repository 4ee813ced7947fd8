"""Converts a checkpoint, offline and without a GPU: the language model that a run has trained into a directory that
transformers' from_pretrained reads, with the run's tokenizer; a GGUF file into such a directory; or such a directory
(config.json, safetensors, tokenizer) into a checkpoint of boxes. Says every step it makes.

examples:
  realhf convert path/to/Qwen3-0.6B converted/qwen3
  realhf convert path/to/SmolLM2-135M-Instruct.Q4_1.gguf converted/smollm2
  realhf convert runs/mine exported
  realhf convert runs/mine/checkpoints/latest/actor exported/actor --like path/to/Qwen3-0.6B
"""

import argparse
import subprocess
from pathlib import Path
from typing import get_args

import msgspec

from realhf.architecture.model import DType
from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.base.numbers import check_range


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face directory, a GGUF file, a run directory, or one of its models: "
        "RUN_DIR/checkpoints/latest/MODEL",
    )
    command.add_argument("target", metavar="TARGET", help="the directory to write; it must not exist")
    command.add_argument("--dtype", choices=get_args(DType), help="of the result (default: that of the source)")
    command.add_argument(
        "--like", metavar="DIR", help="a Hugging Face directory whose tokenizer and config to take (default: the run's)"
    )
    command.add_argument(
        "--max-file-gb", type=float, default=5.0, help="largest file in GB of 10^9 bytes (default 5; not for GGUF)"
    )


def execute(arguments: argparse.Namespace) -> int:
    if Path(arguments.target).exists():
        raise UserError(f"{arguments.target} exists already; give a new directory, or remove it first")
    check_range("--max-file-gb", arguments.max_file_gb, 1e-6, 1e6)
    conversion = {name: getattr(arguments, name) for name in ("source", "target", "dtype", "like")}
    conversion["max_file_bytes"] = int(arguments.max_file_gb * 1e9)
    # In a process of its own: tensors are read there, and this one stays without torch.
    words = python_command("realhf.models.convert", msgspec.json.encode(conversion).decode())
    return subprocess.run(words, check=False).returncode
