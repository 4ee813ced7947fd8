"""The hyperparameters of the algorithms: their defaults, and the least and the largest value that each may have."""

from dataclasses import fields
from typing import Any

import pytest

from realhf.algorithms.dpo.config import DPO
from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.ppo.config import PPOHyperparameters, PPOPtx, ppo_policy
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.remax.config import ReMax
from realhf.algorithms.reward.config import PairLoss
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.sft.config import sft_loss
from realhf.algorithms.text_reward.config import TextReward
from realhf.api import Generate, GenerationOptions, Logprobs, Measure, Score, Term, Update, Values, inputs
from realhf.base.errors import UserError

POLICY: dict[str, Any] = {
    **{"max_new_tokens": 256, "epochs": 1, "entropy_coef": 0.0, "mask_truncated": False},
    **{"importance_correction": "none", "importance_low": 0.0, "importance_high": 2.0},
}


CLIPPED = {**POLICY, "clip_low": 0.2, "clip_high": 0.2}


PPO = {
    **POLICY,
    **{"gamma": 1.0, "lam": 0.95, "kl_coef": 0.05, "kl_estimator": "k1", "kl_controller": "fixed", "kl_target": 6.0},
    **{"kl_horizon": 10_000, "policy_clip": 0.2, "dual_clip": 0.0, "value_clip": 0.2, "normalise_values": False},
    **{"value_decay": 0.99, "whiten_advantages": True, "max_kl": None},
    **{"reward_mean": 0.0, "reward_std": 1.0, "reward_clip": 5.0},
}


DEFAULTS: dict[type, dict[str, Any]] = {
    PPOHyperparameters: PPO,
    PPOPtx: {**PPO, "ptx_coef": 1.0},
    SafeRLHF: {
        **PPO,
        **{"cost_limit": 0.0, "cost_std": 1.0, "multiplier": 1.0, "max_multiplier": 100.0, "multiplier_lr": 0.1},
    },
    GRPO: {
        **CLIPPED,
        **{"samples_per_prompt": 8, "loss_type": "dapo", "scale_rewards": "group", "beta": 0.02, "unbiased_kl": True},
        **{"delta": 0.0, "ratio": "token", "ratio_cap": 5.0, "sapo_temperature_up": 1.0, "sapo_temperature_down": 1.05},
        **{"vespo_k_up": 2.0, "vespo_lambda_up": 3.0, "vespo_k_down": 3.0, "vespo_lambda_down": 2.0},
        **{"off_policy_threshold": 0.0, "drop_uniform_groups": False, "groups_per_step": 0},
    },
    RLOO: {**CLIPPED, "samples_per_prompt": 4, "kl_coef": 0.05, "reward_clip": 0.0, "normalise_advantages": False},
    ReinforcePlusPlus: {
        **CLIPPED,
        **{"baseline": "none", "kl_coef": 0.01, "kl_estimator": "k1", "gamma": 1.0, "reward_clip": 10.0},
    },
    ReMax: {**CLIPPED, "kl_coef": 0.05, "kl_estimator": "k1"},
    DPO: {
        **{"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "reference_free": False, "sft_coef": 0.0},
        "epochs": 1,
    },
    PairLoss: {"score_square_coef": 0.001, "centre_coef": 0.0, "epochs": 1},
}


OF_GENERATION = {field.name for field in fields(GenerationOptions)}


@pytest.mark.parametrize("options", DEFAULTS, ids=lambda options: options.__name__)
def test_defaults(options: type) -> None:
    made = options()
    own = {field.name: getattr(made, field.name) for field in fields(options) if field.name not in OF_GENERATION}
    assert own == {name: value for name, value in DEFAULTS[options].items() if name not in OF_GENERATION}
    for name in OF_GENERATION & DEFAULTS[options].keys():
        assert getattr(made, name) == DEFAULTS[options][name]


TINY = 1e-12


# By class and field: the least value and one below it, the largest and one above; None: no such bound is near.
BOUNDS: list[tuple[type, str, Any, Any, Any, Any]] = [
    *(
        bound
        for options in (GRPO, RLOO, ReinforcePlusPlus, ReMax)
        for bound in (
            (options, "clip_low", 1e-6, 9e-7, 1.0, 1.01),
            (options, "clip_high", 1e-6, 9e-7, 1e6, 1.1e6),
        )
    ),
    *(
        bound
        for options in (PPOHyperparameters, GRPO)
        for bound in (
            (options, "epochs", 1, 0, 1024, 1025),
            (options, "entropy_coef", -1e3, -1.1e3, 1e3, 1.1e3),
            (options, "importance_low", 0.0, -TINY, 1.0, 1.01),
            (options, "importance_high", 1.0, 0.99, 1e6, 1.1e6),
        )
    ),
    (PPOHyperparameters, "gamma", 0.0, -TINY, 1.0, 1.01),
    (PPOHyperparameters, "lam", 0.0, -TINY, 1.0, 1.01),
    (PPOHyperparameters, "kl_coef", 0.0, -TINY, 1e6, 1.1e6),
    (PPOHyperparameters, "kl_target", 1e-9, 0.0, 1e6, 1.1e6),
    (PPOHyperparameters, "kl_horizon", 1.0, 0.9, 1e12, 1.1e12),
    (PPOHyperparameters, "policy_clip", 1e-6, 9e-7, 1e6, 1.1e6),
    (PPOHyperparameters, "dual_clip", 1.01, 1.0, 1e6, 1.1e6),
    (PPOHyperparameters, "value_clip", 0.0, -TINY, 1e6, 1.1e6),
    (PPOHyperparameters, "value_decay", 0.0, -TINY, 0.999999, 1.0),
    (PPOHyperparameters, "max_kl", 1e-9, 0.0, 1e6, 1.1e6),
    (PPOHyperparameters, "reward_mean", -1e9, -1.1e9, 1e9, 1.1e9),
    (PPOHyperparameters, "reward_std", 1e-9, 0.0, 1e9, 1.1e9),
    (PPOHyperparameters, "reward_clip", 1e-9, 0.0, 1e9, 1.1e9),
    (PPOPtx, "ptx_coef", 0.0, -TINY, 1e6, 1.1e6),
    (SafeRLHF, "cost_limit", -1e9, -1.1e9, 1e9, 1.1e9),
    (SafeRLHF, "cost_std", 1e-9, 0.0, 1e9, 1.1e9),
    (SafeRLHF, "multiplier", 1e-6, 9e-7, 100.0, 100.1),
    (SafeRLHF, "max_multiplier", 1.0, 0.99, 1e6, 1.1e6),
    (SafeRLHF, "multiplier_lr", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "samples_per_prompt", 2, 1, None, None),
    (GRPO, "beta", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "delta", 1.201, 1.2, 1e6, 1.1e6),
    (GRPO, "ratio_cap", 1.0, 0.99, 1e6, 1.1e6),
    (GRPO, "sapo_temperature_up", 1e-6, 9e-7, 1e6, 1.1e6),
    (GRPO, "sapo_temperature_down", 1e-6, 9e-7, 1e6, 1.1e6),
    (GRPO, "vespo_k_up", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "vespo_lambda_up", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "vespo_k_down", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "vespo_lambda_down", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "off_policy_threshold", 0.0, -TINY, 1e6, 1.1e6),
    (GRPO, "groups_per_step", 0, -1, None, None),
    (RLOO, "samples_per_prompt", 2, 1, None, None),
    (RLOO, "kl_coef", 0.0, -TINY, 1e6, 1.1e6),
    (RLOO, "reward_clip", 0.0, -TINY, 1e6, 1.1e6),
    (ReinforcePlusPlus, "gamma", 0.0, -TINY, 1.0, 1.01),
    (ReinforcePlusPlus, "kl_coef", 0.0, -TINY, 1e6, 1.1e6),
    (ReinforcePlusPlus, "reward_clip", 0.0, -TINY, 1e6, 1.1e6),
    (ReMax, "kl_coef", 0.0, -TINY, 1e6, 1.1e6),
    (DPO, "beta", 1e-9, 0.0, 1e6, 1.1e6),
    (DPO, "label_smoothing", 0.0, -TINY, 0.49, 0.5),
    (DPO, "sft_coef", 0.0, -TINY, 1e6, 1.1e6),
    (DPO, "epochs", 1, 0, 1024, 1025),
    (PairLoss, "score_square_coef", 0.0, -TINY, 1e6, 1.1e6),
    (PairLoss, "centre_coef", 0.0, -TINY, 1e6, 1.1e6),
    (PairLoss, "epochs", 1, 0, 1024, 1025),
]


@pytest.mark.parametrize(
    ("options", "name", "least", "below", "largest", "above"),
    [pytest.param(*bound, id=f"{bound[0].__name__}-{bound[1]}") for bound in BOUNDS],
)
def test_bounds(options: Any, name: str, least: Any, below: Any, largest: Any, above: Any) -> None:
    for value in (least, largest):
        if value is not None:
            assert getattr(options(**{name: value}), name) == value
    for value in (below, above, float("nan")):
        if value is not None:
            with pytest.raises(UserError, match=name):
                options(**{name: value})


def test_every_number_has_bounds() -> None:
    bounded = {(options, name) for options, name, *_ in BOUNDS}
    for options, defaults in DEFAULTS.items():
        for name, value in defaults.items():
            inherited = [*options.__mro__, GRPO, PPOHyperparameters]  # what all have is tried with these
            if name not in OF_GENERATION and not isinstance(value, bool | str):
                assert any((one, name) in bounded for one in inherited), (options, name)


@pytest.mark.parametrize(
    ("options", "name", "choices"),
    [
        (PPOHyperparameters, "kl_estimator", ("k1", "k2", "k3")),
        (PPOHyperparameters, "kl_controller", ("fixed", "adaptive")),
        (
            PPOHyperparameters,
            "importance_correction",
            ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        ),
        (GRPO, "loss_type", ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")),
        (GRPO, "scale_rewards", ("group", "batch", "none")),
        (GRPO, "ratio", ("token", "sequence", "sequence_token")),
        (ReinforcePlusPlus, "kl_estimator", ("k1", "k2", "k3")),
        (ReMax, "kl_estimator", ("k1", "k2", "k3")),
        (DPO, "loss_type", ("sigmoid", "hinge", "ipo", "robust")),
    ],
)
def test_choices(options: Any, name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert getattr(options(**{name: choice}), name) == choice
    for other in ("other", None):  # None is no choice where it is not the default
        with pytest.raises(UserError, match=f"{name}={other!r} is not known; choose one of {', '.join(choices)}"):
            options(**{name: other})


@pytest.mark.parametrize("options", [PPOHyperparameters, GRPO, RLOO, ReinforcePlusPlus, ReMax, SafeRLHF])
def test_what_learns_draws_with_a_temperature(options: Any) -> None:
    with pytest.raises(UserError, match=f"temperature=0 draws no samples to learn from; {options.__name__}"):
        options(temperature=0.0)
    assert options(temperature=1e-6).temperature == 1e-6


def test_options_that_go_together_and_others() -> None:
    assert ReinforcePlusPlus(baseline="group", samples_per_prompt=2).samples_per_prompt == 2
    assert ReinforcePlusPlus(baseline="none", samples_per_prompt=1).samples_per_prompt == 1
    assert GRPO(delta=1.29, clip_high=0.28).delta == 1.29
    with pytest.raises(UserError, match=r"delta=1.27 must be above 1.28 \(1 \+ clip_high\)"):
        GRPO(delta=1.27, clip_high=0.28)
    assert GRPO(groups_per_step=3, drop_uniform_groups=True).groups_per_step == 3
    for correction in ("token_truncate", "token_mask"):
        assert GRPO(loss_type="vespo", importance_correction=correction).loss_type == "vespo"
    for correction in ("sequence_truncate", "sequence_mask"):
        assert GRPO(loss_type="dapo", importance_correction=correction).loss_type == "dapo"
        with pytest.raises(UserError, match=f"'{correction}' does not go with loss_type='vespo'"):
            GRPO(loss_type="vespo", importance_correction=correction)
    assert SafeRLHF(multiplier=5.0, max_multiplier=5.0).multiplier == 5.0
    for loss_type in ("sigmoid", "robust"):
        assert DPO(loss_type=loss_type, label_smoothing=0.2).label_smoothing == 0.2
    for loss_type in ("hinge", "ipo"):
        with pytest.raises(UserError, match=r"label_smoothing=0.2 is for the losses sigmoid and robust"):
            DPO(loss_type=loss_type, label_smoothing=0.2)


def test_the_greedy_response_is_drawn_as_the_others_but_for_the_temperature() -> None:
    options = ReMax(**{"max_new_tokens": 9, "eos_token": 3, "temperature": 0.7, "top_k": 5, "min_new_tokens": 2})
    greedy = options.greedy
    assert type(greedy) is GenerationOptions
    assert greedy == GenerationOptions(max_new_tokens=9, eos_token=3, temperature=0.0, top_k=5, min_new_tokens=2)


def test_calls_tell_the_planner_the_options_of_their_hyperparameters() -> None:
    ppo = PPOHyperparameters(
        **{"epochs": 3, "max_new_tokens": 7, "samples_per_prompt": 2, "kv_cache_tokens": 99, "decode_graphs": "call"}
    )
    generate = Generate.by(ppo, name="second")
    assert (generate.max_new_tokens, generate.samples_per_prompt, generate.name) == (7, 2, "second")
    assert (generate.kv_cache_tokens, generate.decode_graphs) == (99, "call")


def test_an_update_takes_from_its_hyperparameters_what_it_is_not_told() -> None:
    ppo = PPOHyperparameters(epochs=3, temperature=0.7, max_kl=0.1)
    update = Update(ppo_policy(ppo))
    assert (update.epochs, update.temperature, update.max_kl) == (3, 0.7, 0.1)
    told = Update(ppo_policy(ppo), epochs=2, temperature=0.5, max_kl=0.2)
    assert (told.epochs, told.temperature, told.max_kl) == (2, 0.5, 0.2)
    plain = Update(sft_loss())
    assert (plain.epochs, plain.temperature, plain.max_kl) == (1, 1.0, None)
    with pytest.raises(UserError, match=r"was given a LossFunction for a loss; .*call it with its hyperparameters"):
        Update(sft_loss)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="rows='texts' is not known; choose one of rollout, examples, pairs"):
        Update(sft_loss(), rows="texts")  # type: ignore[arg-type]


def test_the_sequences_that_a_call_reads() -> None:
    """None for one rollout, which the planner takes for granted."""
    for call in (Generate(max_new_tokens=1), Logprobs(), Values(), Score(), Update(sft_loss())):
        assert call.sequence_keys == ()
    assert Score(batch=inputs(seq="sample")).sequence_keys == ("sample",)
    assert Update(sft_loss(), rows="examples").sequence_keys == ("tokens",)
    assert Logprobs(rows="pairs").sequence_keys == Measure(sft_loss(), rows="pairs").sequence_keys
    assert Logprobs(rows="pairs").sequence_keys == ("chosen", "rejected")
    examples = Term(sft_loss(), batch=inputs("prompt_length", tokens="texts"), rows="examples")
    assert Update(sft_loss(), also=(examples,)).sequence_keys == ("seq", "texts")


def test_the_keys_that_a_call_makes() -> None:
    assert Generate(max_new_tokens=1).output_data == ("seq", "logprob")
    assert Generate(max_new_tokens=1, outputs=("sample",)).output_data == ("sample", "logprob")
    assert Logprobs().output_data == ("ref_logprob",)
    assert Logprobs(rows="pairs").output_data == ("chosen_ref_logprob", "rejected_ref_logprob")
    assert Logprobs(outputs=("old_logprob",)).output_data == ("old_logprob",)
    assert (Values().output_data, Score().output_data, Update(sft_loss()).output_data) == (("value",), ("reward",), ())


def test_bounds_of_rewards_on_texts() -> None:
    for name, good, bad in (("processes", (0, 1024), (-1, 1025)), ("seconds_per_sample", (0.0, 1e6), (-TINY, 1.1e6))):
        for value in good:
            assert getattr(TextReward(rewards=("r.py:f",), tokenizer="t", **{name: value}), name) == value
        for value in bad:
            with pytest.raises(UserError, match=name):
                TextReward(rewards=("r.py:f",), tokenizer="t", **{name: value})
    assert TextReward(rewards=("r.py:f",), tokenizer="t").processes_per_worker == 1
    assert TextReward(rewards=("r.py:f",), tokenizer="t", processes=5).processes_per_worker == 5


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GRPO(samples_per_prompt=1), "samples_per_prompt=1"),
        (lambda: GRPO(loss_type="gspo"), "loss_type='gspo'"),
        (lambda: GRPO(delta=1.1), "delta=1.1"),
        (lambda: GRPO(groups_per_step=2), "groups_per_step=2"),
        (lambda: GRPO(loss_type="vespo", importance_correction="sequence_mask"), "sequence_mask"),
        (lambda: GRPO(beta=-0.1), "beta"),
        (lambda: GRPO(temperature=0.0), "temperature=0"),
        (lambda: GRPO(epochs=0), "epochs"),
        (lambda: RLOO(samples_per_prompt=1), "samples_per_prompt=1"),
        (lambda: RLOO(clip_low=2.0), "clip_low"),
        (lambda: ReinforcePlusPlus(baseline="group"), "samples_per_prompt=1"),
        (lambda: ReinforcePlusPlus(kl_estimator="k4"), "k4"),
        (lambda: PPOHyperparameters(dual_clip=0.5), "dual_clip=0.5"),
        (lambda: PPOHyperparameters(max_kl=0.0), "max_kl"),
        (lambda: PPOHyperparameters(kl_controller="adaptative"), "kl_controller"),
        (lambda: SafeRLHF(normalise_values=True), "normalise_values"),
        (lambda: SafeRLHF(multiplier=200.0), "max_multiplier"),
        (lambda: DPO(label_smoothing=0.5), "label_smoothing"),
        (lambda: DPO(loss_type="ipo", label_smoothing=0.1), "label_smoothing=0.1"),
        (lambda: PairLoss(centre_coef=-1.0), "centre_coef"),
    ],
)
def test_hyperparameters_are_checked(make: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        make()
