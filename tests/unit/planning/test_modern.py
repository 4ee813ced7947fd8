"""The preset of engines of today trains at the published utilisation."""

import pytest

from realhf.architecture.named import LLAMA
from realhf.dataflow.graph import TRAIN_STEP
from realhf.geometry.parameters import parameter_count
from realhf.planning.clusters import parse_cluster
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import call_strategies
from tests.unit.planning.graphs import call, call_model

PEAK = 989e12  # of an H100, dense bfloat16
SAMPLES, TOKENS = 512, 2048


def best_seconds(model: str, cluster: Cluster) -> float:
    """Of a step of AdamW on SAMPLES sequences, under the best strategy that fits."""
    train = call("actor", LLAMA[model], TRAIN_STEP, "seq", mini_batches=1)
    features = EngineFeatures(sequence_parallel=True)
    costs = load_costs({"actor": LLAMA[model]}, dtype="bfloat16", hardware=cluster.hardware, features=features)
    cost = call_model(
        call=train, batch_size=SAMPLES, workload=Workload(prompt_tokens=TOKENS, new_tokens=0), cluster=cluster,
        costs=costs, dtype="bfloat16",
    )  # fmt: skip
    return min(
        cost.seconds(strategy, count)
        for strategy, counts in call_strategies(train, cluster.num_devices, SAMPLES)
        for count in counts
        if strategy.tp <= 8 and cost.least_bytes(strategy, count) <= cluster.device_memory_bytes
    )


@pytest.mark.parametrize(("model", "shape"), [("llama7b", "1x8"), ("llama13b", "2x8"), ("llama70b", "8x8")])
def test_training_reaches_35_to_55_percent_of_peak(model: str, shape: str) -> None:
    modern, fitted = (parse_cluster(f"{name}-{shape}") for name in ("h100-modern", "h100"))
    flops = 6 * parameter_count(LLAMA[model]) * SAMPLES * TOKENS
    utilisation = flops / best_seconds(model, modern) / modern.num_devices / PEAK
    assert 0.35 < utilisation < 0.55
    assert best_seconds(model, fitted) > 1.1 * best_seconds(model, modern)


def test_the_devices_of_a_machine_are_never_taken_for_it() -> None:
    assert parse_cluster("h100-modern-1x8").hardware.device_names == ()
