"""What calls ask of a model's generation, and what becomes of its answer."""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.script.accuracy import SampledAccuracyInterface
from realhf.algorithms.script.rollouts import GenerateInterface, generate
from realhf.algorithms.stop_strings import StopStrings
from realhf.api import Generate, SampledAccuracy, inputs
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationOutput, GenerationRequest
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import f64
from tests.unit.engine.texts import byte_level_tokenizer

PROMPTS = Batch((4, 5), {"prompt": [torch.tensor([1, 3]), torch.tensor([1])]})


class Answering:
    """A model that answers 7 8 and 9, with numbers that tell the kinds of log-probabilities apart."""

    def __init__(self, *, with_logits: bool = True):
        self.requests: list[tuple[Batch, GenerationRequest]] = []
        self._logits = [torch.zeros(2, 10), torch.zeros(1, 10)] if with_logits else []

    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        self.requests.append((batch, request))
        answers = [torch.tensor([7, 8]), torch.tensor([9])]
        return GenerationOutput(
            sequences=[torch.cat(pair) for pair in zip(batch.data["prompt"], answers, strict=True)],
            logprobs=[f64(-1, -2), f64(-3)],
            untruncated_logprobs=[f64(-1.5, -2.5), f64(-3.5)],
            margins=[f64(0.1, 0.2), f64(0.3)],
            logits=self._logits,
        )


def numbers(columns: list[Tensor]) -> list[list[float]]:
    return [column.tolist() for column in columns]


def asked(options: Generate, batch: Batch = PROMPTS, **surroundings: Any) -> GenerationRequest:
    model = Answering()
    generate(model, batch, SingleContext(**surroundings), options)  # type: ignore[arg-type]
    [(given, request)] = model.requests
    assert given is batch
    return request


def test_a_request_has_what_its_context_says() -> None:
    options = Generate(max_new_tokens=5)
    request = asked(options, seed=12, step=7, micro_batches=3, decode_graphs="call")
    assert request.options is options
    assert (request.sample_key, request.micro_batches, request.planned_graphs) == ((12, 7), 3, "call")
    assert (request.forced, request.return_logits, request.is_end) == (None, False, None)
    assert request.prompt_key == "prompt"
    named = asked(Generate(max_new_tokens=5, name="second", batch=inputs(prompt="question")), seed=12)
    assert (named.sample_key, named.prompt_key) == ((12 ^ zlib.crc32(b"second"), 0), "question")
    assert asked(options, record=frozenset({"logits"})).return_logits
    assert not asked(options, record=frozenset({"logprob"})).return_logits
    forced = [torch.tensor([5]), torch.tensor([6])]
    assert asked(options, PROMPTS.with_data(forced_response=forced)).forced is forced


def test_a_request_with_stop_strings_has_their_check(tmp_path: Any) -> None:
    byte_level_tokenizer().save(path := str(tmp_path / "tokenizer.json"))
    options = Generate(max_new_tokens=5, stop_strings=("ab", "!"), tokenizer=path)
    is_end = asked(options).is_end
    assert isinstance(is_end, StopStrings)
    assert is_end is asked(options).is_end, "a tokenizer is read once"
    tokens = byte_level_tokenizer().encode("c!", add_special_tokens=False).ids
    assert is_end(torch.tensor(tokens).numpy())


@pytest.mark.parametrize("with_logits", [True, False])
def test_what_policies_learn_from_are_log_probabilities_of_the_whole_distribution(with_logits: bool) -> None:
    """Ratios are of like with like: training knows no truncation."""
    model: Any = Answering(with_logits=with_logits)
    interface = GenerateInterface(Generate(max_new_tokens=5, outputs=("sample",), statistic="tokens"))
    made = interface.generate(model, PROMPTS, SingleContext())
    assert numbers(made.outputs["sample"]) == [[1, 3, 7, 8], [1, 9]]
    assert numbers(made.outputs["logprob"]) == [[-1.5, -2.5], [-3.5]]
    assert numbers(made.outputs["drawn_logprob"]) == [[-1, -2], [-3]]
    assert numbers(made.outputs["margin"]) == [[0.1, 0.2], [0.3]]
    assert set(made.outputs) == {"sample", *Generate.recordable} - {"seq"} - (set() if with_logits else {"logits"})
    assert made.stats == {"tokens": (3.0, 2.0)}
    silent = interface.generate(model, PROMPTS, SingleContext(holds_outputs=False))
    assert (silent.outputs, silent.stats) == ({}, {})
    assert GenerateInterface(Generate(max_new_tokens=5)).generate(model, PROMPTS, SingleContext()).stats == {}


def test_accuracy_is_measured_by_the_ranks_that_hold_outputs(tmp_path: Any) -> None:
    byte_level_tokenizer().save(path := str(tmp_path / "tokenizer.json"))
    config = SampledAccuracy(max_new_tokens=4, eos_token=9, tokenizer=path)
    batch: Any = PROMPTS.with_data(answer=[torch.tensor([7, 9]), torch.tensor([9])])
    interface, model = SampledAccuracyInterface(config), Answering()
    made = interface.generate(model, batch, SingleContext(step=6))  # type: ignore[arg-type]
    assert (made.outputs, made.stats) == ({}, {"accuracy": (1.0, 2), "accuracy_response_length": (3.0, 2)})
    silent = interface.generate(model, batch, SingleContext(holds_outputs=False))  # type: ignore[arg-type]
    assert (silent.outputs, silent.stats) == ({}, {})
    assert [request.sample_key[1] for _, request in model.requests] == [6, 0]
