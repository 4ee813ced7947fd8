"""Training on sequences of a fixed number of tokens, of a model of any shape: for `benchmarks/features.py`."""

import json
import os
import random
import string
from dataclasses import dataclass, field
from pathlib import Path

from realhf.algorithms.sft.config import sft_loss
from realhf.api import (
    TRAIN_STEP,
    ComputeConfig,
    DecoderConfig,
    DType,
    ModelFunctionCallDef,
    ModelSetup,
    OptimizerConfig,
    Update,
    auto,
)
from realhf.data import sort_task
from realhf.data.datasets import SFTDataset

ROWS = 512


@auto(batch_size=2)
@dataclass(frozen=True, kw_only=True)
class FeaturesJob:
    """One model, one call: a step is an optimizer step on `batch_size` rows of `tokens` tokens."""

    seed: int = 0
    steps: int = 10
    batch_size: int = 2
    tokens: int = 256
    architecture: DecoderConfig = sort_task.SORT_MODEL
    dtype: DType = "float32"
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    data_dir: str = "runs/features-data"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=self.architecture,
                interface_type=TRAIN_STEP,
                interface_impl=Update(sft_loss(), rows="examples"),
                input_data=["tokens", "prompt_length"],
            )
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        return {"actor": ModelSetup(optimizer=OptimizerConfig(lr=1e-4), dtype=self.dtype, compute=self.compute)}

    @property
    def dataset(self) -> SFTDataset:
        folder = ensure_data(Path(self.data_dir), self.tokens)
        return SFTDataset(path=str(folder / f"{self.tokens}.jsonl"), tokenizer=str(folder / "tokenizer.json"))


def ensure_data(folder: Path, tokens: int) -> Path:
    """The folder with `tokenizer.json` (one token a letter) and `TOKENS.jsonl`, rows of that length with the tokens for
    begin and end; makes them where they lack."""
    file = folder / f"{tokens}.jsonl"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        lines = [json.dumps({"text": "".join(rng.choices(string.ascii_lowercase, k=tokens - 2))}) for _ in range(ROWS)]
        texts = {"tokenizer.json": sort_task.make_tokenizer().to_str(), file.name: "\n".join(lines) + "\n"}
        for name, text in texts.items():
            unfinished = folder / f".{name}-{os.getpid()}"
            unfinished.write_text(text)
            unfinished.rename(folder / name)
    return folder
