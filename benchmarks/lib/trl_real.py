"""GRPO by TRL on the CPU, timed: for `benchmarks/real_model.py`, by the Python of an environment with TRL 1.16.

The settings save work: keys and values are cached, nothing but the reward is logged, nothing saved, evaluated or
recomputed, the optimizer is the fused one, and logits exist for response tokens alone, in chunks (TRL's own). Weights
are float32 and computed with in bfloat16 (`bf16`, TRL's default): in bfloat16, 96 % of this model's weights stay where
they are when 2e-5 is added to them.

Command: python benchmarks/lib/trl_real.py SETTINGS.json
Prints one JSON object: of every step `step_s`, its seconds, and `rewards`, the mean reward of its responses.
"""

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from realhf.rewards.numbers_in_text import answer_number

WITHOUT_EXTRAS: dict[str, Any] = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "optim": "adamw_torch_fused",
    "learning_rate": 1.0,  # times the rates that are given
    "dataloader_pin_memory": False,
    "shuffle_dataset": False,
}


def numeric(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The rule of `ready:numeric` for whole numbers."""
    return [float(answer_number(text) == float(right)) for text, right in zip(completions, answer, strict=True)]


class Marks(TrainerCallback):
    """The clock when training begins and at the end of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *arguments: Any, **more: Any) -> None:
        self.seconds.append(time.perf_counter())

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        self.seconds.append(time.perf_counter())


class Trainer(GRPOTrainer):
    rates: list[float]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """The rate of every step as it is given; it is asked for one more behind the last."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, [*self.rates, 0.0].__getitem__)
        return self.lr_scheduler


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            reward_funcs=numeric,
            args=GRPOConfig(output_dir=output, **WITHOUT_EXTRAS, **settings["config"]),
            train_dataset=Dataset.from_list(settings["rows"]),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            callbacks=[marks := Marks()],
        )
        trainer.rates = settings["rates"]
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(json.dumps({"step_s": [after - before for before, after in pairwise(marks.seconds)], "rewards": rewards}))


if __name__ == "__main__":
    main()
