"""TRL 1.12's own methods on given tensors: its trainers without models, data and processes.

A trainer's method gets a stand-in for `self` that has what the method asks for: log-probabilities that are given, and
one process. All formulas are TRL's.
"""

import contextlib
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.gspo_token.grpo_trainer import GRPOTrainer as GSPOTokenTrainer
from trl.experimental.ppo import ppo_trainer
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig

PAD, EOS = 0, 2


class OneProcess:
    """An accelerator of one process."""

    num_processes, process_index, device, sync_gradients = 1, 0, torch.device("cpu"), True

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x


def padded(columns: list[Tensor], value: float = 0.0) -> Tensor:
    """[batch, longest], filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=value)


def mask_of(columns: list[Tensor]) -> Tensor:
    return padded([torch.ones(len(column), dtype=torch.int64) for column in columns])


def grpo_loss(logprob: list[Tensor], inputs: dict[str, Any], **config: Any) -> Tensor:
    """`GRPOTrainer._compute_loss` in evaluation mode (no gradient accumulation), a scalar with gradient.

    Args:
        logprob: per sample [response]; inputs: those of the method beside tokens and masks, lists of columns as such.
        config: fields of GRPOConfig, and `max_completion_length`.
    """
    trainer = _trainer(GRPOConfig, config)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded(logprob), padded(logprob).detach() * 0, None)
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    trainer.get_off_policy_mask = grpo_trainer.GRPOTrainer.get_off_policy_mask
    trainer.get_gamma_weights = grpo_trainer.GRPOTrainer.get_gamma_weights
    mask = mask_of(logprob)
    tensors = {key: padded(value) if isinstance(value, list) else value for key, value in inputs.items()}
    tensors |= {
        "prompt_ids": torch.ones(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
    }
    of = GSPOTokenTrainer if config.get("importance_sampling_level") == "sequence_token" else grpo_trainer.GRPOTrainer
    return of._compute_loss(trainer, trainer.model, tensors)


def grpo_advantages(rewards: list[float | None], group: int, **config: Any) -> Tensor:
    """`GRPOTrainer._generate_and_score_completions` on rewards in the order of groups (None: not scored): [batch]."""
    trainer = _sampling(GRPOConfig, rewards, group, config)
    with _one_process(grpo_trainer):
        inputs = [{"prompt": "p"} for _ in rewards]
        found = grpo_trainer.GRPOTrainer._generate_and_score_completions(trainer, inputs)
    return found["advantages"]


def importance_ratio(drawn: list[Tensor], old: list[Tensor], mode: str, low: float, high: float) -> Tensor:
    """The weights of `GRPOTrainer` for a generation by vLLM: [batch, longest], or [batch, 1] of sequences.

    Args:
        drawn, old: log-probabilities of the sampler and of the trainer, per sample [response].
    """
    config = {
        "beta": 0.0,
        "scale_rewards": "group",
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }
    trainer = _sampling(GRPOConfig, [1.0] * len(drawn), 2, config, [len(x) for x in drawn])
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    generate = trainer._generate
    trainer._generate = lambda prompts: (*generate(prompts)[:4], [x.tolist() for x in drawn], *generate(prompts)[5:])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded(old), None, None)
    with _one_process(grpo_trainer):
        inputs = [{"prompt": "p"} for _ in drawn]
        found = grpo_trainer.GRPOTrainer._generate_and_score_completions(trainer, inputs)
    return found["importance_sampling_ratio"]


def rloo_advantages(
    rewards: list[float | None], group: int, logprob: list[Tensor], ref: list[Tensor], **config: Any
) -> Tensor:
    """`RLOOTrainer._generate_and_score_completions`, with the log-probabilities of responses [response]: [batch]."""
    trainer = _sampling(RLOOConfig, rewards, group, config, [len(x) for x in logprob])
    trainer.ref_model = "reference"
    given = {"model": padded(logprob), "reference": padded(ref)}
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        given["reference" if model == "reference" else "model"].detach(),
        None,
        None,
    )
    with _one_process(rloo_trainer):
        inputs = [{"prompt": "p"} for _ in rewards]
        return rloo_trainer.RLOOTrainer._generate_and_score_completions(trainer, inputs)["advantages"]


def rloo_loss(logprob: list[Tensor], old: list[Tensor], advantages: Tensor, **config: Any) -> Tensor:
    """`RLOOTrainer._compute_loss`, a scalar with gradient."""
    trainer = _trainer(RLOOConfig, config)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded(logprob), padded(logprob).detach() * 0, None)
    mask = mask_of(logprob)
    inputs = {
        "prompt_ids": torch.ones(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "old_logps": torch.stack([x.sum() for x in old]),
        "advantages": advantages,
    }
    return rloo_trainer.RLOOTrainer._compute_loss(trainer, trainer.model, inputs)


def dpo_loss(logits: Tensor, ref_logits: Tensor, tokens: Tensor, is_answer: Tensor, **config: Any) -> Tensor:
    """`DPOTrainer._compute_loss` on pairs: the first half of the rows are chosen. A scalar with gradient.

    Args:
        logits, ref_logits: [2 pairs, length, vocab]; tokens, is_answer: [2 pairs, length].
    """
    trainer = _trainer(DPOConfig, config)
    trainer.ref_model = lambda **_: SimpleNamespace(logits=ref_logits)
    trainer.loss_types, trainer.loss_weights = [trainer.args.loss_type], [1.0]
    trainer.precompute_ref_logps, trainer.use_weighting, trainer.ld_alpha = False, False, None
    trainer.f_divergence_type, trainer._total_train_tokens = "reverse_kl", 0
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": is_answer.long()}

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=logits)

    trainer.model = SimpleNamespace(training=False, modules=lambda: [], is_gradient_checkpointing=False)
    with mock.patch("trl.trainer.dpo_trainer.disable_gradient_checkpointing", return_value=contextlib.nullcontext()):
        return DPOTrainer._compute_loss(trainer, model, inputs, False)


class _StoppedError(Exception):
    pass


def ppo_update(rollout: dict[str, Any], **config: Any) -> dict[str, Tensor]:
    """`PPOTrainer.train` up to the first backward pass, on one mini-batch.

    Args:
        rollout: lists of [response] `logprob`, `ref_logprob`, `new_logprob`; `value`, `new_value` [response], or longer
            by one where the value of the state behind the end token is given; `score` [batch].

    Returns:
        `advantages` (whitened), `raw` (not whitened), `mask` [batch, longest], `pg_loss`, `vf_loss`.
    """
    lengths = [len(x) for x in rollout["logprob"]]
    batch, longest = len(lengths), config["response_length"]
    tokens = torch.full((batch, 1 + longest), PAD)
    for row, length in zip(tokens, lengths, strict=True):
        row[: 1 + length] = 5

    def wide(columns: list[Tensor]) -> Tensor:
        """[batch, 1 + longest], one state before the response's first token."""
        out = torch.zeros(batch, longest + 1, dtype=columns[0].dtype)
        for row, column in zip(out, columns, strict=True):
            row[: len(column)] = column
        return out

    logprobs = iter([wide(rollout[key])[:, :longest] for key in ("logprob", "ref_logprob", "new_logprob")])
    rewards = iter([(wide(rollout["value"])[..., None], None, None), (None, rollout["score"], None)])
    logits = SimpleNamespace(logits=torch.zeros(batch, longest + 2, 1, dtype=torch.float64))
    passes = iter([logits, (logits, wide(rollout["new_value"])[..., None])])
    means: list[Tensor] = []
    whitened: list[tuple[Tensor, Tensor, Tensor]] = []
    real_mean, real_whiten = ppo_trainer.masked_mean, ppo_trainer.masked_whiten

    def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
        means.append(real_mean(values, mask))
        return means[-1]

    def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
        whitened.append((values, mask, real_whiten(values, mask)))
        means.clear()
        return whitened[-1][2]

    def stop(loss: Tensor) -> None:
        raise _StoppedError

    trainer = SimpleNamespace(
        args=SimpleNamespace(
            temperature=1.0,
            num_ppo_epochs=1,
            num_mini_batches=1,
            gradient_accumulation_steps=1,
            num_total_batches=1,
            total_episodes=batch,
            batch_size=batch,
            local_batch_size=batch,
            local_mini_batch_size=batch,
            per_device_train_batch_size=batch,
            local_rollout_forward_batch_size=batch,
            logging_steps=None,
            eval_steps=None,
            save_steps=None,
            ds3_gather_for_generation=False,
            missing_eos_penalty=None,
            whiten_rewards=False,
            vf_coef=1.0,
            **config,
        ),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            print=lambda *_: None,
            unwrap_model=lambda model: model,
            accumulate=lambda _: contextlib.nullcontext(),
            backward=stop,
        ),
        model=SimpleNamespace(train=lambda: None, policy=None, value_model=None),
        ref_model="reference",
        reward_model=None,
        optimizer=None,
        processing_class=SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        dataloader=[{"input_ids": tokens[:, :1]}],
        train_dataset_len=batch,
        state=SimpleNamespace(),
        control=None,
        callback_handler=SimpleNamespace(on_train_begin=lambda *_: None),
        is_deepspeed_enabled=False,
        stop_token_id=None,
    )
    replaced = {
        "unwrap_model_for_generation": lambda model, *_, **__: contextlib.nullcontext(model),
        "batch_generation": lambda *_: (tokens, torch.zeros(batch, longest, 1)),
        "selective_log_softmax": lambda *_: next(logprobs),
        "get_reward": lambda *_: next(rewards),
        "forward": lambda *_: next(passes),
        "masked_mean": masked_mean,
        "masked_whiten": masked_whiten,
        "np": SimpleNamespace(random=SimpleNamespace(permutation=np.arange)),
    }
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(ppo_trainer, name, function))
        stack.enter_context(contextlib.suppress(_StoppedError))
        ppo_trainer.PPOTrainer.train(trainer)
    ((raw, mask, advantages),) = whitened
    return {"raw": raw, "mask": mask, "advantages": advantages, "vf_loss": 0.5 * means[0], "pg_loss": means[2]}


def _trainer(of: type, config: dict[str, Any]) -> SimpleNamespace:
    """What trainers share: every field of their configuration as an argument and as an attribute."""
    settings = {name: getattr(of, name, None) for name in of.__dataclass_fields__}
    settings |= {"steps_per_generation": 1, "reward_clip_range": None} | config
    return SimpleNamespace(
        **settings
        | {
            "args": SimpleNamespace(**settings),
            "accelerator": OneProcess(),
            "model": SimpleNamespace(training=False),
            "aux_loss_enabled": False,
            "_entropy_bonus_enabled": False,
            "epsilon_low": settings.get("epsilon"),
            "epsilon_high": settings.get("epsilon_high") or settings.get("epsilon"),
            "current_gradient_accumulation_steps": 1,
            "_metrics": defaultdict(lambda: defaultdict(list)),
        }
    )


def _sampling(
    of: type, rewards: list[float | None], group: int, config: dict[str, Any], lengths: list[int] | None = None
) -> SimpleNamespace:
    """A trainer whose generation and rewards are given."""
    trainer = _trainer(of, config)
    lengths = lengths or [1] * len(rewards)
    given = [float("nan") if reward is None else reward for reward in rewards]
    completions = [[5] * length for length in lengths]
    trainer._generate = lambda prompts: (
        [[1]] * len(rewards),
        completions,
        *((None,) if of is GRPOConfig else ()),
        [""] * len(rewards),
        *((None, {}, None, None) if of is GRPOConfig else ()),
    )
    trainer._calculate_rewards = lambda *_: torch.tensor(given, dtype=torch.float64)[:, None]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (torch.zeros(len(rewards), 1), None, None)
    trainer._tokenizer = trainer.processing_class = SimpleNamespace(
        pad_token_id=PAD, eos_token_id=EOS, batch_decode=lambda ids, **_: [""] * len(ids)
    )
    trainer.reward_weights, trainer.reward_funcs, trainer.reward_func_names = torch.ones(1), [None], ["reward"]
    trainer.num_generations = trainer.num_generations_eval = group
    trainer.environment_factories = trainer.tools = trainer.environments = None
    trainer.pad_to_multiple_of, trainer._is_vlm, trainer.use_vllm = None, False, False
    trainer._logs = defaultdict(list)
    trainer._logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    return trainer


@contextlib.contextmanager
def _one_process(module: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for name, function in (
            ("gather_object", lambda x: x),
            ("gather", lambda x: x),
            ("disable_gradient_checkpointing", lambda *_: contextlib.nullcontext()),
        ):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, function))
        yield
