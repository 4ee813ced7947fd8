"""Fine-tuning, reward modelling and rule-checked accuracy as model function calls."""

import math

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from realhf.algorithms.reward.config import PairLoss, pairwise_loss, sampled_pairwise_loss, with_samples
from realhf.algorithms.script.accuracy import SampledAccuracyInterface
from realhf.algorithms.script.rollouts import GenerateInterface, ScoreInterface
from realhf.algorithms.script.update import MeasureInterface, UpdateInterface
from realhf.algorithms.sft.config import sft_loss
from realhf.api import Generate, Measure, SampledAccuracy, Score, Update, inputs
from realhf.base.errors import UserError
from realhf.engine.batch import Batch

EOS = 2
SFT = UpdateInterface(Update(sft_loss(), rows="examples"))


def pairwise(score_square_coef: float = 0.001) -> UpdateInterface:
    return UpdateInterface(Update(pairwise_loss(PairLoss(score_square_coef=score_square_coef)), rows="pairs"))


def sampled(score_square_coef: float = 0.001) -> UpdateInterface:
    loss = sampled_pairwise_loss(PairLoss(score_square_coef=score_square_coef))
    return UpdateInterface(Update(loss, batch=with_samples(inputs()), rows="pairs"))


def tensors(*sequences: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(s) for s in sequences]


@pytest.fixture
def answers() -> Batch:
    tokens = tensors([1, 4, 5, 2], [1, 6, 3, 4, 2], [1, 5, 4, 2], [1, 3, 3, 5, 6, 2])
    return Batch((0, 1, 2, 3), {"tokens": tokens, "prompt_length": tensors([2], [3], [2], [3])})


def test_sft_loss_is_the_mean_over_answer_tokens_only(language_model, context, answers):
    model = language_model()
    losses = []
    with torch.no_grad():
        for tokens, prompt_length in zip(answers.data["tokens"], answers.data["prompt_length"], strict=True):
            logprobs = model.module(tokens[None])[0].log_softmax(-1)
            losses += [-logprobs[j - 1, tokens[j]].item() for j in range(int(prompt_length), len(tokens))]
        top = [
            int(model.module(tokens[None])[0, j - 1].argmax()) == int(tokens[j])
            for tokens, prompt_length in zip(answers.data["tokens"], answers.data["prompt_length"], strict=True)
            for j in range(int(prompt_length), len(tokens))
        ]
    stats = SFT.train_step(model, [answers], context()).stats
    assert stats["token_accuracy"] == (sum(top), 9)
    total, weight = stats["loss"]
    assert weight == len(losses) == 9
    assert total == pytest.approx(sum(losses), rel=1e-12)


def test_sft_loss_under_a_mask_is_the_mean_over_its_tokens(language_model, context, answers):
    model = language_model()
    masked = answers.with_data(loss_mask=tensors([0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1, 0, 1]))
    losses, top = [], []
    with torch.no_grad():
        for tokens, mask in zip(masked.data["tokens"], masked.data["loss_mask"], strict=True):
            logprobs = model.module(tokens[None])[0].log_softmax(-1)
            losses += [-logprobs[j - 1, tokens[j]].item() for j in range(1, len(tokens)) if mask[j]]
            top += [int(logprobs[j - 1].argmax()) == int(tokens[j]) for j in range(1, len(tokens)) if mask[j]]
    stats = SFT.train_step(model, [masked], context(micro_batches=2)).stats
    assert stats["token_accuracy"] == (sum(top), 7)
    total, weight = stats["loss"]
    assert weight == len(losses) == 7
    assert total == pytest.approx(sum(losses), rel=1e-12)
    # The mask of all answer tokens changes nothing.
    whole = [
        torch.tensor([0] * int(length) + [1] * (len(tokens) - int(length)))
        for tokens, length in zip(answers.data["tokens"], answers.data["prompt_length"], strict=True)
    ]
    same = SFT.train_step(language_model(), [answers.with_data(loss_mask=whole)], context()).stats
    assert same == SFT.train_step(language_model(), [answers], context()).stats


def test_sft_with_micro_batches_takes_the_same_step(language_model, context, answers):
    after = []
    for micro_batches in (1, 2, 4):
        model = language_model()
        SFT.train_step(model, [answers], context(micro_batches=micro_batches))
        after.append(model.module.head.weight.detach())
    torch.testing.assert_close(after[1], after[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after[2], after[0], rtol=1e-12, atol=1e-14)


def test_sft_learns_answers_and_not_prompts(language_model, context, answers):
    model = language_model()
    first, *_, last = [SFT.train_step(model, [answers], context()).stats["loss"][0] for _ in range(60)]
    assert last < 0.5 * first


def test_ranks_without_outputs_return_nothing(language_model, scalar_model, context, answers, prompts):
    silent = context(holds_outputs=False)
    assert SFT.train_step(language_model(), [answers], silent).stats == {}
    rollout = GenerateInterface(Generate(max_new_tokens=3, eos_token=EOS, statistic="length"))
    result = rollout.generate(language_model(), prompts, silent)
    assert result.outputs == {}
    assert result.stats == {}
    scored = Batch((0,), {"seq": tensors([1, 4, 2])})
    pair = Batch((0,), {"prompt": tensors([1]), "chosen": tensors([1, 4, 2]), "rejected": tensors([1, 5])})
    assert pairwise().train_step(scalar_model(), [pair], silent).stats == {}
    measure = MeasureInterface(Measure(pairwise_loss(PairLoss()), rows="pairs"))
    assert measure.inference(scalar_model(), pair, silent).stats == {}
    assert ScoreInterface(Score()).inference(scalar_model(), scored, silent).outputs == {}


def score(model, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return model.module(tokens[None])[0, -1, 0].item()


def test_sequence_reward_is_the_score_of_the_last_token(scalar_model, context):
    model = scalar_model()
    seq = tensors([1, 4, 5, 2], [1, 6, 2], [1, 3, 3, 5, 6, 2], [1, 7, 2])
    result = ScoreInterface(Score()).inference(model, Batch((0, 1, 2, 3), {"seq": seq}), context(micro_batches=2))
    rewards = result.outputs["reward"]
    assert [r.shape for r in rewards] == [(1,)] * 4
    assert [r.item() for r in rewards] == pytest.approx([score(model, s) for s in seq], rel=1e-12)


@pytest.fixture
def preferences() -> Batch:
    """Ids 4 and 6 are even: 4's sample is wrong, 6's is right. Ids 5 and 7 keep their rejected answers."""
    return Batch(
        (4, 5, 6, 7),
        {
            "prompt": tensors([1], [1], [1], [1]),
            "chosen": tensors([1, 4, 5, 2], [1, 3, 3, 2], [1, 6, 7, 2], [1, 4, 4, 5, 2]),
            "rejected": tensors([1, 4, 6, 2], [1, 3, 2], [1, 6, 6, 2], [1, 4, 5, 5, 2]),
            "sample": tensors([1, 4, 7, 7, 7], [1, 3, 4, 2], [1, 6, 7, 2], [1, 4, 2]),
        },
    )


def test_pairwise_reward_trains_on_the_policys_mistakes(scalar_model, context, preferences):
    model = scalar_model()
    chosen = [score(model, s) for s in preferences.data["chosen"]]
    negatives = [preferences.data["sample"][0], *preferences.data["rejected"][1:]]
    rejected = [score(model, s) for s in negatives]
    c = 0.01
    expected = sum(math.log1p(math.exp(r - s)) + c * (s * s + r * r) for s, r in zip(chosen, rejected, strict=True))
    on_policy = [rejected[0], chosen[2]]  # the samples of the even ids, wrong and right

    stats = sampled(score_square_coef=c).train_step(model, [preferences], context(micro_batches=2)).stats
    assert stats["loss"] == pytest.approx((expected, 4), rel=1e-12)
    assert stats["pair_accuracy"] == (sum(s > r for s, r in zip(chosen, rejected, strict=True)), 4)
    assert stats["sample_score"] == pytest.approx((sum(on_policy), 2), rel=1e-12)
    assert stats["sample_score_square"] == pytest.approx((sum(x * x for x in on_policy), 2), rel=1e-12)
    assert set(stats) == {"loss", "grad_norm", "lr", "pair_accuracy", "sample_score", "sample_score_square"}
    of_nobody = sampled().train_step(model, [preferences.select([1, 3])], context()).stats
    assert set(of_nobody) == {"loss", "grad_norm", "lr", "pair_accuracy"}


def test_pairwise_reward_without_samples_uses_the_rejected_answers(scalar_model, context, preferences):
    model = scalar_model()
    sides = [preferences.data[key] for key in ("chosen", "rejected")]
    expected = sum(math.log1p(math.exp(score(model, r) - score(model, s))) for s, r in zip(*sides, strict=True))
    stats = pairwise(score_square_coef=0).train_step(model, [preferences], context()).stats
    assert stats["loss"] == pytest.approx((expected, 4), rel=1e-12)
    assert "sample_score" not in stats


def test_pairwise_reward_measures_without_training(scalar_model, context, preferences):
    model = scalar_model()
    before = model.module.head.weight.clone()
    pairs = MeasureInterface(Measure(pairwise_loss(PairLoss()), rows="pairs"))
    stats = pairs.inference(model, preferences, context(micro_batches=2)).stats
    sides = [[score(model, s) for s in preferences.data[side]] for side in ("chosen", "rejected")]
    assert stats["pair_accuracy"] == (sum(a > b for a, b in zip(*sides, strict=True)), 4)
    assert set(stats) == {"loss", "pair_accuracy", "chosen_score", "rejected_score"}
    scores = ScoreInterface(Score(batch=inputs(seq="sample"), statistics=("sample_score", "sample_score_square")))
    stats = scores.inference(model, preferences, context(micro_batches=2)).stats
    samples = [score(model, s) for s in preferences.data["sample"]]
    assert stats["sample_score"] == pytest.approx((sum(samples), 4), rel=1e-12)
    assert stats["sample_score_square"] == pytest.approx((sum(x * x for x in samples), 4), rel=1e-12)
    assert torch.equal(model.module.head.weight, before)


def test_pairwise_reward_learns_the_order(scalar_model, context, preferences):
    model = scalar_model()
    for _ in range(500):
        stats = sampled().train_step(model, [preferences], context()).stats
    assert stats["pair_accuracy"] == (4, 4)


def test_rollout_names_its_sequences_and_can_be_replayed(language_model, context, prompts):
    rollout = GenerateInterface(Generate(max_new_tokens=4, eos_token=EOS, outputs=("sample",)))
    first = rollout.generate(language_model(), prompts, context(seed=3, step=5)).outputs
    assert set(first) == {"sample", *Generate.recordable} - {"seq", "logits"}, "the model here gives no logits"
    for prompt, sample in zip(prompts.data["prompt"], first["sample"], strict=True):
        assert torch.equal(sample[: len(prompt)], prompt)
        assert 1 <= len(sample) - len(prompt) <= 4
    forced = [s[len(p) :] for p, s in zip(prompts.data["prompt"], first["sample"], strict=True)]
    replay = rollout.generate(language_model(), prompts.with_data(forced_response=forced), context(seed=99)).outputs
    for key in ("sample", "logprob"):
        assert all(torch.equal(a, b) for a, b in zip(first[key], replay[key], strict=True))


@pytest.fixture
def tokenizer(tmp_path):
    """Byte pairs over a, b and c: "abc" is one token, and the tokenizer's choice, but also "ab" "c" and "a" "b" "c"."""
    vocabulary = {"a": 0, "b": 1, "<eos>": EOS, "c": 3, "ab": 4, "abc": 5}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    assert made.token_to_id("<pad>") == 6
    assert made.encode("abc").ids == [5]
    made.save(path := str(tmp_path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("forced", "answers", "right"),
    [
        # The same tokens; the end token missing; the same tokens; one letter too many.
        (([5, 2], [3, 3, 3], [4, 4, 2], [3, 3, 2]), ([5, 2], [3, 3, 2], [4, 4, 2], [3, 2]), 2),
        # One text, cut into tokens otherwise: abc, cabc, abab; and another text.
        (([4, 3, 2], [3, 0, 1, 3, 2], [0, 1, 4, 2], [4, 0, 2]), ([5, 2], [3, 5, 2], [4, 4, 2], [4, 4, 2]), 3),
        # The text without the end token: in both, in the response, in the answer; and the end token alone.
        (([4, 3], [5], [5, 2], [2]), ([5], [5, 2], [5], [2]), 1),
        # No token at all, in response and answer, and in one of them; an empty text is the end token alone.
        (([], [], [2], [2]), ([], [2], [], [2]), 1),
        # Special tokens are a part of the text: in the response, in the answer, in both.
        (([5, 6, 2], [5, 2], [5, 6, 2], [5, 2]), ([5, 2], [5, 6, 2], [5, 6, 2], [3, 2]), 1),
    ],
    ids=["same tokens", "same text", "unfinished", "empty", "special"],
)
def test_accuracy_counts_texts_with_their_end_token(
    language_model, context, prompts, tokenizer, forced, answers, right
):
    batch = prompts.with_data(answer=tensors(*answers), forced_response=tensors(*forced))
    config = SampledAccuracy(max_new_tokens=5, eos_token=EOS, statistic="share", tokenizer=tokenizer)
    stats = SampledAccuracyInterface(config).generate(language_model(), batch, context()).stats
    assert stats["share"] == (right, 4)
    if right == 2:
        assert stats["share_response_length"] == (11.0, 4)


def test_accuracy_needs_a_tokenizer_and_an_end_token(tokenizer):
    assert SampledAccuracy(max_new_tokens=3, eos_token=0, tokenizer=tokenizer).end_token == 0
    with pytest.raises(UserError, match="tokenizer='': no such file, and answers are compared as text; give"):
        SampledAccuracy(max_new_tokens=3, eos_token=EOS)
    with pytest.raises(UserError, match="eos_token=-1: an answer is right only with its end token"):
        SampledAccuracy(max_new_tokens=3, eos_token=-1, tokenizer=tokenizer)


@pytest.mark.parametrize(("field", "value"), [("max_new_tokens", 0), ("eos_token", -2), ("temperature", -0.5)])
def test_sampling_settings_are_checked(field, value):
    settings = {"max_new_tokens": 4, "eos_token": EOS, field: value}
    for config in (Generate, SampledAccuracy):
        with pytest.raises(UserError, match=field):
            config(**settings)
