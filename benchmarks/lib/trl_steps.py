"""Steps of TRL's GRPO and PPO trainers on the CPU, timed: a process of its own beside `rl_step_job.py`.

The settings save work (torch.compile was not tried): keys and values are cached, nothing is logged, saved,
evaluated or recomputed, the optimizer is the fused one, and all weights have the dtype (autocasting took longer).
No token ends a response: the tokenizer's end token is one that the model does not have.

Command: python benchmarks/lib/trl_steps.py grpo 4M float32 STEPS DATA_DIR
Prints one JSON object: `version`, and of every step `step_s` and, of all threads, `cpu_s`.
"""

import contextlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from rl_step_job import (
    BATCH,
    GROUP,
    KL_COEF,
    LEARNING_RATE,
    MINI_BATCHES,
    NEW_TOKENS,
    PAD,
    POLICY_CLIP,
    PROMPT_TOKENS,
    SIZES,
    VOCABULARY,
    ensure_data,
)
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

WITHOUT_EXTRAS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,  # autocast; the weights have the dtype
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
    "optim": "adamw_torch_fused",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "dataloader_pin_memory": False,
    "max_grad_norm": 1.0,
    "seed": 0,
}


class StepTimes(TrainerCallback):
    """The clock's and the processor's seconds of every `per_step` calls of the optimizer."""

    def __init__(self, per_step: int):
        self.per_step, self.calls = per_step, 0
        self.marks: list[tuple[float, float]] = []

    def on_train_begin(self, *arguments: Any, **more: Any) -> None:
        self._mark()

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        self.calls += 1
        if self.calls % self.per_step == 0:
            self._mark()

    def _mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    @property
    def seconds(self) -> dict[str, list[float]]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        return {name: [after[i] - before[i] for before, after in pairs] for i, name in enumerate(("step_s", "cpu_s"))}


def model_config(size: str) -> LlamaConfig:
    shape = SIZES[size]
    return LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=VOCABULARY,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        num_labels=1,
    )


def share_of_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def grpo(size: str, dtype: torch.dtype, steps: int, data: Path, output: str) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    texts = [json.loads(line) for line in (data / "prompts.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=BATCH // MINI_BATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=steps * MINI_BATCHES,
        temperature=1.0,
        beta=KL_COEF,
        epsilon=POLICY_CLIP,
        model_init_kwargs={"dtype": str(dtype).removeprefix("torch.")},
        **WITHOUT_EXTRAS,
    )
    trainer = GRPOTrainer(
        model=saved_model(size, dtype, data),
        reward_funcs=share_of_even,
        args=config,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer_in(data),
        callbacks=[times := StepTimes(per_step=MINI_BATCHES)],
    )
    assert {next(m.parameters()).dtype for m in (trainer.model, trainer.ref_model)} == {dtype}
    trainer.train()
    return times


def saved_model(size: str, dtype: torch.dtype, data: Path) -> str:
    """A folder with random weights: from it TRL loads the reference too."""
    folder = data / f"trl-{size}-{dtype}"
    if not folder.is_dir():
        LlamaForCausalLM(model_config(size)).to(dtype).save_pretrained(folder)
    return str(folder)


class EvenShare(nn.Module):
    """The reward in the form of TRL's reward models: a number a token, the same for a whole sequence."""

    base_model_prefix = "trunk"

    def __init__(self) -> None:
        super().__init__()
        self.trunk = self.score = self._identity

    def _identity(self, given: Any = None, *, input_ids: Tensor | None = None, **options: Any) -> Any:
        if input_ids is None:
            return given
        share = (input_ids[:, PROMPT_TOKENS:] % 2 == 0).float().mean(dim=1)
        hidden = share[:, None, None].expand(*input_ids.shape, 1)
        return type("Output", (), {"hidden_states": (hidden,)})


def ppo(size: str, dtype: torch.dtype, steps: int, data: Path, output: str) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = tokenizer_in(data)
    texts = [json.loads(line)["prompt"] for line in (data / "prompts.jsonl").read_text().splitlines()]
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    config = PPOConfig(
        output_dir=output,
        # One micro-batch a mini-batch: TRL cuts its mini-batches out of this, and with accumulation it would make one
        # optimizer step of the four.
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        num_mini_batches=MINI_BATCHES,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=BATCH,
        num_sample_generations=0,
        response_length=NEW_TOKENS,
        total_episodes=steps * BATCH,
        temperature=1.0,
        kl_coef=KL_COEF,
        cliprange=POLICY_CLIP,
        **WITHOUT_EXTRAS,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=LlamaForCausalLM(model_config(size)).to(dtype),
        ref_model=LlamaForCausalLM(model_config(size)).to(dtype),
        reward_model=EvenShare(),
        value_model=LlamaForSequenceClassification(model_config(size)).to(dtype),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:1]),
        callbacks=[times := StepTimes(per_step=1)],
    )
    trainer.train()
    return times


def tokenizer_in(data: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer.json"), pad_token=PAD, eos_token="<no token of the model>"
    )


def main() -> None:
    algorithm, size, dtype, steps, folder = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    data = ensure_data(Path(folder))
    with contextlib.redirect_stdout(sys.stderr):
        run = {"grpo": grpo, "ppo": ppo}[algorithm]
        times = run(size, getattr(torch, dtype), int(steps), data, str(data / "trl"))
    print(json.dumps({"version": version("trl"), **times.seconds}))


if __name__ == "__main__":
    main()
