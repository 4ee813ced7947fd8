"""Every layout generates the rollouts of one process, token for token in float64."""

import tempfile
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from realhf.algorithms.stop_strings import StopStrings
from realhf.api.generation import GenerationOptions
from realhf.base.errors import RunError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.generate import paged_attention
from realhf.engine.generate.choice import TokenChoice
from realhf.engine.generate.decode_graphs import DecodeWorkspace
from realhf.engine.generate.loop import generate
from realhf.engine.generate.sampling import Draw
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.decoder import Decoder
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.parallel.waiting import Waits, What
from tests.distributed.pool import run_distributed
from tests.unit.engine.captures import EagerCapture, TracedCapture
from tests.unit.engine.decoder_boxes import build_decoder, initialise
from tests.unit.engine.losses import ONE_RANK, tiny
from tests.unit.engine.texts import first_end, two_letter_tokenizer

pytestmark = pytest.mark.distributed

WORLD_SIZE = 4
CONFIG = tiny()
TIED = tiny(tied_embeddings=True)
SAMPLING = GenerationOptions(max_new_tokens=10, temperature=1.5, top_p=0.97, eos_token=2)
STOP_STRINGS = ("abba", "bbb")
PROMPT_LENGTHS = (3, 7, 1, 5, 7, 2, 9, 3, 4, 6)


@dataclass(frozen=True, kw_only=True)
class Case:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    first: int = 0
    micro_batches: int = 1
    samples: int = 10
    temperature: float = 1.5
    is_tied: bool = False
    is_forced: bool = False
    kv_cache_tokens: int | None = None
    has_twins: bool = False
    stop_strings: tuple[str, ...] = ()
    is_replayed: bool = False

    @property
    def layout(self) -> Layout:
        strategy = ParallelStrategy(self.dp, self.tp, self.pp)
        return Layout(DeviceMesh(self.first, strategy.size), strategy)


CASES = {
    "tp2": Case(tp=2),
    "tp4": Case(tp=4, micro_batches=2),
    "pp2": Case(pp=2),
    "pp2 on the last ranks": Case(pp=2, first=2),
    "pp2, more micro-batches than stages": Case(pp=2, micro_batches=5),
    "pp4": Case(pp=4),
    "pp4, micro-batches of uneven sizes": Case(pp=4, micro_batches=7),
    "pp4, fewer samples than stages": Case(pp=4, samples=2),
    "dp2": Case(dp=2),
    "dp2 pp2": Case(dp=2, pp=2),
    "tp2 pp2": Case(tp=2, pp=2),
    "tp2 pp2, tied embeddings": Case(tp=2, pp=2, is_tied=True),
    "tp2 pp2, greedy": Case(tp=2, pp=2, temperature=0.0),
    "tp2 pp2, forced": Case(tp=2, pp=2, is_forced=True, micro_batches=3),
    "pp2, little memory": Case(pp=2, kv_cache_tokens=96),
    "tp2 pp2, equal prompts in little memory": Case(tp=2, pp=2, kv_cache_tokens=96, has_twins=True),
    "tp2, stop strings": Case(tp=2, stop_strings=STOP_STRINGS),
    "pp2, stop strings": Case(pp=2, stop_strings=STOP_STRINGS, micro_batches=3),
    "tp2 pp2, stop strings in little memory": Case(tp=2, pp=2, stop_strings=STOP_STRINGS, kv_cache_tokens=96),
    "pp2, decode steps replayed": Case(pp=2, is_replayed=True),
    "tp2 pp2, decode steps replayed in little memory": Case(tp=2, pp=2, is_replayed=True, kv_cache_tokens=96),
    "dp2 tp2, equal prompts in little memory": Case(dp=2, tp=2, kv_cache_tokens=48, has_twins=True),
}

REFUSING = ("tp2", "pp2", "tp2 pp2")  # where it is also looked at what is refused


@dataclass(frozen=True)
class Outcome:
    """The rollouts of one rank as arrays, in the order of its samples."""

    sequences: list[np.ndarray]
    logprobs: list[np.ndarray]
    margins: list[np.ndarray]
    logits: list[np.ndarray]


def batch_of(samples: int, has_twins: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = PROMPT_LENGTHS[:samples]
    prompts = [torch.randint(3, CONFIG.vocab_size, (n,), generator=generator) for n in lengths]
    return Batch(
        tuple(range(samples)),
        {
            "prompt": [prompts[i - i % 3] for i in range(samples)] if has_twins else prompts,
            "given": [torch.randint(3, CONFIG.vocab_size, (1 + n % 5,), generator=generator) for n in lengths],
        },
    )


def decoder_of(case: Case, groups: ParallelGroups) -> Decoder:
    decoder = build_decoder(TIED if case.is_tied else CONFIG, groups, torch.float64)
    initialise(decoder, seed=0)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.mul_(8)  # so large that next tokens differ in probability
    return decoder


def rollouts(case: Case, groups: ParallelGroups, batch: Batch, timeout_s: float = 600.0) -> GenerationOutput:
    sampling = replace(SAMPLING, temperature=case.temperature, kv_cache_tokens=case.kv_cache_tokens)
    request = GenerationRequest(
        sampling,
        sample_key=(7, 1),
        micro_batches=case.micro_batches,
        forced=batch.data["given"] if case.is_forced else None,
        is_end=stop_strings() if case.stop_strings else None,
        return_logits=True,
    )
    workspace = DecodeWorkspace(EagerCapture() if case.is_replayed else None, timeout_s)
    return generate(decoder_of(case, groups), batch, request, workspace)[0]


def stop_strings() -> StopStrings:
    with tempfile.TemporaryDirectory() as folder:
        two_letter_tokenizer(CONFIG.vocab_size).save(path := f"{folder}/tokenizer.json")
        return StopStrings(path, STOP_STRINGS)


def as_arrays(output: GenerationOutput) -> Outcome:
    fields = (output.sequences, output.logprobs, output.margins, output.logits)
    return Outcome(*([t.numpy() for t in tensors] for tensors in fields))


def cut(outcome: Outcome, batch: Batch, strings: tuple[str, ...]) -> Outcome:
    """What is left of rollouts without stop strings, whose text is looked at after every token."""
    tokenizer, starts = two_letter_tokenizer(CONFIG.vocab_size), [len(prompt) for prompt in batch.data["prompt"]]
    responses = [sequence[start:].tolist() for sequence, start in zip(outcome.sequences, starts, strict=True)]
    ends = [first_end(tokenizer, response, strings, SAMPLING.eos_token) for response in responses]
    assert sum(end < len(response) for end, response in zip(ends, responses, strict=True)) > 2
    sequences = [s[: start + end] for s, start, end in zip(outcome.sequences, starts, ends, strict=True)]
    rest = [
        [a[:end] for a, end in zip(arrays, ends, strict=True)]
        for arrays in (outcome.logprobs, outcome.margins, outcome.logits)
    ]
    return Outcome(sequences, *rest)


def refusals(case: Case, groups: ParallelGroups) -> list[str]:
    """What this rank says to a prompt beyond the vocabulary, in generation and in a forward pass, and to NaN logits."""
    beyond = Batch((3,), {"prompt": [torch.tensor([4, CONFIG.vocab_size])]})
    model = ShardedModel(ModelSpec(CONFIG, groups, torch.float64))
    model.initialise(seed=0)
    said = []
    for compute in (
        lambda: rollouts(case, groups, beyond),
        lambda: model.forward(beyond, "prompt", lambda output, part: {}, 1),
    ):
        with pytest.raises(ValueError, match="token id") as raised:
            compute()
        said.append(str(raised.value))
    if groups.is_last_stage:
        model.decoder.model.norm.weight.data[0] = torch.nan
    for is_greedy in (True, False):
        options = replace(SAMPLING, temperature=0.0 if is_greedy else 1.0, top_p=1.0)
        with pytest.raises(FloatingPointError) as failed:
            model.generate(batch_of(1), GenerationRequest(options, sample_key=(7, 1)))
        said.append(str(failed.value))
    return said


def run_cases(rank: int) -> tuple[dict[str, Outcome], dict[str, list[str]]]:
    table = GroupTable((case.layout for case in CASES.values()), rank)
    outcomes, said = {}, {}
    for name, case in CASES.items():
        if rank in case.layout.mesh.devices:
            groups = table.groups(case.layout)
            part = batch_of(case.samples, case.has_twins).split(case.dp)[groups.dp_index]
            outcomes[name] = as_arrays(rollouts(case, groups, part))
            if name in REFUSING:
                said[name] = refusals(case, groups)
    return outcomes, said


@pytest.fixture(scope="module")
def worlds() -> list[tuple[dict[str, Outcome], dict[str, list[str]]]]:
    return run_distributed(run_cases, WORLD_SIZE)


@pytest.fixture(scope="module")
def ranks(worlds: list[tuple[dict[str, Outcome], dict[str, list[str]]]]) -> list[dict[str, Outcome]]:
    return [outcomes for outcomes, _ in worlds]


@pytest.mark.parametrize("name", REFUSING)
def test_every_rank_names_an_id_beyond_the_vocabulary_and_logits_that_are_nan(
    worlds: list[tuple[dict[str, Outcome], dict[str, list[str]]]], name: str
) -> None:
    for rank in CASES[name].layout.mesh.devices:
        of_ids, of_forward, *of_logits = worlds[rank][1][name]
        for said in (of_ids, of_forward):
            assert "'prompt' of sample 3 has the token id 24 at place 1, and the model's vocab_size=24" in said
        for said in of_logits:
            assert "generate in step 2: the logits of sample 0 for token 0 of its response are NaN" in said


@pytest.mark.parametrize("name", CASES)
def test_a_layout_gives_the_rollouts_of_one_process(ranks: list[dict[str, Outcome]], name: str) -> None:
    case = CASES[name]
    batch = batch_of(case.samples, case.has_twins)
    one = as_arrays(rollouts(replace(case, kv_cache_tokens=None, stop_strings=()), ONE_RANK, batch))
    if case.stop_strings:
        one = cut(one, batch, case.stop_strings)
    lengths = {len(logprobs) for logprobs in one.logprobs}
    assert len(lengths) > (2 if case.samples > 2 and case.temperature > 0 else 0)  # they end at different times

    holders = [case.layout.output_device(dp) for dp in range(case.dp)]
    parts = [ranks[rank][name] for rank in holders]
    for field, tolerance in (("logprobs", 1e-10), ("margins", 1e-10), ("logits", 1e-9)):
        actual = [array for part in parts for array in getattr(part, field)]
        for a, b in zip(actual, getattr(one, field), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    assert [s.tolist() for part in parts for s in part.sequences] == [s.tolist() for s in one.sequences]
    for rank in set(case.layout.mesh.devices) - set(holders):
        assert ranks[rank][name] == Outcome([], [], [], [])


def draw_on_one_rank(rank: int) -> list[list[int]]:
    """Responses under tp=2 as each rank sees them, where the other ranks' kernels would draw another token."""
    case, seen, accept = Case(tp=2), [], TokenChoice.accept

    def note(choice: TokenChoice, drawn: np.ndarray, sequences: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        seen.append(drawn.tolist())
        return accept(choice, drawn, sequences, lengths)

    def draw_other(choice: TokenChoice, logits: torch.Tensor, *rows: np.ndarray) -> Draw:
        return draw(choice, logits.roll(1, dims=-1) if rank else logits, *rows)

    draw = TokenChoice.draw
    TokenChoice.accept, TokenChoice.draw = note, draw_other  # type: ignore[method-assign]
    try:
        rollouts(case, GroupTable([case.layout], rank).groups(case.layout), batch_of(3))
    finally:
        TokenChoice.accept, TokenChoice.draw = accept, draw  # type: ignore[method-assign]
    return seen


def test_one_of_the_tensor_parallel_ranks_draws_for_all() -> None:
    """Kernels of GPUs may differ in the last bits, and ranks that go on with other tokens would wait for ever."""
    first, second = run_distributed(draw_on_one_rank, 2)
    assert first == second
    assert len(first) > 3


class Replays(Waits):
    """Notes what is watched while a graph is replayed."""

    def __init__(self) -> None:
        self.watched: list[str] = []

    def watch(self, timeout_s: float, what: What) -> None:
        self.watched.append(f"{what()} for {timeout_s:g} s")


def record_sums(rank: int) -> tuple[Outcome, Outcome, int, list[str]]:
    """Rollouts under tp=2 computed kernel by kernel, and by recorded operators, sums over ranks among them."""
    case, waits, capture = Case(tp=2), Replays(), TracedCapture()
    # Over gloo, and without kernels in C++: what they do is no operator that can be recorded.
    groups = ParallelGroups(case.layout, rank, tensor=dist.group.WORLD, model=dist.group.WORLD, waits=waits)
    paged_attention._kernels = None
    decoder, batch = decoder_of(case, groups), batch_of(3)
    arguments = {"sample_key": (7, 1), "micro_batches": 1, "return_logits": True}
    expected = generate(decoder, batch, GenerationRequest(SAMPLING, **arguments))[0]
    assert not waits.watched
    actual = generate(decoder, batch, GenerationRequest(SAMPLING, **arguments), DecodeWorkspace(capture, 9.0))[0]
    return as_arrays(expected), as_arrays(actual), capture.replays, waits.watched


def test_sums_over_ranks_are_part_of_a_recorded_step() -> None:
    """torch's watchdog does not see them there: a deadline of ours goes with every replay."""
    for rank, (expected, actual, replays, watched) in enumerate(run_distributed(record_sums, 2)):
        assert [s.tolist() for s in actual.sequences] == [s.tolist() for s in expected.sequences]
        for a, b in zip(actual.logits, expected.logits, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
        assert replays > 3
        waited = f"generate: rank {rank} waited for the other tensor-parallel ranks in a decode step for 9 s"
        assert watched == [waited] * replays


def miss_a_stage(rank: int) -> str:
    """Stage `rank` 1 does not take part, but stays until all are done; returns what stage 0 says."""
    case = Case(pp=2)
    groups = GroupTable([case.layout], rank).groups(case.layout)
    if rank == 1:
        return ""
    with pytest.raises(RunError) as raised:
        rollouts(case, groups, batch_of(4), timeout_s=1.0)
    return str(raised.value)


def test_a_missing_stage_is_named_after_the_deadline() -> None:
    message = run_distributed(miss_a_stage, 2)[0]
    assert "rank 0 waited for the tokens of decode step 0 from rank 1 (deadline 1 s)" in message
