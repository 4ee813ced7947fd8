"""The tensor functions of the algorithms: numbers worked out by hand, what counts and what does not, and that the
division of a batch over ranks changes nothing."""

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.dpo.config import DPO
from realhf.algorithms.dpo.functions import dpo_pairs
from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.grpo.functions import group_advantages, grpo_policy
from realhf.algorithms.ppo.config import PPOActor, PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages, ppo_policy, ppo_policy_with_entropy, ppo_value
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.reinforce_pp.functions import reinforce_pp_advantages, reinforce_pp_policy
from realhf.algorithms.remax.config import ReMax
from realhf.algorithms.remax.functions import remax_advantages
from realhf.algorithms.reward.config import PairLoss
from realhf.algorithms.reward.functions import pairwise, safe_pairwise
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.rloo.functions import rloo_advantages
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.safe_rlhf.functions import judged, safe_advantages, safe_cost_value
from realhf.api.script.columns import Columns
from realhf.base.errors import UserError
from realhf.engine.batch import Batch
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import LENGTHS, batch_of, columns_of, random_columns

END = 2


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_columns(found: list[torch.Tensor], expected: list[list[float]], tolerance: float = 1e-9) -> None:
    for column, numbers in zip(found, expected, strict=True):
        torch.testing.assert_close(column, f64(*numbers), rtol=tolerance, atol=tolerance)


def rollout(*responses: list[int], logprob: list[list[float]] | None = None, **others: list[torch.Tensor]) -> Columns:
    """Samples with a prompt of one token, the given responses, and log-probabilities of 0 unless given."""
    columns: dict[str, Any] = {
        "prompt": [torch.tensor([1])] * len(responses),
        "seq": [torch.tensor([1, *response]) for response in responses],
        "logprob": [f64(*row) for row in logprob or [[0.0] * len(response) for response in responses]],
    }
    return Columns(range(len(responses)), columns | others)


def rewards(*values: float, valid: list[float] | None = None) -> Columns:
    data = {"reward": list(f64(*values).split(1))}
    if valid is not None:
        data["valid"] = list(f64(*valid).split(1))
    return Columns(range(len(values)), data)


def context(samples: int, group: int = 1, **settings: Any) -> SingleContext:
    return SingleContext(batch_size=samples, samples_per_prompt=group, **settings)


def test_uniform_groups_are_left_out_and_made_up_for() -> None:
    """Groups of two: uniform, informative, informative, uniform. One group a step, then two because one was owed."""
    samples = rollout(*[[5]] * 8)
    grpo = GRPO(drop_uniform_groups=True, groups_per_step=1, beta=0.0)
    kept = context(8, 2)

    def step(*values: float) -> list[float]:
        made, stats = group_advantages(samples, rewards(*values), None, grpo, context=kept)
        assert stats["reward_mean"] == (sum(values), 8.0), "the mean is that of all responses"
        return torch.cat(made["valid"]).tolist()

    assert step(1, 1, 0, 1, 3, 2, 0, 0) == [0, 0, 1, 1, 0, 0, 0, 0]
    assert step(*[1.0] * 8) == [0] * 8
    assert step(1, 1, 0, 1, 3, 2, 0, 1) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert step(1, 2, 0, 1, 3, 2, 0, 1) == [1, 1, 0, 0, 0, 0, 0, 0]
    all_of_them = replace(grpo, groups_per_step=0)
    made, stats = group_advantages(samples, rewards(1, 1, 0, 1, 3, 2, 0, 0), None, all_of_them, context=context(8, 2))
    assert torch.cat(made["valid"]).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert stats["informative_groups"] == (2.0, 4.0)


def test_truncated_responses_teach_nothing_and_still_count_in_their_group() -> None:
    """At most 3 tokens: the second response has 3 and no end, the third ends with its third, the last by a sequence."""
    samples = rollout([5, END], [5, 5, 5], [5, 5, END], [5, 7, 8])
    grpo = GRPO(**{"max_new_tokens": 3, "eos_token": END, "stop_sequences": ((7, 8),)}, mask_truncated=True, beta=0.0)
    made, _ = group_advantages(samples, rewards(1, 3, 1, 3), None, grpo, context=context(4, 4))
    assert torch.cat(made["valid"]).tolist() == [1, 0, 1, 1]
    assert made["advantage"][0][0] == pytest.approx(-1 / (math.sqrt(4 / 3) + 1e-4))


def test_importance_weights_need_the_policys_own_log_probabilities() -> None:
    samples = rollout([5, 5], [5], logprob=[[-1.0, -1.0], [-1.0]])
    grpo = GRPO(importance_correction="token_truncate", importance_high=1.5, beta=0.0)
    old = Columns((0, 1), {"old_logprob": [f64(-1.0, -1 + math.log(1.2)), f64(-1 + math.log(9))]})
    made, _ = group_advantages(samples, rewards(0, 1), None, grpo, old=old, context=context(2, 2))
    assert_columns(made["importance"], [[1.0, 1.2], [1.5]])
    with pytest.raises(UserError, match="old_logprob"):
        group_advantages(samples, rewards(0, 1), None, grpo, context=context(2, 2))


def test_reinforce_plus_plus() -> None:
    """KL of 1 at the first token of the first response, kl_coef 0.5: rewards -0.5, 2 and 0."""
    samples = rollout([5, 5], [5], logprob=[[0.0, 0.0], [0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, 0.0), f64(0.0)]})
    options = ReinforcePlusPlus(kl_coef=0.5)
    made, _ = reinforce_pp_advantages(samples, rewards(2, 0), ref, options, context=context(2))
    # To go: 1.5, 2, 0: mean 7/6, squares 6.25, variance 6.25/3 - 49/36 = 26/36.
    mean, deviation = 7 / 6, math.sqrt(26 / 36)
    assert_columns(made["advantage"], [[(1.5 - mean) / deviation, (2 - mean) / deviation], [-mean / deviation]], 1e-7)


def test_reinforce_plus_plus_with_the_baseline_of_groups() -> None:
    samples = rollout([5, 5], [5])
    options = ReinforcePlusPlus(baseline="group", samples_per_prompt=2, kl_coef=0.5)
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, 0.0), f64(0.0)]})
    made, _ = reinforce_pp_advantages(samples, rewards(3, 0), ref, options, context=context(2, 2))
    # 1.5, 1.5, -1.5: mean 1/2, variance 2.25 - 1/4 = 2.
    assert_columns(made["advantage"], [[1 / math.sqrt(2)] * 2, [-math.sqrt(2)]], 1e-7)
    data = {**vars(samples)["_data"], **made, "ref_logprob": ref.ref_logprob}
    loss, stats = reinforce_pp_policy(f64(0.0, 0.0, 0.0), Batch((0, 1), data), options)
    # At a ratio of 1: -A, plus 0.5 x 1/2 at the first token.
    assert_columns([loss], [[-1 / math.sqrt(2) + 0.25, -1 / math.sqrt(2), math.sqrt(2)]], 1e-7)
    assert stats["ref_kl"] == (0.5, 3.0)


def test_remax() -> None:
    samples = rollout([5, 5], [5])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, -2.0), f64(0.0)]})
    made, stats = remax_advantages(samples, rewards(2, 1), rewards(0.5, 1.5), ref, ReMax(kl_coef=0.1))
    # Rewards -0.1, -0.2 + 2 and 1; to go 1.7, 1.8, 1; less 0.5 and 1.5.
    assert_columns(made["advantage"], [[1.2, 1.3], [-0.5]])
    assert_columns(made["reward"], [[2.0], [1.0]])
    assert stats["greedy_reward_mean"] == (2.0, 2.0)
    made, _ = remax_advantages(samples, rewards(2, 1), rewards(0.5, 1.5, valid=[1, 0]), ref, ReMax(kl_coef=0.1))
    assert torch.cat(made["valid"]).tolist() == [1, 0]
    assert made["advantage"][1].tolist() == [0]
    assert ReMax(temperature=0.7, top_k=5).greedy.temperature == 0
    assert ReMax(temperature=0.7, top_k=5, max_new_tokens=9).greedy.max_new_tokens == 9


def test_safe_rlhf() -> None:
    """One token a response, values of 0, no whitening: advantages are rewards and costs themselves."""
    samples = rollout([5], [5], logprob=[[0.0], [0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0), f64(0.0)]})
    zeros = Columns((0, 1), {"value": [f64(0.0), f64(0.0)]})
    safe = SafeRLHF(
        **{"kl_coef": 0.1, "whiten_advantages": False, "multiplier": 3.0, "multiplier_lr": 0.5, "cost_limit": 0.5},
        cost_std=2.0,
    )
    kept = context(2)

    def judge(*values: float) -> Columns:
        return Columns((0, 1), judged(rewards(*values), zeros))

    made, stats = safe_advantages(samples, ref, judge(2, 1), judge(4, -2), safe, context=kept)
    # Reward 2 - 0.1 and 1; cost 4/2 + 0.1 and -1; (A_r - 3 A_c) / 4.
    assert_columns(made["advantage"], [[(1.9 - 6.3) / 4], [(1 + 3) / 4]])
    assert_columns(made["return"], [[1.9], [1.0]])
    assert_columns(made["cost_return"], [[2.1], [-1.0]])
    assert stats["cost_mean"] == (2.0, 2.0)
    assert stats["unsafe"] == (1.0, 2.0)
    assert stats["multiplier"] == pytest.approx((3.0, 1.0))
    # The mean cost 1 is above 0.5: log 3 + 0.5 x 3 x 0.5.
    assert kept.state["log_multiplier"] == pytest.approx(math.log(3) + 0.75)
    _, stats = safe_advantages(samples, ref, judge(2, 1), judge(-4, -2), safe, context=kept)
    assert stats["multiplier"][0] == pytest.approx(3 * math.exp(0.75))
    assert kept.state["log_multiplier"] < math.log(3)

    batch = Batch((0, 1), {**vars(samples)["_data"], **made})
    losses, stats = safe_cost_value(f64(0.1, 0.0), batch, replace(safe, value_clip=0.0))
    assert_columns([losses], [[0.5 * 2.0**2, 0.5]])
    assert stats["cost_return_mean"] == pytest.approx((1.1, 2.0))


def test_adaptive_kl() -> None:
    """A divergence of 3 a response with a target of 2: at most 20 % up, times 2 samples of 10."""
    samples = rollout([5, 5], [5, 5], logprob=[[0.0, 0.0], [0.0, 0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, -3.0), f64(-1.0, -1.0)]})
    values = Columns((0, 1), {"value": [f64(0.0, 0.0)] * 2})
    ppo = PPOHyperparameters(
        **{"kl_controller": "adaptive", "kl_target": 2.0, "kl_horizon": 10, "kl_coef": 0.1, "gamma": 1.0, "lam": 1.0},
        whiten_advantages=False,
    )
    kept = context(2)
    made, stats = ppo_advantages(samples, rewards(1, 1), ref, values, ppo, context=kept)
    assert stats["kl_coef"] == (0.1, 1.0)
    assert_columns(made["return"], [[1 - 0.4, 1 - 0.3], [1 - 0.2, 1 - 0.1]])
    assert kept.state["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 0.2))
    made, stats = ppo_advantages(samples, rewards(1, 1), ref, values, ppo, context=kept)
    assert stats["kl_coef"][0] == pytest.approx(0.104)
    assert made["return"][0][0] == pytest.approx(1 - 4 * 0.104)


def test_normalised_values() -> None:
    """The first step's values are returns themselves; then they are in units of the returns' mean and deviation."""
    samples, values = rollout([5], [5]), Columns((0, 1), {"value": [f64(0.5), f64(-0.5)]})
    ref = Columns((0, 1), {"ref_logprob": [f64(0.0), f64(0.0)]})
    ppo = PPOHyperparameters(normalise_values=True, kl_coef=0.0, whiten_advantages=False, reward_clip=100)
    kept = context(2)
    made, _ = ppo_advantages(samples, rewards(4, 8), ref, values, ppo, context=kept)
    assert_columns(made["advantage"], [[3.5], [8.5]])
    assert_columns(made["return"], [[-1.0], [1.0]])  # mean 6, deviation 2
    made, _ = ppo_advantages(samples, rewards(4, 8), ref, values, ppo, context=kept)
    assert_columns(made["advantage"], [[4 - 7], [8 - 5]])  # 0.5 stands for 7, -0.5 for 5


def test_ppo_losses_with_their_options() -> None:
    data = {
        **vars(rollout([5, 5]))["_data"],
        "advantage": [f64(1.0, -1.0)],
        "return": [f64(1.0, 1.0)],
        "value": [f64(0.0, 0.0)],
        "importance": [f64(0.5, 2.0)],
    }
    batch, ppo = Batch((0,), data), PPOHyperparameters(dual_clip=3.0, entropy_coef=0.1, value_clip=0.0)
    logprob = f64(0.0, math.log(5))
    loss, stats = ppo_policy(logprob, batch, ppo)
    assert_columns([loss], [[-0.5, 6.0]])
    assert stats["clip_fraction"] == (1.0, 2.0)
    loss, stats = ppo_policy_with_entropy(logprob, batch, ppo, entropy=f64(1.0, 2.0))
    assert_columns([loss], [[-0.6, 5.8]])
    assert stats["policy_entropy"] == (3.0, 2.0)
    loss, _ = ppo_value(f64(3.0, 1.0), batch, ppo)
    assert_columns([loss], [[2.0, 0.0]])
    # Where a call computed the policy's log-probabilities again, ratios are of these.
    loss, _ = ppo_policy(logprob, batch.with_data(old_logprob=[f64(0.0, math.log(5))]), replace(ppo, entropy_coef=0.0))
    assert_columns([loss], [[-0.5, 2.0]])


def test_dpo_without_a_reference_and_with_a_term_of_the_chosen() -> None:
    whole = {"prompt": [torch.tensor([1])], "chosen": [torch.tensor([1, 4, 4])], "rejected": [torch.tensor([1, 4])]}
    dpo = DPO(beta=1.0, reference_free=True, sft_coef=0.5)
    loss, stats = dpo_pairs(f64(-1.0), f64(-1 - math.log(3)), Batch((0,), whole), dpo)
    assert_columns([loss], [[math.log(4 / 3) + 0.5 * 1.0 / 2]])
    assert stats["pair_accuracy"] == (1.0, 1.0)


def test_pairs_that_differ_by_rounding_alone_are_half_right() -> None:
    """The policy is the reference before its first step, and plans round sums of log-probabilities differently."""
    chosen, rejected, reference = f64(-7.1, -7.1, -7.1), f64(-7.3, -7.3, -7.3), f64(-7.1, -7.1 + 1e-14, -7.2)
    sides = {name: [torch.tensor([1, 4, 4])] * 3 for name in ("chosen", "rejected")}
    references = {"chosen_ref_logprob": list(reference.split(1)), "rejected_ref_logprob": list(rejected.split(1))}
    batch = Batch((0, 1, 2), {"prompt": [torch.tensor([1])] * 3, **sides, **references})
    assert dpo_pairs(chosen, rejected, batch, DPO())[1]["pair_accuracy"] == (0.5 + 0.5 + 1.0, 3.0)


def test_losses_of_reward_and_cost_models() -> None:
    pairs = PairLoss(score_square_coef=0.1, centre_coef=0.01)
    loss, stats = pairwise(f64(2.0), f64(1.0), Batch((0,), {"margin": [f64(1 - math.log(3))]}), pairs)
    assert_columns([loss], [[math.log(4 / 3) + 0.1 * 5 + 0.01 * 9]])
    assert stats["pair_accuracy"] == (1.0, 1.0)
    signs = {"chosen_unsafe": [f64(0.0)], "rejected_unsafe": [f64(1.0)]}
    loss, stats = safe_pairwise(f64(0.0), f64(math.log(3)), Batch((0,), signs), PairLoss(score_square_coef=0.0))
    assert_columns([loss], [[2 * math.log(4 / 3) + math.log(2)]])
    assert stats["unsafe_accuracy"] == (1.0, 2.0)


PPO_OPTIONS = PPOHyperparameters(kl_controller="adaptive", kl_target=0.1, normalise_values=True)
FUNCTIONS = {
    "ppo": lambda x, c: ppo_advantages(x, x, x, x, PPO_OPTIONS, context=c),
    "grpo": lambda x, c: group_advantages(x, x, x, GRPO(scale_rewards="group"), context=c),
    "grpo_batch": lambda x, c: group_advantages(x, x, x, GRPO(scale_rewards="batch"), context=c),
    "grpo_filter": lambda x, c: group_advantages(x, x, x, GRPO(drop_uniform_groups=True, groups_per_step=1), context=c),
    "rloo": lambda x, c: rloo_advantages(x, x, x, RLOO(normalise_advantages=True), context=c),
    "reinforce_pp": lambda x, c: reinforce_pp_advantages(x, x, x, ReinforcePlusPlus(), context=c),
    "reinforce_pp_group": lambda x, c: reinforce_pp_advantages(
        x, x, x, ReinforcePlusPlus(baseline="group", samples_per_prompt=4), context=c
    ),
    "safe": lambda x, c: safe_advantages(x, x, x, x, SafeRLHF(), context=c),
}


def on_ranks(function: Any, data: dict[str, list[torch.Tensor]], ranks: list[list[int]]) -> list[Any]:
    """What a function gives on each rank, with its sums over all of them (one thread a rank)."""

    barrier, values = threading.Barrier(len(ranks), timeout=30), [torch.zeros(())] * len(ranks)

    def sum_of(rank: int) -> Any:
        def total(mine: torch.Tensor) -> torch.Tensor:
            values[rank] = mine
            barrier.wait()
            found = sum(values[1:], values[0].clone())
            barrier.wait()
            return found

        return total

    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        surroundings = context(len(LENGTHS), 4)
        surroundings.sum_over_data_parallel = sum_of(rank)
        made = function(columns_of(data, places=ranks[rank]), surroundings)[0]
        results[rank] = (made, surroundings.state)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=8)
@given(order=st.permutations(range(len(LENGTHS))), cut=st.integers(1, len(LENGTHS) - 1), seed=st.integers(0, 3))
def test_the_division_over_ranks_changes_nothing(name: str, order: list[int], cut: int, seed: int) -> None:
    """One rank with all samples in order, and two with any of them in any order: the same columns, the same state."""
    data = random_columns(seed)
    data["valid"] = [f64(float(i != 2)) for i in range(len(LENGTHS))]
    ((whole, state),) = on_ranks(FUNCTIONS[name], data, [list(range(len(LENGTHS)))])
    ranks = [order[:cut], order[cut:]]
    for places, (made, its_state) in zip(ranks, on_ranks(FUNCTIONS[name], data, ranks), strict=True):
        assert its_state == pytest.approx(state, rel=1e-12)
        for key, column in made.items():
            for place, values in zip(places, column, strict=True):
                torch.testing.assert_close(values, whole[key][place], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples_that_do_not_count_change_nothing(name: str) -> None:
    data = random_columns(1)
    data["valid"] = [f64(float(i not in (2, 5))) for i in range(len(LENGTHS))]
    ((before, state),) = on_ranks(FUNCTIONS[name], data, [list(range(len(LENGTHS)))])
    for key in ("reward", "logprob", "value"):
        data[key] = [x + 7 if i in (2, 5) else x for i, x in enumerate(data[key])]
    ((after, its_state),) = on_ranks(FUNCTIONS[name], data, [list(range(len(LENGTHS)))])
    assert its_state == state
    for i in set(range(len(LENGTHS))) - {2, 5}:
        assert torch.equal(after["advantage"][i], before["advantage"][i])
    assert all((after["advantage"][i] == 0).all() for i in (2, 5))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
def test_good_responses_become_likelier_and_bad_ones_less(loss_type: str, ratio: str) -> None:
    """Of the policy that drew them; and each response's gradient is its own, whatever else is in the micro-batch."""
    data = random_columns(0)
    advantage = [torch.full_like(x, 1.0 if i % 2 else -1.0) for i, x in enumerate(data["logprob"])]
    grpo = GRPO(loss_type=loss_type, ratio=ratio, beta=0.0)

    def gradient(places: list[int]) -> list[torch.Tensor]:
        chosen = {key: [column[i] for i in places] for key, column in data.items()}
        batch = batch_of(chosen, "logprob", advantage=[advantage[i] for i in places])
        logprob = torch.cat(chosen["logprob"]).requires_grad_()
        grpo_policy(logprob, batch, grpo)[0].sum().backward()
        return list(logprob.grad.split([LENGTHS[i] for i in places]))

    everything = gradient(list(range(len(LENGTHS))))
    for i, of_response in enumerate(everything):
        assert (of_response * (1 if i % 2 else -1) < 0).all()
    for i, alone in zip((3, 1), gradient([3, 1]), strict=True):
        torch.testing.assert_close(alone, everything[i], rtol=1e-12, atol=1e-12)


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
        (lambda: PPOActor(ppo=PPOHyperparameters(mask_truncated=True)), "mask_truncated"),
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
