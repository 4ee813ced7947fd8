"""The smallest changes that are enough, on stand-ins for what fits; each in words."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api import Generate
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.explain import remedies
from realhf.planning.explain.remedies import Remedies, find_remedies, smallest_peak_bytes
from realhf.planning.model.workload import Workload
from realhf.planning.options import Option
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))
GIB = 2.0**30


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            Remedies(None, None, None),
            "no smaller batch and no larger cluster helps: take a smaller model or shorter sequences",
        ),
        (Remedies(1.26 * GIB, None, None), "the smallest change that is enough: 1.3 GiB of memory a device"),
        (Remedies(None, 8, None), "the smallest change that is enough: a batch of 8 samples"),
        (Remedies(None, None, 1), "the smallest change that is enough: 1 node of this kind"),
        (
            Remedies(GIB, 8, 2, ("ref", "reward")),
            "the smallest change that is enough: 1.0 GiB of memory a device, or a batch of 8 samples, or 2 nodes of "
            "this kind, or --offload ref,reward",
        ),
    ],
)
def test_remedies_in_words(found: Remedies, text: str) -> None:
    assert str(found) == text


def test_all_remedies_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("smallest_peak_bytes", "_batch", "_nodes", "_offload"):
        monkeypatch.setattr(remedies, name, lambda task, name=name: name if task is TASK else None)
    found: Any = find_remedies(TASK)
    assert found == Remedies("smallest_peak_bytes", "_batch", "_nodes", "_offload")  # type: ignore[arg-type]


def fitting(monkeypatch: pytest.MonkeyPatch, fits: Any) -> list[PlanningTask]:
    """The tasks that were tried, where those fit for which `fits` says so."""
    tried: list[PlanningTask] = []

    def smallest(task: PlanningTask) -> float | None:
        tried.append(task)
        return float(task.cluster.device_memory_bytes) if fits(task) else None

    monkeypatch.setattr(remedies, "smallest_peak_bytes", smallest)
    return tried


@pytest.mark.parametrize(("peak", "fits"), [(None, False), (2**32, True), (2**32 + 1, False), (0, True)])
def test_what_fits(peak: float | None, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "smallest_peak_bytes", lambda task: peak)
    assert remedies._fits(TASK) is fits


@pytest.mark.parametrize(
    ("batch_size", "most", "found", "tried"),
    [(16, 8, 8, [8]), (16, 5, 4, [8, 4]), (16, 1, 1, [8, 4, 2, 1]), (16, 0, None, [8, 4, 2, 1]), (12, 0, None, [6, 3]),
     (7, 7, None, [])],
)  # fmt: skip
def test_the_batch_is_halved(
    batch_size: int, most: int, found: int | None, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = fitting(monkeypatch, lambda task: task.batch_size <= most)
    assert remedies._batch(replace(TASK, batch_size=batch_size)) == found
    assert [task.batch_size for task in tasks] == tried


@pytest.mark.parametrize(
    ("own", "devices", "least", "found"),
    [
        (1, 4, 1, 1),
        (1, 4, 2, 2),
        (1, 4, 3, 3),
        (1, 4, 5, 5),
        (3, 4, 2, 3),
        (3, 4, 7, 7),
        (1, 4, 64, 64),
        (1, 4, 33, 33),
        (1, 4, 65, None),
        (2, 4, 128, 128),
        (1, 128, 32, 32),
        (1, 128, 33, None),  # 64 nodes would have too many devices
        (1, 4, 10**9, None),
    ],
)
def test_the_least_number_of_nodes(
    own: int, devices: int, least: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = fitting(monkeypatch, lambda task: task.cluster.num_nodes >= least)
    assert remedies._nodes(replace(TASK, cluster=cpu_cluster(devices, num_nodes=own))) == found
    nodes = [task.cluster.num_nodes for task in tasks]
    assert min(nodes) == own
    assert len(set(nodes)) == len(nodes), "each is tried once"
    assert {task.cluster.devices_per_node for task in tasks} == {devices}


def test_models_that_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """First those that nobody trains, then all but those that follow another; none where a search has tried them."""
    plain = ppo()
    graph = DataflowGraph(list(plain.calls.values()), plain.dataset_keys, {"ref": Follow("actor", eta=0.5)})
    task = replace(TASK, graph=graph)
    tasks = fitting(monkeypatch, lambda of: False)
    assert remedies._offload(task) is None
    assert [each.offload for each in tasks] == [("reward",), ("actor", "reward", "critic")]
    fitting(monkeypatch, lambda of: "actor" in of.offload)
    assert remedies._offload(task) == ("actor", "reward", "critic")
    fitting(monkeypatch, lambda of: True)
    assert remedies._offload(TASK) == ("reward", "ref")
    assert remedies._offload(replace(TASK, may_offload=True)) is None


def test_the_smallest_plan_with_any_models_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: dict[Any, float | None] = {(): 3.0, ("a",): None, ("b",): 2.0}
    monkeypatch.setattr(remedies, "offloads", lambda task: list(peaks))
    monkeypatch.setattr(remedies, "_smallest_peak_bytes", lambda task: peaks[task.offload])
    assert smallest_peak_bytes(TASK) == 2.0
    peaks = {(): None}
    assert smallest_peak_bytes(TASK) is None


def test_the_smallest_plan_is_on_all_devices_or_half_of_them_or_in_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ppo()
    pools = {"critic": Pool("p", devices=[1, 2])}
    graph = DataflowGraph(list(plain.calls.values()), plain.dataset_keys, pools=pools)
    task = replace(TASK, graph=graph)
    small = Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 9)
    given: dict[str, list[Option]] = {}

    def smaller(of: Any, definition: Any, options: Sequence[Option]) -> list[Option]:
        assert of is task
        assert {option.layout.mesh.size for option in options} <= {1, 2, 4}
        return [small]

    def build(of: Any, options: dict[str, list[Option]]) -> str:
        given.update(options)
        return "problem"

    native = SimpleNamespace(
        smallest_plan=lambda seed: ["smallest", seed],
        evaluate=lambda choice: {"peak_bytes": 5 if choice == ["smallest", 0] else 0},
    )
    monkeypatch.setattr(remedies, "_smallest_computations", smaller)
    monkeypatch.setattr(remedies, "build_problem", build)
    monkeypatch.setattr(remedies, "native_problem", lambda problem: native if problem == "problem" else None)
    assert remedies._smallest_peak_bytes(task) == 5.0
    everywhere = [DeviceMesh(0, 4), DeviceMesh(0, 2), DeviceMesh(2, 2)]
    pool = [DeviceMesh(1, 1), DeviceMesh(2, 1), DeviceMesh(1, 2)]
    assert list(given) == list(graph.model_calls)
    for name, options in given.items():
        meshes = list(dict.fromkeys(option.layout.mesh for option in options[:-1]))
        assert meshes == (pool if name.startswith("critic") else everywhere)
        assert options[-1] is small
        # 16 samples; trainings have two mini-batches.
        assert max(option.micro_batches for option in options[:-1]) == (8 if "train" in name else 16)


def test_without_a_legal_plan_none_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remedies._smallest_peak_bytes(replace(TASK, batch_size=15)) is None, "two mini-batches do not divide it"

    monkeypatch.setattr(remedies, "options_on", lambda *words: [])
    assert remedies._smallest_peak_bytes(TASK) is None


@pytest.mark.parametrize("is_training", [True, False])
def test_the_smallest_way_to_compute_in_each_strategy(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the most micro-batches; of ways that are fully sharded their smallest mix of modes counts as well."""
    graph = DataflowGraph([call("actor", TINY, TRAIN_STEP if is_training else INFERENCE, "seq")], ["seq"])
    task = replace(TASK, graph=graph)
    [definition] = graph.model_calls.values()
    wide, deep = (Layout(DeviceMesh(0, 4), strategy) for strategy in (ParallelStrategy(dp=4), ParallelStrategy(pp=4)))
    sharded, full, mixed = (
        CallCompute(data_parallel="fsdp"), CallCompute(recomputation="full"), CallCompute(prefetch=True)
    )  # fmt: skip
    asked: list[Any] = []

    def mix(of: Any, of_call: Any, way: Any) -> CallCompute | None:
        assert (of, of_call) == (task, definition)
        asked.append(way)
        return mixed if is_training else None

    def row(of: Any, of_call: Any, strategy: Any, count: int, compute: CallCompute) -> Any:
        sizes = {AS_SET_UP: (9, 9), sharded: (3, 5), full: (6, 3), mixed: (2, 5)}
        static, dynamic = sizes[compute]
        return SimpleNamespace(static_bytes=static, dynamic_bytes=dynamic)

    def ways(of: Any, of_call: Any, strategy: ParallelStrategy) -> list[CallCompute]:
        return [AS_SET_UP, full, sharded] if strategy.dp > 1 else [AS_SET_UP]

    monkeypatch.setattr(remedies, "ways_to_compute", ways)
    monkeypatch.setattr(remedies, "smallest_mix", mix)
    monkeypatch.setattr(remedies, "row_of", row)
    plain = [Option(wide, 2), Option(wide, 4), Option(wide, 1), Option(deep, 1)]
    found = list(remedies._smallest_computations(task, definition, plain))
    assert found == [Option(wide, 4, mixed if is_training else sharded)]
    assert asked == [(wide.strategy, 4, sharded)]


def test_the_smallest_cache_counts_where_a_plan_may_choose_it() -> None:
    """All samples together, and one sequence in each part at a time."""
    rollout = Generate(max_new_tokens=24, eos_token=-1)
    generation = replace(call("actor", TINY, GENERATE, "prompts", "seq"), interface_impl=rollout)
    graph, lengths = DataflowGraph([generation], ["prompts"]), Workload(prompt_tokens=8, new_tokens=24)
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2))
    for mixed in ({"actor"}, set[str]()):
        task = replace(TASK, graph=graph, workload=lengths, mixed=frozenset(mixed))
        found = list(remedies._smallest_computations(task, generation, [Option(layout, 4)]))
        assert found == ([Option(layout, 1, CallCompute(kv_cache_tokens=64))] if mixed else [])
