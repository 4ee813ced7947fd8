"""Which settings a cluster does not offer, by its own words: recorded of SLURM 22.05, written by hand after the manuals
of 23.11 (not tested on one)."""

from dataclasses import replace
from pathlib import Path

import pytest

from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.offer import Nodes, Offer, read_accounting, read_gpus, read_nodes, seconds_of
from realhf.launch.slurm.refusal import job_size as words_of
from realhf.launch.slurm.refusal import refusal, unknown_names, unmet
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import RunDirectory, worker_name


def offer(version: str) -> Offer:
    text = (Path(__file__).parent / f"sinfo/{version}.txt").read_text()
    return Offer(nodes=read_nodes(text.splitlines()))


def job(nodes: int = 2, per_node: int = 8) -> Job:
    names = ("master", *map(worker_name, range(nodes * per_node)))
    processes = tuple(ProcessSpec(name=name, argv=("true",)) for name in names)
    return Job(directory=RunDirectory(Path("/run")), processes=processes, workers_per_node=per_node)


def test_what_sinfo_prints() -> None:
    assert offer("22.05").nodes[0] == Nodes(
        partition="main", is_default=True, count=2, cpus=8, memory_mb=16000, gpus={"toy": 2}
    )
    found = offer("23.11")
    assert found.partitions == ("batch", "gpu", "old")
    assert [(one.count, one.cpus, one.gpus, one.time_limit, one.is_up) for one in found.nodes[1:]] == [
        (2, 128, {}, "1-00:00:00", True),
        (4, 96, {"h100": 8}, "2-12:00:00", True),
        (3, 64, {"a100": 4}, "2-12:00:00", True),
        (1, 16, {"": 2}, "", False),
    ]
    assert found.nodes[2].features == {"h100", "ib"}
    assert read_nodes(["", "Welcome to Alpha", "a|b|c|d|e|f|g|h"]) == ()
    assert read_gpus("gpu:a100:4(S:0-1),gpu:a100_3g.20gb:8,gpu:tesla:no") == {"a100": 4, "a100_3g.20gb": 8}


def test_a_gpu_s_share_of_the_cpus() -> None:
    found = offer("23.11")
    assert found.cpus_per_gpu("gpu", "h100") == 11
    assert found.cpus_per_gpu("gpu", None) == 11
    assert found.cpus_per_gpu("gpu", "a100") == 15
    assert found.cpus_per_gpu(None, None) == 1  # the default partition has no GPUs
    assert Offer().cpus_per_gpu(None, None) == 1
    few = replace(found.nodes_of("gpu")[0], cpus=4, gpus={"h100": 8})
    assert Offer(nodes=(few,)).cpus_per_gpu("gpu", "h100") == 1, "one at least"


@pytest.mark.parametrize(
    ("options", "asked", "says"),
    [
        ({"partition": "nonesuch"}, job(), ["--partition nonesuch: the cluster has batch, gpu, old"]),
        (
            {"partition": "gpu", "gpu_type": "v100"},
            job(),
            ["--gpu-type v100: partition gpu has 4 nodes with 96 CPUs, 1007 GiB, 8 GPUs of type h100; 3 nodes with 64 "
             "CPUs, 502.9 GiB, 4 GPUs of type a100; its types are a100, h100"],
        ),
        ({"partition": "gpu", "gpu_type": "h100"}, job(1, 16), ["--gpus-per-node 16: partition gpu has 4 nodes"]),
        ({}, job(2, 8), ["--gpus-per-node 8: partition batch has 6 nodes with 64 CPUs, 251 GiB, no GPU"]),
        ({"partition": "gpu"}, job(9, 4), ["--nodes 9: partition gpu has", ", 7 in all"]),
        (
            {"partition": "gpu", "cpus_per_worker": 16},
            job(2, 8),
            ["--cpus-per-worker 16: 8 workers a node and the master need 129 CPUs", "give --cpus-per-worker 11"],
        ),
        ({"partition": "gpu", "mem": "2T"}, job(2, 8), ["--mem 2T: partition gpu has"]),
        ({"partition": "gpu", "time_limit": "3-00"}, job(2, 8), ["--time-limit 3-00: partition gpu allows 2-12:00:00"]),
        (
            {"partition": "gpu", "sbatch": ("--qos=high", "-C [fast|ib]")},
            job(2, 8),
            ["--sbatch=--constraint=fast: partition gpu has a100, h100, ib"],
        ),
        ({"account": "nobody"}, job(), ["--account nobody: yours are lab, other"]),
        ({"sbatch": ("--qos=low", "-q high")}, job(), ["--sbatch=--qos=high: yours are normal, short"]),
        ({"sbatch": ("-q short",), "time_limit": "1:00:00"}, job(), ["--time-limit 1:00:00: QOS short allows"]),
    ],
)  # fmt: skip
def test_the_setting_is_named_with_what_there_is(options: dict[str, object], asked: Job, says: list[str]) -> None:
    there = offer("23.11")
    if "account" in options or "-q " in str(options):
        accounts, qos = read_accounting(
            ["lab|normal,short", "other|normal", "Welcome"], ["normal|", "high|", "short|00:10:00"]
        )
        there = replace(there, accounts=accounts, qos=qos)
    text = next(unmet(SlurmOptions(**options), asked, there))  # type: ignore[arg-type]
    for part in says:
        assert part in text


def test_a_job_that_the_cluster_has_lacks_nothing() -> None:
    options = SlurmOptions(partition="gpu", gpu_type="h100", cpus_per_worker=11, mem="900G", time_limit="2-12")
    assert list(unmet(options, job(4, 8), offer("23.11"))) == []


# What the partition gpu of this cluster just has, and what it has not.
BOUNDS: list[tuple[dict[str, object], Job, str]] = [
    ({}, job(7, 4), ""),
    ({}, job(8, 4), "--nodes 8: "),
    ({"gpu_type": "a100"}, job(1, 4), ""),
    ({"gpu_type": "a100"}, job(1, 5), "--gpus-per-node 5: "),
    ({}, job(1, 9), "--gpus-per-node 9: "),
    ({"cpu_only": True, "cpus_per_worker": 19}, job(1, 5), ""),  # 96 CPUs with the master's
    ({"cpu_only": True, "cpus_per_worker": 20}, job(1, 5), "--cpus-per-worker 20: 5 workers a node and the master need "
     "101 CPUs of a node"),
    ({"cpu_only": True}, job(1, 95), ""),
    ({"cpu_only": True}, job(1, 96), "96 workers a node and the master need a CPU each"),
    ({"mem": "1006G"}, job(1, 4), ""),
    ({"mem": "1007G"}, job(1, 4), "--mem 1007G: "),
    ({"mem": "1031000"}, job(1, 4), ""),  # megabytes without a unit
    ({"mem": "1031001M"}, job(1, 4), "--mem 1031001M: "),
    ({"mem": "1055744000K"}, job(1, 4), ""),
    ({"mem": "1055744001K"}, job(1, 4), "--mem 1055744001K: "),
    ({"time_limit": "2-12:00:00"}, job(1, 4), ""),
    ({"time_limit": "2-12:00:01"}, job(1, 4), "--time-limit 2-12:00:01: partition gpu allows 2-12:00:00"),
    ({"sbatch": ("-q short",), "time_limit": "10"}, job(1, 4), ""),
    ({"sbatch": ("-q short",), "time_limit": "10:01"}, job(1, 4), "--time-limit 10:01: QOS short allows 00:10:00"),
    ({"sbatch": ("-q normal",), "time_limit": "1-0"}, job(1, 4), ""),  # without a limit
    ({"sbatch": ("--constraint=[h100|a100]&ib*2",)}, job(1, 4), ""),
    ({"account": "lab"}, job(1, 4), ""),
    ({"partition": "gpu,batch"}, job(13, 4), ""),
    ({"partition": "gpu,none"}, job(1, 4), "--partition none: the cluster has batch, gpu, old"),
    ({"partition": "batch,gpu", "time_limit": "2-12"}, job(1, 4), ""),  # that of the more patient one
    ({"partition": "batch,gpu", "time_limit": "2-13"}, job(1, 4), "--time-limit 2-13: partition batch, gpu allows "
     "2-12:00:00"),
    ({"partition": "gpu,old", "time_limit": "100-0"}, job(1, 2), ""),  # one has no limit
    ({"partition": "gpu,batch", "cpu_only": True}, job(1, 127), ""),
    ({"partition": "batch,gpu", "mem": "1006G"}, job(1, 4), ""),
    ({"partition": "old", "gpu_type": "h100"}, job(1, 2), "--gpu-type h100: partition old has 1 node with 16 CPUs, "
     "62.5 GiB, 2 GPUs; its types are not named: leave it out"),
    ({"partition": "old", "sbatch": ("-C fast",)}, job(1, 2), "--sbatch=--constraint=fast: partition old has no "
     "features"),
    ({"cpus_per_worker": 24}, job(1, 4), "--cpus-per-worker 24: 4 workers a node and the master need 97 CPUs of a "
     "node; partition gpu has 4 nodes with 96 CPUs, 1007 GiB, 8 GPUs of type h100; 3 nodes with 64 CPUs, 502.9 GiB, "
     "4 GPUs of type a100; give --cpus-per-worker 23"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "asked", "says"), BOUNDS, ids=lambda value: str(value) if value else "")
def test_what_a_cluster_just_has(options: dict[str, object], asked: Job, says: str) -> None:
    accounts, qos = read_accounting(["lab|normal,short"], ["normal|", "short|00:10:00"])
    there = replace(offer("23.11"), accounts=accounts, qos=qos)
    found = list(unmet(SlurmOptions(**{"partition": "gpu", **options}), asked, there))  # type: ignore[arg-type]
    assert len(found) == (says != "")
    assert not found or found[0].startswith(says)


@pytest.mark.parametrize(("partition", "ends"), [("batch", "no GPU; give --cpu-only"), ("gpu", "4 GPUs of type a100")])
def test_too_many_gpus_are_refused_and_none_have_a_way_out(partition: str, ends: str) -> None:
    [text] = unmet(SlurmOptions(partition=partition, cpus_per_worker=64), job(1, 16), offer("23.11"))
    assert text.startswith(f"--gpus-per-node 16: partition {partition} has ")
    assert text.endswith(ends)


def test_of_several_kinds_of_nodes_the_largest_counts_whatever_their_order() -> None:
    small = Nodes(
        partition="main", is_default=True, count=1, cpus=8, memory_mb=1024, gpus={"": 2, "a": 1}, time_limit="1"
    )
    large = replace(small, cpus=64, memory_mb=4096, gpus={"a": 4, "b": 2}, time_limit="2")
    for nodes in ((small, large), (large, small)):
        there = Offer(nodes=nodes)
        asked = SlurmOptions(time_limit="2", mem="4G", gpu_type="a", cpus_per_worker=15)
        assert list(unmet(asked, job(2, 4), there)) == []
        more = unmet(replace(asked, time_limit="2:01", mem="5G"), job(3, 5), there)
        assert [text.split(":")[0] for text in more] == ["--nodes 3", "--gpus-per-node 5", "--time-limit 2"]
        [text] = unmet(replace(asked, gpu_type="c"), job(1, 2), there)
        assert text.endswith("; its types are a, b")


def test_a_partition_of_which_some_nodes_have_gpus_is_not_taken_for_one_without() -> None:
    node = Nodes(partition="main", is_default=True, count=1, cpus=64, memory_mb=1024, gpus={"": 2})
    [text] = unmet(SlurmOptions(), job(1, 4), Offer(nodes=(node, replace(node, gpus={}))))
    assert text.startswith("--gpus-per-node 4: ")
    assert text.endswith("no GPU")


def test_a_node_with_one_cpu_has_no_place_for_a_worker() -> None:
    node = Nodes(partition="main", is_default=True, count=1, cpus=1, memory_mb=1024)
    assert list(unmet(SlurmOptions(cpu_only=True), job(1, 1), Offer(nodes=(node,)))) == [
        "1 workers a node and the master need a CPU each; partition main has 1 node with 1 CPUs, 1 GiB, no GPU; give "
        "--gpus-per-node 1"
    ]


def test_what_slurm_does_not_tell_is_not_held_against_a_job() -> None:
    options = SlurmOptions(partition="x", account="y", sbatch=("--qos=z",), time_limit="9-0")
    assert list(unknown_names(options, Offer())) == []
    there = Offer(qos={"z": "10-0"}, accounts=("y",))
    assert list(unknown_names(options, there)) == []
    assert list(unknown_names(replace(options, time_limit=None), replace(there, qos={"z": "1"}))) == []
    assert list(unknown_names(options, replace(there, qos={"z": "UNLIMITED"}))) == []
    assert list(unknown_names(SlurmOptions(time_limit="9-0"), there)) == []


def test_where_no_partition_is_the_default_one_it_has_to_be_given() -> None:
    nodes = replace(offer("22.05").nodes[0], is_default=False)
    assert list(unmet(SlurmOptions(), job(), Offer(nodes=(nodes,)))) == [
        "no partition is the default one: give --partition, one of main"
    ]
    assert list(unmet(SlurmOptions(), job(), Offer())) == []


def test_a_job_in_words() -> None:
    assert words_of(SlurmOptions(cpu_only=True), job(1, 2)) == "1 node with 3 CPUs"
    options = SlurmOptions(cpus_per_worker=4, gpu_type="h100")
    assert words_of(options, job(2, 8)) == "2 nodes with 33 CPUs, 8 GPUs of type h100"


def test_where_no_setting_is_to_blame_all_is_listed() -> None:
    text = refusal("no", SlurmOptions(partition="gpu", mem="9G"), job(), offer("23.11"))
    assert text.startswith("SLURM refused the job: no; the job asks for 2 nodes with 9 CPUs, 9G of memory, 8 GPUs.")
    assert "\n  gpu: 4 nodes with 96 CPUs, 1007 GiB, 8 GPUs of type h100; 3 nodes" in text
    assert "\n  old (down): 1 node with 16 CPUs, 62.5 GiB, 2 GPUs" in text
    assert refusal("no", SlurmOptions(), job(), Offer()) == (
        "SLURM refused the job: no; check partition, account, nodes and limits (sinfo does not tell what the cluster "
        "has)"
    )


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, ""),
        ({"accounts": ("lab", "x")}, "; your accounts: lab, x"),
        ({"qos": {"high": "1", "low": ""}}, "; your QOS: high, low"),
        ({"accounts": ("lab",), "qos": {"high": ""}}, "; your accounts: lab; your QOS: high"),
    ],
)
def test_a_cluster_in_words(more: dict[str, object], ends: str) -> None:
    main = Nodes(partition="main", is_default=True, count=2, cpus=8, memory_mb=16384, time_limit="1:00")
    there = Offer(
        nodes=(main, replace(main, cpus=9, time_limit="2:00"), replace(main, partition="b", is_default=False))
    )
    assert refusal("no", SlurmOptions(cpu_only=True), job(1, 2), replace(there, **more)) == (  # type: ignore[arg-type]
        "SLURM refused the job: no; the job asks for 1 node with 3 CPUs. The cluster has\n"
        "  main (default): 2 nodes with 8 CPUs, 16 GiB, no GPU; 2 nodes with 9 CPUs, 16 GiB, no GPU; at most 1:00\n"
        f"  b: 2 nodes with 8 CPUs, 16 GiB, no GPU; at most 1:00{ends}"
    )


def test_gpus_of_a_node_where_all_that_have_any_have_as_many() -> None:
    found = offer("23.11")
    assert found.gpus_per_node("gpu", "h100") == 8
    assert found.gpus_per_node("gpu", "a100") == 4
    assert found.gpus_per_node("gpu", None) is None  # 8 and 4
    assert found.gpus_per_node("batch", None) is None
    mixed = Nodes(partition="main", is_default=True, count=1, cpus=8, memory_mb=1, gpus={"a": 2, "b": 1})
    none = replace(mixed, gpus={})
    assert Offer(nodes=(mixed, none)).gpus_per_node(None, None) == 3
    assert Offer(nodes=(mixed, none)).gpus_per_node(None, "a") == 2
    assert Offer(nodes=(mixed, none)).cpus_per_gpu(None, None) == 2  # one of eight is the master's


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216000), ("1-00:30", 88200), ("", None), ("x", None)],
)
def test_time_limits(limit: str, seconds: float | None) -> None:
    assert seconds_of(limit) == seconds
