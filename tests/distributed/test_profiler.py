"""`realhf profile` end to end on two workers, and the stopwatch that all ranks share."""

import itertools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from msgspec import structs

from realhf.architecture.model import DecoderConfig
from realhf.cli import main
from realhf.geometry.parameters import parameter_count
from realhf.launch.local import LocalLauncher
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.measured import constants_path, load_constants
from realhf.planning.model.profile import CallOverheads, LayerProfile, load_profile, profile_path
from realhf.planning.model.timings import load_costs
from realhf.profiling.job import ProfileTarget
from realhf.profiling.model_bench import spread_of
from tests.distributed.pool import run_distributed
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed

MODEL = DecoderConfig(hidden_size=64, intermediate_size=256, num_layers=3, num_heads=2, num_kv_heads=2, vocab_size=1024)
ONE_KV_HEAD = DecoderConfig(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=64
)
EXPERIMENT = """
from dataclasses import dataclass, field
from realhf.api import Generate, Score, auto
from realhf.api.experiment import KeyLengths
from realhf.dataflow.graph import GENERATE, INFERENCE, ModelFunctionCallDef
from realhf.architecture.model import DecoderConfig
from realhf.planning.model.descriptions import load_hardware


@dataclass(frozen=True)
class Prompts:
    keys: tuple = ("prompt",)

    def check(self):
        return 8

    def lengths(self):
        return {"prompt": KeyLengths(5.5, 8, 35.0)}


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class Tiny:
    seed: int = 0
    steps: int = 1
    architecture: DecoderConfig = DecoderConfig(
        hidden_size=64, intermediate_size=256, num_layers=3, num_heads=2, num_kv_heads=2, vocab_size=1024
    )
    reference: DecoderConfig = DecoderConfig(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=64
    )

    @property
    def rpcs(self):
        def reward(name, model):
            return ModelFunctionCallDef(
                model_name=name, model_type=model, interface_type=INFERENCE, interface_impl=Score(),
                input_data=["seq"], output_data=[name + "_score"],
            )

        return [
            ModelFunctionCallDef(
                model_name="actor", model_type=self.architecture, interface_type=GENERATE,
                interface_impl=Generate(max_new_tokens=4, eos_token=2),
                input_data=["prompt"], output_data=["seq", "logprob"],
            ),
            reward("reward", self.architecture.with_head("scalar")),
            reward("small", self.reference),
        ]

    @property
    def dataset(self):
        return Prompts()
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("experiment") / "tiny.py"
    file.write_text(EXPERIMENT)
    return file


@pytest.fixture(scope="module")
def root(experiment, tmp_path_factory) -> Path:
    """A folder of profiles after one `realhf profile` with two workers."""
    root = tmp_path_factory.mktemp("profiles")
    assert main(words(experiment, root)) == 0
    return root


def words(experiment: Path, root: Path, *more: str) -> list[str]:
    options = [
        "--num-workers",
        "2",
        "--hardware",
        "cpu",
        "--repetitions",
        "3",
        "--max-tokens",
        "512",
        "--timeout-s",
        "1500",
    ]
    return ["profile", str(experiment), "--profiles-dir", str(root), *options, *more]


def profile_of(model: DecoderConfig, root: Path) -> LayerProfile:
    return load_profile(profile_path(model, "float32", "cpu", root))


def test_every_model_type_has_a_profile(root):
    profile = profile_of(MODEL, root)
    assert (profile.model, profile.dtype, profile.hardware) == (MODEL, "float32", "cpu")
    assert profile.sequence_length == 10  # 5.5 rounded to even, and 4 new tokens
    assert [timings.tp for timings in profile.tensor] == [1, 2]
    for timings in profile.tensor:
        for name in ("layer_forward", "layer_backward", "head_forward", "head_backward"):
            curve = getattr(timings, name)
            assert curve.sizes == tuple(2.0**k for k in range(4, 10)), name
            assert min(curve.seconds) > 0, name
        assert [decode.context for decode in timings.layer_decode] == [5, 10, 20]
        assert all(decode.seconds.sizes == (1.0, 2.0, 4.0, 8.0) for decode in timings.layer_decode)
    assert profile.sampling_s > 0
    assert profile.optimizer_s_per_parameter > 0
    assert profile.call_overhead_s > 0
    assert min(structs.astuple(profile.overheads)) >= 0
    assert set(profile.spread) == {"layers", "collectives", "overheads", "reallocation"}
    assert all(0 <= spread < 3 for spread in profile.spread.values())


@pytest.mark.measures
def test_measured_times_are_those_of_the_work(root):
    profile, scalar = profile_of(MODEL, root), profile_of(MODEL.with_head("scalar"), root)
    for name in ("layer_forward", "layer_backward", "head_forward", "head_backward"):
        curve = getattr(
            profile.tensor[0], name
        )  # tp=1: beyond, the latency of an all-reduce decides in so small a model
        assert median(curve.seconds[-3:]) > 2 * median(curve.seconds[:3]), name  # of 64 times the tokens
    for timings in profile.collectives:
        assert timings.seconds.seconds[-1] > timings.seconds.seconds[0], timings.kind
    for with_lm, with_scalar in zip(profile.tensor, scalar.tensor, strict=True):
        # 1,024 logits a token against one value.
        assert with_lm.head_forward.seconds[-1] > with_scalar.head_forward.seconds[-1]
    overheads = profile.overheads
    assert 0 < overheads.train_s + overheads.train_micro_batch_s < 1  # packing, the loss, the schedule, the statistics
    assert profile.optimizer_s_per_parameter < 1e-5
    assert 1e5 < profile.reallocation.bandwidth < 1e12


def test_collectives_of_two_are_measured(root):
    found = {(timings.kind, timings.group_size): timings.seconds for timings in profile_of(MODEL, root).collectives}
    assert set(found) == {(kind, 2) for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")}
    for kind, curve in found.items():
        assert min(curve.seconds) > 0, kind


def test_a_reallocation_to_a_neighbour_is_measured(root):
    found = profile_of(MODEL, root).reallocation
    assert found.latency_s >= 0
    assert 0 < found.bandwidth < math.inf


def test_heads_are_measured_apart_over_one_trunk(root):
    lm, scalar = profile_of(MODEL, root), profile_of(MODEL.with_head("scalar"), root)
    for with_lm, with_scalar in zip(lm.tensor, scalar.tensor, strict=True):
        assert with_lm.layer_forward == with_scalar.layer_forward
        assert with_lm.head_forward != with_scalar.head_forward


def test_a_degree_that_does_not_divide_the_model_is_left_out(root):
    assert [timings.tp for timings in profile_of(ONE_KV_HEAD, root).tensor] == [1]


def test_the_planner_takes_the_profiles(root):
    models = {"actor": MODEL, "reward": MODEL.with_head("scalar"), "small": ONE_KV_HEAD}
    assert load_costs(models, dtype="float32", hardware=load_hardware("cpu"), root=root).profiled


def test_what_was_measured_is_kept(experiment, root, capsys, monkeypatch):
    files = sorted((root / "cpu").iterdir())
    before = [(file, file.stat().st_mtime_ns) for file in files]
    monkeypatch.setattr(LocalLauncher, "start", lambda *_: pytest.fail("a worker is started"))
    assert main(words(experiment, root)) == 0
    assert [(file, file.stat().st_mtime_ns) for file in sorted((root / "cpu").iterdir())] == before
    assert len(before) == 3
    assert capsys.readouterr().out.count("kept ") == 3


def test_constants_of_the_machine_are_measured_alone(experiment, tmp_path, capsys):
    only = ("--only", "launches,links, memory,products")
    assert main(words(experiment, tmp_path, *only)) == 0
    printed = capsys.readouterr().out
    found = load_constants(constants_path("cpu", tmp_path))
    assert set(found.constants) == {
        "intra_node_bandwidth", "intra_node_latency_s", "memory_bandwidth", "matmul_flops[float32]", "layer_launch_s",
        "train_launch_s", "decode_launch_s",
    }  # fmt: skip
    for name, constant in found.constants.items():
        assert constant.value > 0, name
        assert 0 <= constant.spread < 3, name
        assert name in printed
    assert [path.name for path in sorted((tmp_path / "cpu").iterdir())] == ["constants.json"], "no profile was made"
    # Plans without a profile take them.
    hardware = load_hardware("cpu")
    costs = load_costs({"actor": MODEL}, dtype="float32", hardware=hardware, root=tmp_path)
    measured = found.constants["memory_bandwidth"]
    assert abs(math.log(costs.hardware.memory_bandwidth / measured.value)) < abs(
        math.log(hardware.memory_bandwidth / measured.value)
    )


def test_the_spread_of_readings_by_hand():
    assert spread_of([2.0]) == 0.0
    assert spread_of([math.exp(x) for x in (0.0, 0.1, 0.2, 0.3, 5.0)]) == pytest.approx(0.2 / 1.349)


def test_a_deadline_ends_the_workers_and_writes_nothing(experiment, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(words(experiment, tmp_path / "profiles", "--timeout-s", "0.5")) == 1
    error = capsys.readouterr().err.partition("error: ")[2]
    assert error.startswith("measuring took longer than --timeout-s 0.5")
    assert error.count(str(tmp_path)) == 1, "where the logs are is said once"
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-tokens", "5"], "--max-tokens 5 is not from 64"),
        (["--repetitions", "0"], "--repetitions 0 is not from 1"),
        (["--hardware", "abacus"], "hardware='abacus' is not known"),
        (["--only", "links,weather"], "--only weather: choose from links, memory, products, launches, network, layers"),
    ],
)
def test_user_errors_exit_with_2(experiment, tmp_path, capsys, more, message):
    assert main(words(experiment, tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_the_command_itself_needs_no_torch():
    code = "import sys, realhf.cli.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_has_an_example():
    done = subprocess.run(
        [sys.executable, "-m", "realhf.cli", "profile", "--help"], check=True, capture_output=True, text=True
    )
    assert "realhf profile experiments/ppo.py" in done.stdout


class Clock:
    """A clock that stands still but for the work that is put on it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, *seconds: float) -> Callable[[], None]:
        """Work that takes these seconds, one after the other, and again."""
        times = itertools.cycle(seconds)

        def advance() -> None:
            self.now_s += next(times)

        return advance


def _stopwatch_on_two_ranks(rank: int) -> list[float]:
    import torch

    from realhf.profiling.model_bench import Stopwatch

    clock = Clock()
    watch = Stopwatch(torch.device("cpu"), repetitions=3, clock=clock)
    work = clock.work((0.25, 0.75)[rank])
    alone = None if rank else work
    # Warmed up twice, then read three times: 4, 1 and 2 seconds.
    odd = clock.work(9.0, 9.0, 4.0, 1.0, 2.0)
    return [
        watch.seconds(work),
        watch.seconds(work, slowest=True),
        watch.seconds(alone),
        watch.seconds(odd),
        *watch.seconds_and_rest(alone, clock.work(1.0)),
        *watch.seconds_and_rest(clock.work(2.0), work, slowest=True),
        # Work below two milliseconds: once after what is done before it, not several times in a reading.
        watch.seconds(clock.work(*[1e-6] * 5, 1.0), before=clock.work(3.0)),
    ]


def _overheads_by_hand(rank: int) -> tuple[CallOverheads, int, int, int]:
    """On two ranks: the overheads of a model whose parts take 1 s (with gradients 10 s) a micro-batch, and whose calls
    take more; its parameters; the tokens and the rows of the whole batch."""
    import torch

    from realhf.engine.packing import pack_micro_batch
    from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
    from realhf.parallel.groups import GroupTable
    from realhf.parallel.waiting import end_process, waits_on
    from realhf.profiling import call_bench
    from realhf.profiling.job import ProfileTarget
    from realhf.profiling.model_bench import Stopwatch

    clock, device = Clock(), torch.device("cpu")

    class Bench(call_bench.ModelBench):
        def parts(self, lengths: list[int]) -> tuple[Callable[[], None], Callable[[], None]]:
            return clock.work(1.0), clock.work(10.0)

    class Model(call_bench.ShardedModel):
        def forward(self, batch, tokens_key, postprocess, micro_batches):
            assert {len(sequence) for sequence in batch.data[tokens_key]} == {call_bench.SHORT}
            clock.work(0.5 + 1.25 * micro_batches)()

        def train_step(self, batch, tokens_key, loss, weight, micro_batches):
            assert {len(sequence) for sequence in batch.data[tokens_key]} == {call_bench.SHORT}
            # This rank updates half of the parameters, at a second each.
            clock.work(self.parameters.flat.numel() / 2 + 3.0 + rank + 12.0 * micro_batches)()

    class Benches(call_bench.CallBench):
        def _generation(self) -> tuple[float, float, float]:
            return 0.0, 0.0, 0.0

    call_bench.ModelBench, call_bench.ShardedModel = Bench, Model
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    groups = GroupTable([layout], rank, PATIENCE_S, waits=waits_on(device, end_process)).groups(layout)
    target, lengths = ProfileTarget(model=MODEL, dtype="float32"), [20 + i for i in range(call_bench.SEQUENCES)]
    bench = Benches(target, groups, None, Stopwatch(device, repetitions=1, clock=clock), lengths)
    found = bench.overheads(1.0, 0.0)
    packed = pack_micro_batch(bench.batch.data["seq"], device, shares_prefixes=True)
    return found, sum(lengths), len(packed.tokens), bench._model(groups).parameters.flat.numel()


def test_overheads_are_of_calls_of_short_sequences_beyond_their_parts():
    """With the wait for the slower rank, which takes a second longer. Neither its update nor a micro-batch's passes are
    in them."""
    for overheads, tokens, rows, parameters in run_distributed(_overheads_by_hand, 2):
        assert overheads.forward_s == pytest.approx(0.5)
        assert overheads.forward_micro_batch_s == pytest.approx(0.25)
        assert overheads.train_s == pytest.approx(4.0, abs=1e-6 * parameters)
        assert overheads.train_micro_batch_s == pytest.approx(2.0, abs=1e-6 * parameters)
        assert tokens <= rows < tokens + 64, "no tokens in common, whose rows would be computed once"


def _short_job(targets, *, num_workers: int, max_tokens: int):
    """That measures everything once, on short sequences."""
    from realhf.profiling.job import ProfileJob

    return ProfileJob(
        hardware=load_hardware("cpu"),
        targets=tuple(targets),
        num_workers=num_workers,
        batch_size=2,
        sequence_length=4,
        length_spread=0,
        max_tokens=max_tokens,
        max_sequences=2,
        repetitions=1,
        timeout_s=PATIENCE_S,
    )


def _profiles_of_noise(rank: int) -> tuple[list[tuple[tuple[str, ...], float]], int]:
    """What one worker keeps of readings that say that no backward pass takes any time, and how often it trained before
    it updated."""
    import torch

    from realhf.profiling import profiler
    from realhf.profiling.job import ProfileTarget

    trained: list[int] = []

    class Bench(profiler.ModelBench):
        def parts(self, lengths: list[int]) -> tuple[Callable[[], None], Callable[[], None]]:
            return lambda: None, lambda: trained.append(sum(lengths))

        def layer(self, lengths: list[int]) -> tuple[float, float]:
            return float(sum(lengths)), -1.0

        def embedding(self, tokens: int) -> tuple[float, float]:
            return float(tokens), 10.0 + tokens

        def head(self, tokens: int) -> tuple[float, float]:
            return float(tokens), -2.0 if self.model.head == "lm" else 10.0 + tokens

        def decode(self, sequences: int, context: int, *, replays: bool = True) -> float:
            return float(context - sequences)

    profiler.ModelBench = Bench
    profiler.CallBench.overheads = lambda *_: CallOverheads()  # not of interest here, and slow
    profiler.median_round_trip_s = lambda *_: 1.0
    models = (ONE_KV_HEAD, ONE_KV_HEAD.with_head("scalar"))
    with tempfile.TemporaryDirectory() as folder:
        job = _short_job(
            [ProfileTarget(model=model, dtype="float32") for model in models], num_workers=1, max_tokens=64
        )
        found = profiler.Profiler(job, rank, torch.device("cpu"), Path(folder), lambda _: None).profiles()
    assert {*trained} == {profiler.SMALLEST_TOKENS}
    return [(profile.noisy, min(profile.tensor[0].layer_backward.seconds)) for profile in found], len(trained)


def test_what_noise_spoiled_is_in_every_profile_that_it_belongs_to():
    ((lm, lm_s), (scalar, scalar_s)), trainings = run_distributed(_profiles_of_noise, 1)[0]
    of_trunk = ["tp=1 layer_backward at 16, 32, 64 tokens"]
    decode = [f"tp=1 layer_decode of context {context} at 1, 2 sequences" for context in (2, 4)]
    assert sorted(lm) == sorted([*of_trunk, "tp=1 head_backward at 16, 32, 64 tokens", *decode])
    assert sorted(scalar) == sorted([*of_trunk, *decode])
    assert lm_s == scalar_s == 16 / 4
    assert trainings == 1, "before the one reading of the optimizer's step, of the trunk that both have"


def _profile_in_order(rank: int) -> tuple[LayerProfile, set[tuple[int, bool]], set[str], int]:
    """On two ranks: the profile of a model under reproducible="layout"; of its benches the leaves of a rank and whether
    trainings go through them, how its models compute, and of how many numbers the norm was taken."""
    import torch

    from realhf.engine.train.ordered import OrderedGradient
    from realhf.profiling import call_bench, profiler
    from realhf.profiling.job import ProfileTarget

    kernels, computed, normed = set(), set(), []

    class Bench(profiler.ModelBench):
        def layer(self, lengths: list[int]) -> tuple[float, float]:
            kernels.add((self.decoder.leaves.own, self.decoder.trains_layer is self.decoder.infers_layer))
            return super().layer(lengths)

    class Model(call_bench.ShardedModel):
        def __init__(self, spec):
            super().__init__(spec)
            computed.add(spec.compute.reproducible)

    norm = OrderedGradient.norm
    OrderedGradient.norm = staticmethod(lambda counted, *where: normed.append(len(counted[0])) or norm(counted, *where))
    profiler.ModelBench = call_bench.ModelBench = Bench
    call_bench.ShardedModel = Model
    profiler.median_round_trip_s = lambda *_: 1.0
    with tempfile.TemporaryDirectory() as folder:
        job = _short_job(
            [ProfileTarget(model=MODEL, dtype="float32", reproducible="layout")], num_workers=2, max_tokens=32
        )
        [found] = profiler.Profiler(job, rank, torch.device("cpu"), Path(folder), lambda _: None).profiles()
    return found, kernels, computed, max(normed)


def test_the_kernels_of_reproducible_layout_are_measured():
    """Both leaves of a model at tp=1 and each at tp=2, in layers and in whole calls; parts and the norm of a step."""
    for profile, kernels, computed, normed in run_distributed(_profile_in_order, 2):
        assert profile.reproducible == "layout"
        assert [timings.tp for timings in profile.tensor] == [1, 2]
        assert kernels == {(2, True), (1, True)}
        assert computed == {"layout"}
        assert profile.overheads.part_s_per_parameter > 0
        assert normed == parameter_count(MODEL)


def test_degrees_that_do_not_divide_the_leaves_are_not_measured():
    """A model of 8 key heads has 4 leaves."""
    from realhf.profiling.profiler import _is_legal

    wide = DecoderConfig(hidden_size=64, intermediate_size=64, num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=64)
    for reproducible, most in (("plan", 8), ("layout", 4)):
        target = ProfileTarget(model=wide, dtype="float32", reproducible=reproducible)
        assert [tp for tp in (1, 2, 4, 8) if _is_legal(target, tp)][-1] == most


def test_the_stopwatch_gives_all_ranks_the_mean_or_the_slowest_of_those_that_work():
    first, second = run_distributed(_stopwatch_on_two_ranks, 2)
    assert first == second
    mean_s, slowest_s, alone_s, median_s, part_s, rest_s, first_s, longer_s, behind_s = first
    assert (mean_s, slowest_s, alone_s, median_s) == (0.5, 0.75, 0.25, 2.0)
    assert (part_s, rest_s) == (0.25, 0.875)  # beyond 1/4 s on rank 0 and nothing on rank 1
    assert (first_s, longer_s) == (2.0, -1.25)
    assert behind_s == pytest.approx(1e-6)
