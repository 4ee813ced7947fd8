"""The tokens of a batch by hand: how long sequences get, which are equal, what may be drawn, where responses end."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from realhf.api.generation import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.generate import choice as choice_module
from realhf.engine.generate.choice import DrawnTokens, TokenChoice
from realhf.engine.generate.sampling import Draw, Truncation, uniform
from realhf.engine.interface import GenerationRequest

CPU = torch.device("cpu")
PROMPTS = ([3, 4, 5], [3], [3, 4, 5], [4])
IDS = (11, 7, 12, 20)


def choice(
    prompts: tuple[list[int], ...] = PROMPTS, request: dict[str, Any] | None = None, **options: Any
) -> TokenChoice:
    batch = Batch(IDS[: len(prompts)], {"prompt": [torch.tensor(prompt) for prompt in prompts]})
    of = GenerationOptions(**{"max_new_tokens": 4, "eos_token": 2, **options})
    return TokenChoice(batch, GenerationRequest(of, sample_key=(5, 8), **(request or {})), CPU)


def test_how_long_sequences_may_get() -> None:
    assert choice().longest().tolist() == [6, 4, 6, 4]  # without the last token
    assert choice(request={"limits": [1, 2, 3, 4]}).longest().tolist() == [3, 2, 5, 4]
    forced = [torch.tensor(response) for response in ([9], [9, 8], [9], [9, 8, 7])]
    given = choice(request={"forced": forced, "limits": [4, 4, 4, 4]})
    assert given.longest().tolist() == [3, 2, 3, 3]
    assert given.tokens.tolist() == [[3, 4, 5, 9], [3, 9, 8, 0], [3, 4, 5, 9], [4, 9, 8, 7]]
    assert choice().tokens.shape == (4, 7)


def test_equal_prompts_are_known() -> None:
    assert choice().first_with_prompt() == [0, 1, 0, 3]
    assert choice(([3], [3, 0], [0, 3], [3])).first_with_prompt() == [0, 1, 2, 0], "an end of zeros makes a difference"


def ends(made: TokenChoice, *tokens: int, sequence: int = 1) -> list[bool]:
    """Whether the response of a sequence ends with each of its tokens."""
    found = []
    for place, token in enumerate(tokens):
        length = len(PROMPTS[sequence]) + place
        [is_end] = made.accept(np.array([token]), np.array([sequence]), np.array([length]))
        assert made.tokens[sequence, length] == token
        found.append(bool(is_end))
    return found


@pytest.mark.parametrize(
    ("options", "tokens", "expected"),
    [
        ({}, (9, 9, 9, 9), [False, False, False, True]),
        ({}, (9, 2), [False, True]),
        ({"min_new_tokens": 2}, (2, 2), [False, True]),
        ({"eos_token": -1}, (2, 9), [False, False]),
        ({"eos_token": -1, "stop_sequences": ((9, 8),)}, (9, 9, 8), [False, False, True]),
        ({"eos_token": -1, "stop_sequences": ((9, 8), (7,))}, (7,), [True]),
        ({"eos_token": -1, "stop_sequences": ((9,),), "min_new_tokens": 2}, (9, 9), [False, True]),
        ({"eos_token": -1, "stop_sequences": ((3, 9),)}, (9,), [False]),  # the prompt's last token and the first one
        ({"eos_token": -1, "stop_sequences": ((0, 3, 9),)}, (9,), [False]),
        ({"eos_token": -1, "stop_sequences": ((9, 9, 9),)}, (9, 9, 9), [False, False, True]),
    ],
)
def test_where_a_response_ends(options: dict[str, Any], tokens: tuple[int, ...], expected: list[bool]) -> None:
    assert ends(choice(**options), *tokens) == expected


def test_each_sequence_ends_at_its_own_limit() -> None:
    made = choice(request={"limits": [1, 2, 2, 1]})
    is_end = made.accept(np.full(4, 9), np.arange(4), made.prompt_lengths.copy())
    assert is_end.tolist() == [True, False, False, True]
    later = made.accept(np.array([9]), np.array([2]), np.array([4]))
    assert later.tolist() == [True]


def test_a_check_of_the_caller_sees_the_response_so_far_and_only_where_it_may_end() -> None:
    seen: list[list[int]] = []

    def is_end(response: Any) -> bool:
        seen.append(response.tolist())
        return response[-1] == 8

    made = choice(request={"is_end": is_end}, min_new_tokens=2, max_new_tokens=5)
    assert ends(made, 8, 9, 8) == [False, False, True]
    assert seen == [[8, 9], [8, 9, 8]]
    assert ends(made, 9, 2) == [False, True], "an end token needs no check"
    assert len(seen) == 2


def test_a_given_response_ends_at_its_length_alone() -> None:
    forced = [torch.tensor(response) for response in ([9], [2, 2, 9], [9], [9])]
    asked: list[Any] = []
    made = choice(request={"forced": forced, "is_end": asked.append})
    assert ends(made, 2, 2, 9) == [False, False, True]
    assert asked == []


def test_the_draw_is_of_the_documented_random_numbers() -> None:
    """Of run, step, sample and the token's place, however many were drawn before."""
    logits, made = torch.zeros(2, 1000, dtype=torch.float64), choice(max_new_tokens=300, eos_token=-1)
    sequences = np.array([3, 0])
    for given in (0, 1, 63, 64, 130, 0):
        lengths = made.prompt_lengths[sequences] + given
        drawn = made.draw(logits, sequences, lengths)
        numbers = uniform(5, 8, torch.tensor([20, 11]), torch.tensor([1 + given, 3 + given]))
        assert drawn.tokens.tolist() == (numbers * 1000).long().tolist()
    apart = made.draw(logits, sequences, np.array([1 + 5, 3 + 70]))  # of two blocks at once
    numbers = uniform(5, 8, torch.tensor([20, 11]), torch.tensor([6, 73]))
    assert apart.tokens.tolist() == (numbers * 1000).long().tolist()


def test_an_end_token_that_would_come_too_early_is_not_drawn() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 0.5]] * 2, dtype=torch.float64)
    made = choice(temperature=0.0, min_new_tokens=2)
    found = [made.draw(logits, np.array([1, 3]), np.array(lengths)).tokens.tolist() for lengths in ([1, 2], [2, 3])]
    assert found == [[1, 1], [1, 2]]
    assert choice(temperature=0.0, min_new_tokens=2, eos_token=-1).draw(
        logits, np.array([1]), np.array([1])
    ).tokens.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("eos_token", "least", "given", "forbidden"),
    [
        (2, 2, [0, 3], [2, -1]),
        (2, 2, [1, 1], [2, 2]),
        (2, 2, [2, 3], None),
        (-1, 2, [0, 0], None),
        (0, 1, [0, 1], [0, -1]),
    ],
)
def test_what_is_forbidden_is_the_end_token_where_it_would_come_too_early(
    monkeypatch: pytest.MonkeyPatch, eos_token: int, least: int, given: list[int], forbidden: list[int] | None
) -> None:
    truncations: list[Truncation] = []

    def noted(logits: Tensor, uniforms: Tensor, temperature: float, truncation: Truncation) -> Draw:
        truncations.append(truncation)
        return drawn(*[3] * len(logits))

    monkeypatch.setattr(choice_module, "draw", noted)
    made = choice(eos_token=eos_token, min_new_tokens=least, top_k=5, top_p=0.9)
    made.draw(torch.zeros(2, 10), np.array([1, 3]), np.array([1 + number for number in given]))
    [found] = truncations
    assert (None if found.forbidden is None else found.forbidden.tolist()) == forbidden
    assert (found.top_k, found.top_p) == (5, 0.9)


def test_truncation_and_temperature_are_those_asked_for() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    forced = [torch.tensor([1])] * 4
    for options, expected in (
        ({}, 0.3),
        ({"temperature": 0.5}, 0.09 / 0.3),
        ({"top_k": 2}, 0.3 / 0.7),
        ({"top_p": 0.65}, 0.3 / 0.7),
        ({"temperature": 0.0}, 0.3),
    ):
        made = choice(request={"forced": forced}, **options)
        drawn = made.draw(logits, np.array([1]), np.array([1]))
        assert (drawn.tokens.tolist(), drawn.margins.tolist()) == ([1], [1.0])
        assert drawn.logprobs.exp().item() == pytest.approx(expected)
        assert drawn.untruncated.exp().item() == pytest.approx(0.3)


@pytest.mark.parametrize("row", [[0.0, torch.nan], [0.0, torch.inf]])
def test_logits_that_are_no_distribution_are_told_with_step_sample_and_token(row: list[float]) -> None:
    made = choice()
    drawn = made.draw(torch.tensor([[0.0, 0.0], row]), np.array([0, 1]), np.array([3, 3]))
    assert drawn.tokens.tolist()[1] == -1
    with pytest.raises(FloatingPointError, match="generate in step 9: the logits of sample 7 for token 2 of its resp"):
        made.accept(drawn.tokens.numpy(), np.array([0, 1]), np.array([3, 3]))


def drawn(*tokens: int) -> Draw:
    numbers: Tensor = torch.tensor(tokens)
    return Draw(numbers, numbers / -10, numbers / -100, numbers / 7.0)


@pytest.mark.parametrize("with_logits", [True, False])
def test_rollouts_are_put_together_by_sequence_and_step(with_logits: bool) -> None:
    made = DrawnTokens()
    for sequences, draw in (([0, 1, 2], drawn(5, 6, 7)), ([2, 0], drawn(8, 9)), ([2], drawn(10))):
        made.add(np.array(sequences), draw, draw.tokens[:, None] * torch.ones(3) if with_logits else None)
    output = made.output([torch.tensor([1]), torch.tensor([2, 3]), torch.tensor([4])], CPU)
    assert [tokens.tolist() for tokens in output.sequences] == [[1, 5, 9], [2, 3, 6], [4, 7, 8, 10]]
    responses = [torch.tensor(tokens) for tokens in ([5, 9], [6], [7, 8, 10])]
    for found, scale in ((output.logprobs, -10), (output.untruncated_logprobs, -100), (output.margins, 7.0)):
        torch.testing.assert_close(found, [tokens / scale for tokens in responses])
    expected = [tokens[:, None] * torch.ones(3) for tokens in responses] if with_logits else []
    torch.testing.assert_close(output.logits, expected)
