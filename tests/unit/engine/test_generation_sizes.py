"""What a call of generation is refused for, how its batch is cut, and how many pages its sequences need."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from realhf.api.generation import GenerationOptions
from realhf.base.errors import UserError
from realhf.engine.batch import Batch
from realhf.engine.generate import loop
from realhf.engine.generate.decode_graphs import DecodeWorkspace
from realhf.engine.generate.decode_layers import decode_layers
from realhf.engine.generate.loop import (
    _even_runs,
    _needed_pages,
    check_request,
    concatenated,
    generate,
    packed_weights,
)
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.geometry.batching import Limits
from realhf.models.decoder import Decoder
from tests.unit.engine.decoder_boxes import build_decoder, initialise
from tests.unit.engine.losses import ONE_RANK, tiny
from tests.unit.engine.test_decode_graphs import decoder_of


@pytest.mark.parametrize(
    ("count", "parts", "lengths"),
    [(6, 2, [3, 3]), (7, 2, [3, 4]), (7, 3, [2, 2, 3]), (2, 3, [1, 1]), (5, 1, [5]), (8, 4, [2, 2, 2, 2])],
)
def test_a_batch_is_cut_into_even_runs(count: int, parts: int, lengths: list[int]) -> None:
    runs = _even_runs(count, parts)
    assert [len(run) for run in runs] == lengths
    assert [place for run in runs for place in run] == list(range(count))


def pages(prompts: list[int], limits: list[int], first_with_prompt: list[int], max_running: int) -> int:
    choice: Any = SimpleNamespace(
        longest=lambda: np.array(prompts) + np.array(limits) - 1,
        prompt_lengths=np.array(prompts),
        first_with_prompt=lambda: first_with_prompt,
    )
    return _needed_pages(choice, 4, max_running)


def test_pages_for_all_that_run_at_once() -> None:
    # At their longest 8, 12 and 6 tokens: 3, 4 and 2 pages, of which the last one is about to begin.
    assert pages([5, 9, 3], [4, 4, 4], [0, 1, 2], 3) == 9
    assert pages([5, 9, 3], [4, 4, 4], [0, 1, 2], 2) == 7
    assert pages([5, 9, 3], [4, 4, 4], [0, 1, 2], 1) == 4
    # Twins share their full pages: of 9 tokens two, where all run at once.
    assert pages([9, 9, 9], [4, 4, 4], [0, 0, 0], 3) == 4 + 2 + 2
    assert pages([9, 9, 9], [4, 4, 4], [0, 0, 0], 2) == 8
    assert pages([8, 8], [1, 1], [0, 0], 2) == 3 + 1


def test_outputs_of_parts_are_put_behind_one_another() -> None:
    first, second = (
        GenerationOutput(**{name: [number + place] for place, name in enumerate(
            ("sequences", "logprobs", "untruncated_logprobs", "margins"))})
        for number in (10, 20)
    )  # fmt: skip
    both = concatenated([first, second])
    assert (both.sequences, both.logprobs, both.untruncated_logprobs) == ([10, 20], [11, 21], [12, 22])
    assert (both.margins, both.logits) == ([13, 23], [])


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of(tiny(num_layers=1))


BATCH = Batch((4, 9), {"prompt": [torch.tensor([3, 4]), torch.tensor([5])]})


def request(**more: Any) -> GenerationRequest:
    options = {name: more.pop(name) for name in ("stop_strings", "tokenizer", "kv_cache_tokens") if name in more}
    sampling = GenerationOptions(max_new_tokens=5, eos_token=-1, **options)
    return GenerationRequest(sampling, sample_key=(1, 2), **more)


def response(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), 3) for length in lengths]


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"limits": [5, 0]}, ValueError, "^limit 1 is 0; give it 1 to max_new_tokens=5$"),
        ({"limits": [6, 1]}, ValueError, "^limit 0 is 6; give it 1 to max_new_tokens=5$"),
        ({"limits": [1]}, AssertionError, "1 limits for 2 prompts"),
        ({"forced": response(1)}, AssertionError, "1 responses for 2 prompts"),
        ({"forced": response(5, 6)}, ValueError, "^forced response 1 has 6 tokens; give it 1 to max_new_tokens=5$"),
        ({"stop_strings": ("a",), "tokenizer": __file__}, AssertionError, "stop strings need `is_end`"),
    ],
)
def test_what_a_request_cannot_be(
    decoder: Decoder, asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_request(decoder, BATCH, request(**asked))


def test_what_a_request_may_be(decoder: Decoder) -> None:
    for asked in (
        {"limits": [1, 5]},
        {"forced": response(1, 5)},
        {"stop_strings": ("a",), "tokenizer": __file__, "is_end": lambda response: True},
    ):
        check_request(decoder, BATCH, request(**asked))


def test_a_response_and_its_prompt_fit_the_positions_of_the_model() -> None:
    learned = decoder_of(tiny(num_layers=1, positions="learned", max_positions=6, norm="layer", mlp="plain"))
    for asked in ({"limits": [4, 5]}, {"forced": response(4, 5)}):
        check_request(learned, BATCH, request(**asked))
    for asked in ({"limits": [5, 5]}, {"forced": response(5, 5)}, {}):
        with pytest.raises(ValueError, match="response' of sample 4 has 7 tokens"):
            check_request(learned, BATCH, request(**asked))
    critic = decoder_of(tiny(num_layers=1, head="scalar"))
    with pytest.raises(AssertionError, match="generation needs a language-model head"):
        check_request(critic, BATCH, request())


def test_each_sequence_gets_as_many_tokens_as_its_limit(decoder: Decoder) -> None:
    output, report = generate(decoder, BATCH, request(limits=[2, 5]))
    assert [len(sequence) for sequence in output.sequences] == [4, 6]
    assert (report.steps, report.preemptions) == (5, 0)
    assert report.cache_bytes == 2 * 2 * 16 * 32 * 8, "a page each for keys and values of 32 numbers in float64"


class Workspace(DecodeWorkspace):
    """Notes the sizes that it is asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: list[Any] = []

    def of_batch(self, index: int, decoder: Decoder, kernels: Any, sizes: Any) -> Any:
        self.asked.append((index, sizes.pages, sizes.max_rows, sizes.width))
        return super().of_batch(index, decoder, kernels, sizes)


@pytest.mark.parametrize(
    ("micro_batches", "tokens", "sizes"),
    [
        (1, None, (0, 5, 3, 3)),  # 1, 1 and 3 pages
        (2, None, (0, 4, 2, 3)),
        (3, None, (0, 3, 1, 3)),
        (1, 79, (0, 4, 3, 3)),
        (1, 1000, (0, 5, 3, 3)),
    ],
)
def test_the_sizes_of_a_call(decoder: Decoder, micro_batches: int, tokens: int | None, sizes: tuple[int, ...]) -> None:
    """Rows at most, pages for all that run, and pages of the longest one: of 30 + 5 tokens, the last never kept."""
    batch = Batch((1, 2, 3), {"prompt": [torch.tensor([3] * length) for length in (2, 11, 30)]})
    workspace = Workspace()
    generate(decoder, batch, request(micro_batches=micro_batches, kv_cache_tokens=tokens), workspace)
    assert workspace.asked == [sizes]


def test_a_scheduler_is_told_whether_its_pages_hold_all(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Noted(loop.Scheduler):
        def __init__(self, *about: Any) -> None:
            made.append(about)
            super().__init__(*about)

    monkeypatch.setattr(loop, "Scheduler", Noted)
    prompts = [torch.tensor([3] * length) for length in (2, 12, 2)]
    for tokens, number, holds_all in ((None, 4, True), (64, 4, True), (63, 3, False)):
        generate(decoder, Batch((1, 2, 3), {"prompt": prompts}), request(kv_cache_tokens=tokens))
        *prompts_of_call, limits = made.pop()
        assert prompts_of_call == [[2, 12, 2], [0, 1, 0]]
        assert limits == Limits(
            num_pages=number,
            page_size=16,
            max_running=3,
            max_prefill_tokens=loop.PREFILL_TOKENS,
            holds_all=holds_all,
            least_share=0.0,
        )


def test_a_rank_without_outputs_has_none(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    monkeypatch.setattr(type(ONE_RANK), "holds_outputs", False)
    output, report = generate(decoder, BATCH, request())
    assert output == GenerationOutput()
    assert report.steps == 5


def test_a_budget_is_divided_among_the_parts_of_a_batch(decoder: Decoder) -> None:
    batch = Batch((1, 2), {"prompt": [torch.tensor([3] * length) for length in (30, 20)]})
    runs, workspace = [range(0, 1), range(1, 2)], Workspace()
    for place in range(2):
        loop._running_batch(decoder, batch, request(kv_cache_tokens=96), workspace, runs, place)
    assert workspace.asked == [(0, 3, 1, 3), (1, 2, 1, 2)]
    message = (
        r"^kv_cache_tokens=95 is room for 2 pages of 16 tokens in each of 2 parts of the batch, and one sequence of 34 "
        r"tokens needs 3; set it to at least 96$"
    )
    with pytest.raises(UserError, match=message):
        loop._running_batch(decoder, batch, request(kv_cache_tokens=95), workspace, runs, 0)


def test_the_room_of_a_plan_holds_a_sequence_at_least(decoder: Decoder) -> None:
    """An evaluation may have longer prompts than training; what the experiment gives is left as it is."""
    batch = Batch((1, 2), {"prompt": [torch.tensor([3] * length) for length in (30, 20)]})
    for planned, pages in ((1, 3), (64, 4), (1000, 5)):
        workspace = Workspace()
        generate(decoder, batch, request(planned_room=planned), workspace)
        assert workspace.asked == [(0, pages, 2, 3)]
    with pytest.raises(UserError, match="kv_cache_tokens=16 is room for 1 pages"):
        generate(decoder, batch, request(kv_cache_tokens=16, planned_room=64), Workspace())


def test_weights_are_packed_once_for_as_long_as_a_call_takes() -> None:
    """Those of one input together, the others by themselves."""
    model = build_decoder(tiny(num_layers=1), ONE_RANK, torch.float32)
    initialise(model, seed=0)
    layer = model.model.layers["0"]
    attention, mlp = layer.self_attn, layer.mlp
    joined = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    packed = [attention.joined, mlp.joined, attention.o_proj, mlp.down_proj]
    with packed_weights(model):
        assert all(each.packed is not None for each in packed)
        assert all(each.packed is None for each in joined)
        assert (model.infers_layer is not None) == (decode_layers(model) is not None)
    assert all(each.packed is None for each in (*packed, *joined))
    with pytest.raises(ZeroDivisionError), packed_weights(model):
        model.infers_layer = 1 // 0
    assert all(each.packed is None for each in packed)
    assert model.infers_layer is None
