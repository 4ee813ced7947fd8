"""Generation on one rank against Hugging Face's Llama, and against the decoder's own packed forward."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from realhf.algorithms.functional import token_logprobs
from realhf.algorithms.stop_strings import StopStrings
from realhf.api.generation import GenerationOptions
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.engine.batch import Batch, concatenate
from realhf.engine.generate.loop import generate
from realhf.engine.generate.sampling import draw, uniform
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.engine.returned import InterfaceError
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.attention import PackedAttention, packed_positions
from realhf.models.decoder import Decoder
from realhf.parallel.groups import ParallelGroups
from tests.unit.engine.decoder_boxes import build_decoder
from tests.unit.engine.losses import ONE_RANK, tiny
from tests.unit.engine.texts import first_end, two_letter_tokenizer

EOS = 2
KEY = (5, 3)
GROUPED = tiny(num_kv_heads=2)
FIELDS = ("sequences", "logprobs", "untruncated_logprobs", "margins")
PROMPT_LENGTHS = (3, 7, 1, 5, 7, 2, 9, 3, 4, 6)


def llama(config: DecoderConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """The oracle, with weights so large that next tokens differ in probability."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            initializer_range=0.2,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    )
    return model.to(dtype).eval()


def decoder_of(config: DecoderConfig, oracle: LlamaForCausalLM) -> Decoder:
    decoder = build_decoder(config, ONE_RANK, oracle.dtype)
    weights = oracle.state_dict()
    if config.tied_embeddings:
        del weights["lm_head.weight"]
    decoder.load_state_dict(weights)
    return decoder


def prompts(config: DecoderConfig, lengths: Sequence[int] = PROMPT_LENGTHS) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, config.vocab_size, (n,), generator=generator) for n in lengths]
    return Batch(tuple(range(100, 100 + len(lengths))), {"prompt": tokens})


def rollout(decoder: Decoder, batch: Batch, micro_batches: int = 1, **options) -> GenerationOutput:
    names = ("forced", "return_logits", "is_end")
    asked = {name: options.pop(name) for name in names if name in options}
    sampling = GenerationOptions(**{"max_new_tokens": 12, "eos_token": EOS, **options})
    request = GenerationRequest(sampling, sample_key=KEY, micro_batches=micro_batches, **asked)
    return generate(decoder, batch, request)[0]


def responses(batch: Batch, output: GenerationOutput) -> list[Tensor]:
    return [s[len(p) :] for p, s in zip(batch.data["prompt"], output.sequences, strict=True)]


def first_place(token: int, response: Tensor) -> int:
    """Where `token` stands first in the response; its length if nowhere."""
    places = (response == token).nonzero().flatten().tolist()
    return places[0] if places else len(response)


def packed_logits(decoder: Decoder, batch: Batch, output: GenerationOutput) -> list[Tensor]:
    """The logits that predicted each response token, by one forward without a cache: [response, vocab] a sample."""
    lengths = [len(s) for s in output.sequences]
    logits = decoder(torch.cat(output.sequences), packed_positions(lengths), PackedAttention(lengths)).full()
    return [x[len(p) - 1 : -1] for p, x in zip(batch.data["prompt"], logits.split(lengths), strict=True)]


def assert_same_rollouts(actual: GenerationOutput, expected: GenerationOutput) -> None:
    """Token for token; log-probabilities and margins up to float64 rounding."""
    assert [s.tolist() for s in actual.sequences] == [s.tolist() for s in expected.sequences]
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=1e-10)
    torch.testing.assert_close(actual.margins, expected.margins, rtol=0, atol=1e-10)
    torch.testing.assert_close(actual.untruncated_logprobs, expected.untruncated_logprobs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("config", [tiny(), GROUPED, tiny(tied_embeddings=True)], ids=["plain", "grouped", "tied"])
def test_greedy_is_that_of_hugging_face(config):
    oracle = llama(config, torch.float64)
    batch = prompts(config)
    decoder = decoder_of(config, oracle)
    # The end token is one that comes at different times.
    free = responses(batch, rollout(decoder, batch, temperature=0.0, eos_token=-1))
    eos = max(range(config.vocab_size), key=lambda token: len({first_place(token, r) for r in free}))
    output = rollout(decoder, batch, temperature=0.0, eos_token=eos)
    for prompt, sequence in zip(batch.data["prompt"], output.sequences, strict=True):
        mask = torch.ones_like(prompt)[None]
        expected = oracle.generate(
            prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=eos
        )
        assert sequence.tolist() == expected[0].tolist()
    assert len({len(r) for r in responses(batch, output)}) > 2
    assert all((m == 1).all() for m in output.margins)


SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cool": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "top-k, then top-p, hot": {"top_k": 10, "top_p": 0.7, "temperature": 1.3},
    "not before six tokens": {"min_new_tokens": 6, "top_p": 0.9},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logprobs_are_those_of_hugging_face(settings):
    """Both: those of the distribution drawn from, and those of the untruncated one."""
    oracle = llama(GROUPED, torch.float32)
    batch = prompts(GROUPED)
    output = rollout(decoder_of(GROUPED, oracle), batch, **settings)
    temperature = settings.get("temperature") or 1.0
    for i, response in enumerate(responses(batch, output)):
        with torch.no_grad():
            logits = oracle(output.sequences[i][None]).logits[0, -len(response) - 1 : -1]
        prompt_length = len(batch.data["prompt"][i])
        kept = torch.cat([
            hugging_face_scores(settings, prompt_length, output.sequences[i][None, : prompt_length + place], row[None])
            for place, row in enumerate(logits)
        ])  # fmt: skip
        for scores, actual in ((kept, output.logprobs[i]), (logits / temperature, output.untruncated_logprobs[i])):
            expected = scores.log_softmax(-1).gather(-1, response[:, None])[:, 0]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def hugging_face_scores(settings: dict, prompt_length: int, sequence: Tensor, logits: Tensor) -> Tensor:
    processors = LogitsProcessorList()
    if settings.get("temperature", 1.0) > 0:
        processors.append(TemperatureLogitsWarper(settings.get("temperature", 1.0)))
    if "min_new_tokens" in settings:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, settings["min_new_tokens"], EOS))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    return processors(sequence, logits)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_untruncated_logprobs_are_those_of_the_training_forward(settings):
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    batch = prompts(GROUPED)
    output = rollout(decoder, batch, **settings)
    for i, logits in enumerate(packed_logits(decoder, batch, output)):
        expected = token_logprobs(logits, responses(batch, output)[i], settings.get("temperature") or 1.0)
        torch.testing.assert_close(output.untruncated_logprobs[i], expected, rtol=0, atol=1e-4)


def test_800_samples_in_little_memory_are_those_generated_in_much_and_one_by_one():
    """Sequences wait, lose their pages, are computed anew, and share the pages of their prompts."""
    config = tiny(num_kv_heads=2, num_layers=2)
    decoder = decoder_of(config, llama(config, torch.float64))
    generator = torch.Generator().manual_seed(3)
    distinct = prompts(config, torch.randint(1, 40, (200,), generator=generator).tolist()).data["prompt"]
    batch = Batch(tuple(range(800)), {"prompt": [prompt for prompt in distinct for _ in range(4)]})
    options = GenerationOptions(max_new_tokens=12, eos_token=EOS, temperature=1.5, top_p=0.95, kv_cache_tokens=512)
    output, report = generate(decoder, batch, GenerationRequest(options, sample_key=KEY))
    assert report.preemptions > 50
    # 2 layers, keys and values, 2 heads of 8 numbers: at most 512 of the 20,000 tokens lie in the cache at a time.
    assert report.cache_bytes == 2 * 2 * 2 * 8 * 8 * 512
    assert report.steps > 10 * 12
    much = replace(options, kv_cache_tokens=None)
    assert_same_rollouts(output, generate(decoder, batch, GenerationRequest(much, sample_key=KEY))[0])
    for i in range(0, 800, 9):  # each of the four of a prompt in turn
        alone = generate(decoder, batch.select([i]), GenerationRequest(options, sample_key=KEY))[0]
        assert_same_rollouts(GenerationOutput(**{f: [getattr(output, f)[i]] for f in FIELDS}), alone)


def test_without_a_budget_nobody_waits():
    """One page is enough for some prompts with their responses and not for others; there is room for all the same."""
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    batch = prompts(GROUPED, (6, 7, 6, 7, 6, 7, 6, 9) * 4)
    options = GenerationOptions(max_new_tokens=8, eos_token=-1)
    _, report = generate(decoder, batch, GenerationRequest(options, sample_key=KEY))
    assert report.steps == 8


def test_a_budget_below_the_longest_sequence_is_refused():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    with pytest.raises(UserError, match=r"kv_cache_tokens=30 is room for 1 pages .* set it to at least 32"):
        rollout(decoder, prompts(GROUPED), kv_cache_tokens=30)
    rollout(decoder, prompts(GROUPED), kv_cache_tokens=32)


def test_equal_prompts_are_computed_once():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    rows: list[int] = []
    decoder.model.norm.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    prompt = prompts(GROUPED, [20, 20]).data["prompt"]
    batch = Batch(tuple(range(8)), {"prompt": [prompt[i % 2] for i in range(8)]})
    rollout(decoder, batch, eos_token=-1)
    assert rows == [40] + [8] * 11


def test_stop_sequences_end_a_response_where_it_first_has_one():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED, PROMPT_LENGTHS * 3)
    settings = {"temperature": 1.5, "eos_token": -1}
    free = [r.tolist() for r in responses(batch, rollout(decoder, batch, **settings))]
    stops = ((free[0][3],), tuple(free[1][4:6]), tuple(free[2][2:5]))
    for least in (0, 6):
        stopped = rollout(decoder, batch, **settings, stop_sequences=stops, min_new_tokens=least)
        lengths = set()
        for response, whole in zip(responses(batch, stopped), free, strict=True):
            ends = [n for n in range(1, 13) for s in stops if n >= max(least, len(s)) and whole[n - len(s) : n] == [*s]]
            assert response.tolist() == whole[: min(ends, default=12)]
            lengths.add(len(response))
        assert len(lengths) > 3


def test_stop_strings_end_a_response_where_its_text_first_has_one(tmp_path):
    """However it is cut into tokens, among end tokens and full lengths, in a cache with room for few."""
    tokenizer = two_letter_tokenizer(GROUPED.vocab_size)
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))
    strings = ("abba", "bbbb")
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED, PROMPT_LENGTHS * 6)
    free = responses(batch, rollout(decoder, batch, temperature=1.5, eos_token=-1))
    stopped = rollout(
        decoder, batch, temperature=1.5, stop_strings=strings, tokenizer=path, is_end=StopStrings(path, strings),
        kv_cache_tokens=96,
    )  # fmt: skip
    reasons, cuts = set(), set()
    for response, whole in zip(responses(batch, stopped), map(Tensor.tolist, free), strict=True):
        end = first_end(tokenizer, whole, strings, EOS)
        assert response.tolist() == whole[:end]
        reasons.add("end token" if whole[end - 1] == EOS else "length" if end == 12 else "string")
        cuts.add(tuple(whole[max(0, end - 2) : end]))
    assert reasons == {"end token", "length", "string"}
    assert len(cuts) > 10


def test_an_end_check_that_answers_neither_yes_nor_no():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    with pytest.raises(InterfaceError, match="returned None, must be True or False"):
        rollout(decoder, prompts(GROUPED, [5]), is_end=lambda response: None)


def test_a_prompt_does_not_complete_a_stop_sequence():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED, [5])
    (free,) = responses(batch, rollout(decoder, batch, temperature=0.0, eos_token=-1))
    across = (int(batch.data["prompt"][0][-1]), int(free[0]))
    (stopped,) = responses(batch, rollout(decoder, batch, temperature=0.0, eos_token=-1, stop_sequences=(across,)))
    assert len(stopped) > 1


@pytest.mark.parametrize("least", [4, 12])
def test_greedy_with_a_least_length_is_that_of_hugging_face(least):
    oracle = llama(GROUPED, torch.float64)
    batch = prompts(GROUPED, [6, 6, 6, 6])
    decoder = decoder_of(GROUPED, oracle)
    # An end token that would come too early.
    eos = int(responses(batch, rollout(decoder, batch, temperature=0.0, eos_token=-1))[0][1])
    output = rollout(decoder, batch, temperature=0.0, eos_token=eos, min_new_tokens=least)
    for prompt, sequence in zip(batch.data["prompt"], output.sequences, strict=True):
        expected = oracle.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=12,
            min_new_tokens=least, eos_token_id=eos,
        )  # fmt: skip
        assert sequence.tolist() == expected[0].tolist()


def test_weights_are_packed_for_the_call_alone():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    seen = []
    projection = decoder.model.layers["0"].mlp.up_proj
    projection.register_forward_pre_hook(lambda module, _: seen.append(module.packed is not None))
    first = rollout(decoder, prompts(GROUPED), temperature=0.0)
    assert all(seen)
    assert projection.packed is None
    for parameter in decoder.parameters():
        parameter.neg_()
    assert rollout(decoder, prompts(GROUPED), temperature=0.0).sequences[0].tolist() != first.sequences[0].tolist()


def test_packed_weights_give_the_logits_of_the_uncached_forward():
    """In float32; prefills and decode steps, each linear and joined ones."""
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    batch = prompts(GROUPED)
    output = rollout(decoder, batch, temperature=0.8, return_logits=True)
    for found, expected in zip(output.logits, packed_logits(decoder, batch, output), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_draws_are_those_of_the_uncached_forward_and_the_documented_random_numbers():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED)
    output = rollout(decoder, batch, temperature=0.8, return_logits=True)
    for i, logits in enumerate(packed_logits(decoder, batch, output)):
        torch.testing.assert_close(output.logits[i], logits, rtol=0, atol=1e-10)
        places = len(batch.data["prompt"][i]) + torch.arange(len(logits))
        expected = draw(logits, uniform(*KEY, torch.tensor([batch.ids[i]]), places), 0.8)
        assert responses(batch, output)[i].tolist() == expected.tokens.tolist()
        torch.testing.assert_close(output.logprobs[i], expected.logprobs, rtol=0, atol=1e-10)
        torch.testing.assert_close(output.margins[i], expected.margins, rtol=0, atol=1e-10)


def test_rollouts_depend_on_neither_company_nor_order():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED)
    together = rollout(decoder, batch, temperature=2.0)
    assert len({len(r) for r in responses(batch, together)}) > 3

    alone = [rollout(decoder, batch.select([i]), temperature=2.0) for i in range(len(batch))]
    assert_same_rollouts(GenerationOutput(**{f: [getattr(o, f)[0] for o in alone] for f in FIELDS}), together)

    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = rollout(decoder, batch.select(order), micro_batches=3, temperature=2.0)
    back = [order.index(i) for i in range(len(batch))]
    assert_same_rollouts(GenerationOutput(**{f: [getattr(shuffled, f)[i] for i in back] for f in FIELDS}), together)


def test_the_id_and_not_the_prompt_makes_the_difference():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    prompt = prompts(GROUPED, [4]).data["prompt"]
    twins = concatenate([Batch((i,), {"prompt": prompt}) for i in range(8)])
    sampled = {tuple(s.tolist()) for s in rollout(decoder, twins, temperature=2.0).sequences}
    greedy = {tuple(s.tolist()) for s in rollout(decoder, twins, temperature=0.0).sequences}
    assert (len(sampled), len(greedy)) == (8, 1)


@pytest.mark.parametrize("max_new_tokens", [1, 12])
def test_responses_end_with_the_first_end_token_or_at_the_limit(max_new_tokens):
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED, PROMPT_LENGTHS * 3)
    output = rollout(decoder, batch, max_new_tokens=max_new_tokens)
    free = responses(batch, rollout(decoder, batch, max_new_tokens=max_new_tokens, eos_token=-1))
    for i, response in enumerate(responses(batch, output)):
        assert response.tolist() == free[i][: first_place(EOS, free[i]) + 1].tolist()
        assert len(output.logprobs[i]) == len(output.margins[i]) == len(response)


def test_ended_sequences_leave_the_computation():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    rows: list[int] = []
    decoder.model.layers["3"].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    batch = prompts(GROUPED)
    lengths = [len(r) for r in responses(batch, rollout(decoder, batch, temperature=2.0))]
    assert rows[0] == sum(PROMPT_LENGTHS)
    # A response of n tokens takes the prefill and n - 1 decode steps.
    assert rows[1:] == [sum(n > step for n in lengths) for step in range(1, max(lengths))]


def test_forced_responses_are_scored_and_nothing_else_changes():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float64))
    batch = prompts(GROUPED)
    free = rollout(decoder, batch, temperature=0.7, return_logits=True)
    given = responses(batch, free)
    replayed = rollout(decoder, batch, micro_batches=2, temperature=0.7, forced=given, return_logits=True)
    assert [s.tolist() for s in replayed.sequences] == [s.tolist() for s in free.sequences]
    torch.testing.assert_close(replayed.logprobs, free.logprobs, rtol=0, atol=1e-10)
    torch.testing.assert_close(replayed.logits, free.logits, rtol=0, atol=1e-10)
    assert all((m == 1).all() for m in replayed.margins)
    # An end token inside of a given response does not end it.
    odd = [torch.tensor([4, EOS, 5, 6][: 1 + i % 4]) for i in range(len(batch))]
    assert [r.tolist() for r in responses(batch, rollout(decoder, batch, forced=odd))] == [r.tolist() for r in odd]


def test_training_may_use_the_outputs():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    output = rollout(decoder, prompts(GROUPED), return_logits=True)
    for tensors in (output.sequences, output.logprobs, output.margins, output.logits):
        assert not any(t.is_inference() for t in tensors)
    weight = torch.ones((), requires_grad=True)
    (weight * output.logprobs[0]).sum().backward()
    assert weight.grad == output.logprobs[0].sum()


def test_bfloat16_gives_float32_logprobs():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.bfloat16))
    batch = prompts(GROUPED)
    output = rollout(decoder, batch, return_logits=True)
    assert {t.dtype for t in output.logprobs} == {torch.float32}
    for logits, logprobs, response in zip(output.logits, output.logprobs, responses(batch, output), strict=True):
        expected = logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_what_cannot_be_generated_is_refused():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    batch = prompts(GROUPED, [3, 2])
    with pytest.raises(ValueError, match="prompt 1 of the batch is empty"):
        rollout(decoder, batch.with_data(prompt=[batch.data["prompt"][0], torch.tensor([], dtype=torch.int64)]))
    for length in (0, 13):
        forced = [torch.tensor([3]), torch.full((length,), 3)]
        with pytest.raises(ValueError, match=f"forced response 1 has {length} tokens; .* max_new_tokens=12"):
            rollout(decoder, batch, forced=forced)


def test_model_chunks_are_refused():
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2, chunks=2))
    decoder = build_decoder(tiny(num_layers=4), ParallelGroups(layout, 0), torch.float32)
    with pytest.raises(UserError, match=r"generate in dp1 tp1 pp2 chunks2: .* to a layout with chunks=1"):
        rollout(decoder, prompts(GROUPED, [3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_call_and_name_step_sample_and_token(dtype, temperature):
    decoder = build_decoder(tiny(), ONE_RANK, dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    decoder.model.embed_tokens.weight.data[7] = torch.nan
    batch = Batch((11, 12), {"prompt": [torch.tensor([3, 4]), torch.tensor([3, 7])]})
    options = GenerationOptions(max_new_tokens=3, eos_token=-1, temperature=temperature)
    with pytest.raises(FloatingPointError, match=r"in step 6: the logits of sample 12 for token 0 of its response"):
        generate(decoder, batch, GenerationRequest(options, sample_key=(0, 5)))[0]
    forced = [torch.tensor([3, 4]), torch.tensor([3, 4])]
    with pytest.raises(FloatingPointError, match="the logits of sample 12 for token 0"):
        generate(decoder, batch, GenerationRequest(options, sample_key=(0, 5), forced=forced))[0]


def test_what_the_model_cannot_read_is_named():
    decoder = decoder_of(GROUPED, llama(GROUPED, torch.float32))
    batch, size = prompts(GROUPED, [3, 2]), GROUPED.vocab_size
    beyond = batch.with_data(prompt=[batch.data["prompt"][0], torch.tensor([1, size])])
    with pytest.raises(ValueError, match=f"'prompt' of sample {batch.ids[1]} has the token id {size} at place 1"):
        rollout(decoder, beyond)
    forced = [torch.tensor([3]), torch.tensor([3, 10**9])]
    with pytest.raises(ValueError, match=f"'forced_response' of sample {batch.ids[1]} has the token id 1000000000"):
        rollout(decoder, batch, forced=forced)
    learned = build_decoder(
        tiny(positions="learned", max_positions=8, norm="layer", mlp="plain"), ONE_RANK, torch.float32
    )
    options = GenerationOptions(max_new_tokens=6, eos_token=-1)
    with pytest.raises(ValueError, match=f"response' of sample {batch.ids[0]} has 9 tokens, .* max_positions=8"):
        generate(learned, batch, GenerationRequest(options, sample_key=(0, 0)))[0]
