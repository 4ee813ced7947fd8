"""Decode steps padded to buckets and replayed over buffers that stay, against the same generation without."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from realhf.api.generation import GenerationOptions
from realhf.architecture.decoding import graphs_refusal
from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.generate import decode_graphs, paged_attention
from realhf.engine.generate.decode_graphs import (
    CacheSizes,
    CudaCapture,
    DecodeGraphs,
    DecodeWorkspace,
    KeptWorkspace,
    capture_of,
    power_of_two,
    rows_bucket,
)
from realhf.engine.generate.kv_cache import KVCache
from realhf.engine.generate.loop import generate
from realhf.engine.generate.paged_attention import CppKernels, TorchKernels
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.models.decoder import Decoder
from tests.unit.engine.captures import EagerCapture, TracedCapture
from tests.unit.engine.decoder_boxes import build_decoder, initialise
from tests.unit.engine.losses import ONE_RANK, tiny
from tests.unit.engine.test_generate import KEY, assert_same_rollouts

FAMILIES = {
    "grouped": tiny(num_layers=2, num_kv_heads=2),
    "windows": tiny(num_layers=2, sliding_window=6, full_attention_layers=(1,)),
    "learned positions": tiny(num_layers=2, positions="learned", max_positions=64, norm="layer", mlp="plain"),
    "tied and scaled": tiny(num_layers=2, tied_embeddings=True, scale_embeddings=True, norm="rms_plus_one"),
}


def test_buckets_by_hand():
    rows = (1, 2, 3, 4, 5, 8, 9, 16, 17, 100, 128, 129, 160, 161)
    assert [rows_bucket(n) for n in rows] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 104, 128, 160, 160, 192]
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


def test_what_is_not_captured():
    assert graphs_refusal(tiny(), on_gpu=True) is None
    assert "host" in (graphs_refusal(tiny(experts=Experts(count=4, per_token=2)), on_gpu=True) or "")
    assert graphs_refusal(tiny(), on_gpu=False) == "a CPU has no graphs"
    assert capture_of(decoder_of(tiny()), "kept") is None
    with pytest.raises(UserError, match="decode_graphs='on' is not known; choose one of kept, call, off"):
        GenerationOptions(max_new_tokens=1, eos_token=-1, decode_graphs="on")


def decoder_of(config: DecoderConfig) -> Decoder:
    decoder = build_decoder(config, ONE_RANK, torch.float64)
    initialise(decoder, seed=0)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.mul_(8)  # so large that next tokens differ in probability
    return decoder


def batch_of(samples: int, longest: int = 20, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (samples,), generator=generator).tolist()
    return Batch(tuple(range(samples)), {"prompt": [torch.randint(3, 24, (n,), generator=generator) for n in lengths]})


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(("kernels", "memory"), [("C++", None), ("torch", 160)])
def test_the_rollouts_are_those_without_graphs(monkeypatch, kernels, config, memory):
    """Rows end at different times, so that buckets shrink; with little memory some wait, and steps with prompts among
    them are computed as they are."""
    if kernels == "torch":
        monkeypatch.setattr(paged_attention, "_kernels", None)
    decoder, batch, capture = decoder_of(config), batch_of(13), EagerCapture()
    options = GenerationOptions(max_new_tokens=24, eos_token=2, temperature=1.3, kv_cache_tokens=memory)
    arguments = {"sample_key": KEY, "micro_batches": 1, "return_logits": True}
    expected = generate(decoder, batch, GenerationRequest(options, **arguments))[0]
    actual, report = generate(decoder, batch, GenerationRequest(options, **arguments), DecodeWorkspace(capture))
    assert_same_rollouts(actual, expected)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-9)
    assert 1 < capture.captures < capture.replays
    assert capture.replays > report.steps // 3
    assert len({len(x) for x in actual.logprobs}) > 3


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_recorded_operators_are_all_that_is_needed(monkeypatch, config):
    """Nothing of a step is read on the host or decided by Python. A kernel in C++ cannot be recorded here."""
    monkeypatch.setattr(paged_attention, "_kernels", None)
    decoder, batch, capture = decoder_of(config), batch_of(3), TracedCapture()
    options = GenerationOptions(max_new_tokens=8, eos_token=-1)
    arguments = {"sample_key": KEY, "micro_batches": 1}
    expected = generate(decoder, batch, GenerationRequest(options, **arguments))[0]
    actual = generate(decoder, batch, GenerationRequest(options, **arguments), DecodeWorkspace(capture))[0]
    assert_same_rollouts(actual, expected)
    # Seven steps: the table grows to two pages, and the first step of either width is not recorded.
    assert (capture.runs, capture.captures, capture.replays) == (2, 2, 5)


def test_a_bucket_is_recorded_when_it_comes_up_again():
    """Recording takes about as long as launching the kernels once."""
    decoder, capture = decoder_of(FAMILIES["grouped"]), EagerCapture()
    workspace = DecodeWorkspace(capture)
    counts = []
    for tokens in (2, 2, 2, 4):  # the first one comes from the prompt
        options = GenerationOptions(max_new_tokens=tokens, eos_token=-1)
        generate(decoder, batch_of(3), GenerationRequest(options, sample_key=KEY, micro_batches=1), workspace)
        counts.append((capture.runs, capture.captures, capture.replays))
    assert counts == [(1, 0, 0), (1, 1, 1), (1, 1, 2), (2, 2, 4)]  # the last one needs more pages: new graphs


def test_buffers_and_graphs_are_kept_between_calls():
    """The parameters change in place, as training and reallocation change them."""
    decoder = decoder_of(FAMILIES["grouped"])
    options = GenerationOptions(max_new_tokens=24, eos_token=-1, temperature=1.3)
    capture = EagerCapture()
    workspace = DecodeWorkspace(capture)

    def call(batch: Batch) -> int:
        """How many graphs it made."""
        before = capture.captures
        arguments = {"sample_key": KEY, "micro_batches": 1}
        actual = generate(decoder, batch, GenerationRequest(options, **arguments), workspace)[0]
        assert_same_rollouts(actual, generate(decoder, batch, GenerationRequest(options, **arguments))[0])
        return capture.captures - before

    assert call(batch_of(9)) == 1
    for parameter in decoder.parameters():
        parameter.mul_(1.01)
    assert call(batch_of(9, seed=2)) == 0
    assert call(batch_of(3)) == 1  # fewer rows, of another bucket
    assert call(batch_of(12)) == 1  # more pages than there are
    assert call(batch_of(9)) == 0  # padded to the same 16 rows
    decoder.lm_head.weight.data = decoder.lm_head.weight.data.clone()
    assert call(batch_of(9)) == 1  # a graph reads what lies at the old address


def test_a_model_keeps_them_as_long_as_it_is_asked_to():
    model = ShardedModel(ModelSpec(tiny(), ONE_RANK, torch.float32))
    model.initialise(0)
    spaces = []
    for graphs in ("kept", "kept", "call", "kept"):
        options = GenerationOptions(max_new_tokens=4, eos_token=-1, decode_graphs=graphs)
        model.generate(batch_of(3), GenerationRequest(options, sample_key=KEY))
        spaces.append(model._kept.workspace)
    first, second, none, new = spaces
    assert first is second is not None
    assert none is None
    assert new is not None
    assert new is not first
    model.residency.free()
    assert model._kept.workspace is None  # their pages go with the parameters


def test_steps_are_captured_on_a_gpu_unless_that_is_off(monkeypatch):
    monkeypatch.setattr(decode_graphs, "CudaCapture", lambda: "captured")
    for is_cuda, life, captured in (
        (True, "kept", "captured"),
        (True, "call", "captured"),
        (True, "off", None),
        (False, "kept", None),
    ):
        parameters = iter([SimpleNamespace(is_cuda=is_cuda)])
        decoder = SimpleNamespace(parameters=lambda parameters=parameters: parameters, config=tiny())
        assert capture_of(decoder, life) == captured


class CudaStandIns:
    """Stands in for streams and graphs of `torch.cuda`; `log` has what was done to them."""

    def __init__(self, monkeypatch):
        self.log, self.graphs = [], []
        self.present, self.streams = SimpleNamespace(name="present"), []
        for name in ("current_device", "current_stream", "stream", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new_graph)
        self.present.wait_stream = lambda other: self.log.append(f"present waits for {other.name}")
        decode_graphs._recording_stream.cache_clear()

    def current_device(self):
        return 3

    def current_stream(self):
        return self.present

    def new_stream(self, device):
        name = f"new of {device}"
        self.streams.append(name)
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("back")

    def empty_cache(self):
        self.log.append("empty the cache")

    def new_graph(self):
        log, number = self.log, len(self.graphs)

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                log.append(f"record in {pool}, errors of a {capture_error_mode}")
                self.own = pool or f"the pool of {number}"

            def capture_end(self):
                log.append("recorded")

            def pool(self):
                return self.own

            def replay(self):
                log.append(f"replay {number}")

        graph = Graph()
        self.graphs.append(weakref.ref(graph))
        return graph


@pytest.fixture
def cuda(monkeypatch):
    yield CudaStandIns(monkeypatch)
    decode_graphs._recording_stream.cache_clear()


def test_a_cuda_graph_is_recorded_on_the_stream_of_its_first_run_and_of_all_others(cuda):
    capture = CudaCapture()
    capture.run(lambda: cuda.log.append("compute"))
    ran = ["new of 3 waits for present", "on new of 3", "compute", "back", "present waits for new of 3"]
    assert cuda.log == ran
    cuda.log.clear()
    replay = capture.record(lambda: cuda.log.append("compute"))
    recorded = ["record in None, errors of a thread_local", "compute", "recorded"]
    assert cuda.log == ["empty the cache", *ran[:2], *recorded, *ran[3:]]
    replay()
    assert cuda.log[-1] == "replay 0"
    CudaCapture().run(lambda: None)
    assert cuda.streams == ["new of 3"]  # cuBLAS has a workspace for each


def test_a_recording_ends_where_its_computation_fails(cuda):
    def fails():
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        CudaCapture().record(fails)
    assert cuda.log[-1] == "recorded"


def test_graphs_that_live_share_a_pool_and_the_next_ones_do_not_take_that_of_dead_ones(cuda):
    """torch ends with an assertion where a pool whose graphs are gone is taken again. Cached memory makes room where
    the pool may have to grow, and stays where it is else."""
    capture = CudaCapture()

    def record(size):
        cuda.log.clear()
        replay = capture.record(lambda: None, size)
        pool = next(line for line in cuda.log if line.startswith("record")).split(",")[0]
        return replay, pool, "empty the cache" in cuda.log

    first, *found = record(8)
    assert found == ["record in None", True]
    second, *found = record(8)
    assert found == ["record in the pool of 0", False]
    third, *found = record(9)
    assert found == ["record in the pool of 0", True]
    del first
    smaller, *found = record(4)
    assert found == ["record in the pool of 0", False]
    del second, third, smaller
    assert not any(graph() for graph in cuda.graphs)
    _, *found = record(1)
    assert found == ["record in None", True]


class Written:
    """A capture that notes what the buffers hold when a step is computed, and the sizes of what it records."""

    def __init__(self, graphs):
        self.graphs, self.shapes, self.sizes = graphs, [], []

    def run(self, compute):
        step = list(self.graphs()._steps.values())[-1]
        self.shapes.append((step.x.tolist(), step.lengths.tolist(), step.table.tolist()))
        compute()

    def record(self, compute, size):
        self.sizes.append(size)
        return lambda: self.run(compute)


def graphs_of(kernels, max_rows=5, width=3, pages=9, capture=None):
    decoder = decoder_of(tiny(num_layers=1))
    cache = KVCache(range(1), pages, 4, 8, next(decoder.parameters()), kernels)
    for store in (cache._keys, cache._values):
        store.zero_()
    made = []
    graphs = DecodeGraphs(decoder, cache, max_rows, width, capture or Written(lambda: made[0]), 7.0)
    made.append(graphs)
    return graphs


@pytest.mark.parametrize("kernels", [TorchKernels(), None], ids=["gathers", "reads what it needs"])
def test_a_step_is_padded_with_rows_of_one_token_in_the_spare_page(kernels):
    """The table is as wide as a bucket of pages where the work grows with it, else always as wide as it may be."""
    graphs = graphs_of(kernels)
    assert (graphs.max_rows, graphs.width) == (8, 4)
    table = np.array([[3, 1], [4, 2], [5, 6]], dtype=np.int32)
    out = graphs(torch.tensor([7, 8, 9]), np.array([5, 17, 3]), table)
    assert out.shape == (3, 24)
    spare = [8] * (0 if kernels else 2)
    assert graphs.capture.shapes == [
        ([7, 8, 9, 0], [5, 17, 3, 0], [[3, 1, *spare], [4, 2, *spare], [5, 6, *spare], [8, 8, *spare]])
    ]
    graphs(torch.tensor([5, 6, 7, 4]), np.array([1, 2, 3, 4]), np.array([[1, 0]] * 4, dtype=np.int32))
    x, lengths, _ = graphs.capture.shapes[-1]
    assert (x, lengths, len(graphs._steps)) == ([5, 6, 7, 4], [1, 2, 3, 4], 1)
    assert graphs.capture.sizes == [4 * (2 if kernels else 4)]
    graphs(torch.tensor([5]), np.array([1]), np.array([[1, 0]], dtype=np.int32))
    assert len(graphs._steps) == 2
    graphs(torch.tensor([5]), np.array([1]), np.array([[1]], dtype=np.int32))
    assert len(graphs._steps) == (3 if kernels else 2)


def test_graphs_serve_what_is_no_larger_than_they_are():
    graphs = graphs_of(None)  # 9 pages with the spare one, 8 rows, 4 pages a row
    kernels = graphs.cache.kernels
    assert graphs.fits(kernels, CacheSizes(8, 8, 4))
    for sizes in (CacheSizes(9, 8, 4), CacheSizes(8, 9, 4), CacheSizes(8, 8, 5)):
        assert not graphs.fits(kernels, sizes)
    assert not graphs.fits(TorchKernels(3), CacheSizes(1, 1, 1))


def test_a_step_among_tensor_parallel_ranks_is_watched(monkeypatch):
    """torch's watchdog knows nothing of collectives in a graph."""
    watched = []
    graphs = graphs_of(None)
    step = torch.tensor([5]), np.array([1]), np.array([[1]], dtype=np.int32)
    for _ in range(2):
        graphs(*step)
    waits = SimpleNamespace(watch=lambda timeout_s, what: watched.append((timeout_s, what())))
    groups = SimpleNamespace(tensor="a group", waits=waits, rank=3)
    graphs.decoder = SimpleNamespace(groups=groups)
    graphs._replays = dict.fromkeys(graphs._replays, lambda: None)
    graphs(*step)
    assert watched == [(7.0, "generate: rank 3 waited for the other tensor-parallel ranks in a decode step")]


def test_pages_and_graphs_only_grow():
    decoder, kernels = decoder_of(tiny(num_layers=2)), CppKernels()
    workspace = DecodeWorkspace(EagerCapture(), 5.0)
    assert DecodeWorkspace(None).timeout_s == 600

    def sizes(index, *asked):
        cache, graphs = workspace.of_batch(index, decoder, kernels, CacheSizes(*asked))
        assert graphs.cache is cache
        assert graphs.timeout_s == 5.0
        assert (cache.layers[1].keys.shape, len(cache.layers)) == ((cache.pages, 4, 8, 16), 2)
        return graphs, (cache.pages, graphs.max_rows, graphs.width)

    first, found = sizes(0, 10, 4, 2)
    assert found == (11, 4, 2)  # one is spare
    again, found = sizes(0, 10, 3, 1)
    assert again is first
    wider, found = sizes(0, 5, 4, 3)
    assert (wider is first, found) == (False, (11, 4, 4))
    assert sizes(0, 12, 1, 1)[1] == (13, 4, 4)
    assert sizes(0, 1, 9, 1)[1] == (13, 16, 4)
    assert sizes(1, 2, 1, 1)[1] == (3, 1, 1)


def test_pages_that_are_used_again_are_harmless():
    decoder, workspace = decoder_of(tiny(num_layers=1)), DecodeWorkspace(EagerCapture())
    asked = 0, decoder, TorchKernels(), CacheSizes(2, 1, 1)
    cache, _ = workspace.of_batch(*asked)
    cache._values.fill_(torch.nan)
    assert workspace.of_batch(*asked)[0] is cache
    assert (cache._values == 0).all()


def test_old_pages_are_free_before_there_are_new_ones(monkeypatch):
    decoder, workspace = decoder_of(tiny(num_layers=1)), DecodeWorkspace(EagerCapture())
    kernels, is_gone = TorchKernels(), []

    def made(*arguments):
        is_gone.append(old() is None)
        return KVCache(*arguments)

    old = weakref.ref(workspace.of_batch(0, decoder, kernels, CacheSizes(2, 1, 1))[0])
    assert old() is not None
    monkeypatch.setattr(decode_graphs, "KVCache", made)
    workspace.of_batch(0, decoder, kernels, CacheSizes(4, 1, 1))
    assert is_gone == [True]


@pytest.mark.parametrize("is_possible", [True, False])
def test_a_workspace_is_kept_where_that_is_asked_for_and_possible(is_possible):
    kept, decoder = KeptWorkspace(is_possible=is_possible, timeout_s=9.0), decoder_of(tiny(num_layers=1))
    first = kept.of_call(decoder, "kept")
    assert (first.timeout_s, first.capture) == (9.0, None)
    assert kept.workspace is (first if is_possible else None)
    assert (kept.of_call(decoder, "kept") is first) == is_possible
    for life in ("call", "off"):
        kept.of_call(decoder, "kept")
        assert kept.of_call(decoder, life) is not first
        assert kept.workspace is None
    kept.of_call(decoder, "kept")
    kept.forget()
    assert kept.workspace is None
