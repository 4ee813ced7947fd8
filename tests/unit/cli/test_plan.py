"""`realhf plan`: what-ifs, comparisons and files, each mistake with exit code 2; no torch, no data set."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.api.experiment import ModelSetup
from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.compute import ComputeConfig
from realhf.cli import main
from realhf.dataflow.plan import CallPlan
from realhf.planning.options import option_of
from realhf.planning.planner import task_of
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import load_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.request import PlanRequest
from realhf.planning.what_if import WhatIf
from realhf.rundir.run import load_experiment_class
from tests.unit.planning.graphs import all_options, cpu_cluster
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
PPO = str(ROOT / "experiments/ppo.py")
# Small and quick: 7B models on 8 devices, one mini-batch of 64.
WHAT_IF = ["plan", PPO, "--actor", "llama3-7b", "--critic", "llama3-7b", "--batch-size", "64", "--evaluations", "2000"]
ON_8 = [*WHAT_IF, "--cluster", "h200-1x8"]
PRESETS = ["heuristic", "real-heuristic", "colocate", "split", "standalone", "hybridflow", "mapping"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_a_plan_says_how_many_samples_share_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--ppo.samples-per-prompt", "8"]) == 0
    assert "64 samples of 1024 + 1024 tokens a step, 8 to a prompt, bfloat16" in capsys.readouterr().out


def test_a_plan_says_which_tensor_parallel_degrees_a_model_excludes(capsys: pytest.CaptureFixture[str]) -> None:
    """9 heads on 4 devices, as SmolLM2 has; its vocabulary is divided by all of them."""
    sizes = {"hidden-size": 36, "intermediate-size": 48, "num-heads": 9, "num-kv-heads": 3}
    small = [word for name, size in sizes.items() for word in (f"--architecture.{name}", str(size))]
    words = ["plan", PPO, "--num-workers", "4", "--hardware", "cpu", "--evaluations", "10", *small]
    assert main(words) == 0
    shown = capsys.readouterr().out
    excluded = "tp=2 does not divide num_heads=9, tp=4 does not divide num_heads=9: left out of the search"
    assert f"actor, reward, reference, critic: {excluded}\n" in shown
    assert main(words[:-8]) == 0
    assert "left out" not in capsys.readouterr().out


def test_responses_that_differ(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 responses of 100 and 4,000 tokens: 2,050 on average, and the longest of a batch is one of 4,000."""
    (empty_folder / "lengths.txt").write_text("100\n4000\n")
    long, differing = ["--new-tokens", "4000"], ["--response-lengths", "lengths.txt", "--json", "differing.json"]
    assert main([*ON_8, *long, "--rule", "colocate", "--output", "plan.json", "--json", "long.json"]) == 0
    assert "samples of 1024 + 4000 tokens a step" in capsys.readouterr().out
    assert main([*ON_8, "--plan", "plan.json", *differing, "--html", "page.html"]) == 0
    words = "64 samples of 1024 + 2050 (longest 4000) tokens a step"
    assert words in capsys.readouterr().out
    assert words in (empty_folder / "page.html").read_text()
    slow, fast = (json.loads((empty_folder / f"{name}.json").read_bytes()) for name in ("long", "differing"))
    assert (slow["workload"]["longest_response"], fast["workload"]["longest_response"]) == (4000, pytest.approx(4000))
    assert fast["workload"]["tokens_per_step"] == pytest.approx(64 * (1024 + 2050))
    assert fast["plans"][0]["step_s"] < slow["plans"][0]["step_s"]
    assert fast["plans"][0]["peak_bytes"] == slow["plans"][0]["peak_bytes"]  # any response may reach the limit
    assert main([*ON_8, "--response-lengths", "none.txt"]) == 2
    assert "none.txt: cannot read the file of the lengths of responses" in capsys.readouterr().err


def test_compare(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--compare", "--json", "out.json", "--html", "out.html", "--output", "plan.json"]) == 0
    printed = capsys.readouterr().out
    for word in ("comparison", "why not", "certificate: ", "tokens/s", "limited by", *PRESETS):
        assert word in printed
    assert "1 x 8 h200 with " in printed
    assert "64 samples of 1024 + 1024 tokens a step, bfloat16" in printed
    content: dict[str, Any] = json.loads((empty_folder / "out.json").read_bytes())
    assert [plan["name"] for plan in content["plans"]] == ["searched", *PRESETS]
    searched = content["plans"][0]
    assert searched["tokens_per_s"] == pytest.approx(64 * 2048 / searched["step_s"])
    assert searched["gpu_hours_per_million_tokens"] == pytest.approx(8e6 / 3600 / searched["tokens_per_s"])
    assert searched["peak_bytes"] <= content["cluster"]["device_memory_bytes"]
    assert content["certificate"]["lower_bound_s"] <= content["certificate"]["cost_s"] * 1.0001
    for plan in content["plans"]:
        assert plan["feasible"] == (not plan["problem"])
    assert [entry["call"] for entry in content["alternatives"]] == list(searched["plan"]["calls"])
    models = searched["plan"]["models"]
    assert (models["actor"]["num_layers"], models["actor"]["head"]) == (32, "lm")
    assert (models["reward"]["num_layers"], models["reward"]["head"]) == (32, "scalar")
    assert json.loads((empty_folder / "plan.json").read_bytes()) == searched["plan"]
    page = (empty_folder / "out.html").read_text()
    for title in ("Timeline of two steps", "Memory of the devices", "Compared with plans by rule", "Why not"):
        assert f"<h2>{title}</h2>" in page
    assert not (empty_folder / "runs").exists(), "the data set was made or read"


def test_the_plan_of_a_rule_is_written_and_predicted_alike(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--json -` standard output is the JSON and nothing else."""
    assert main([*ON_8, "--compare", "--json", "-"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert not (empty_folder / "-").exists()
    assert main([*ON_8, "--rule", "colocate", "--output", "plan.json", "--json", "-"]) == 0
    streams = capsys.readouterr()
    [plan] = json.loads(streams.out)["plans"]
    by_name = {each["name"]: each for each in compared["plans"]}
    assert plan["step_s"] == by_name["colocate"]["step_s"]
    assert {tuple(call["devices"]) for call in plan["plan"]["calls"].values()} == {(0, 8)}
    assert "written to plan.json" in streams.err
    assert main([*ON_8, "--plan", "plan.json", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["step_s"] == plan["step_s"]


def test_a_rule_beside_a_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--rule", "split", "--plan", "plan.json"]) == 2
    assert "--rule split and --plan plan.json are both plans: give one of them" in capsys.readouterr().err


def test_a_plan_that_was_written_is_predicted_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--output", "plan.json", "--json", "first.json"]) == 0
    assert main([*ON_8, "--plan", "plan.json", "--json", "second.json"]) == 0
    first, second = (json.loads(Path(name).read_bytes())["plans"][0] for name in ("first.json", "second.json"))
    assert first["step_s"] == second["step_s"]
    assert (first["name"], second["name"]) == ("searched", "given")


def test_the_dumped_problem_is_the_one_that_was_solved() -> None:
    assert main([*ON_8, "--offload", "none", "--dump-problem", "problem.json", "--json", "plan.json"]) == 0
    assert main(["search", "problem.json", "--evaluations", "2000", "--json", "found.json"]) == 0
    planned, found = (json.loads(Path(name).read_bytes()) for name in ("plan.json", "found.json"))
    problem = load_problem("problem.json")
    searched, choice = planned["plans"][0], []
    for call in problem.calls:
        plan = searched["plan"]["calls"][call.name]
        option = option_of(msgspec.convert(plan, CallPlan))
        # A home that is sharded has a label of its own where another call of the model generates.
        is_actors = call.name == "actor_train_step" and option.compute.data_parallel not in (None, "zero1")
        label = str(option.layout.strategy) + (" sharded" if is_actors else "")
        # Options that differ in how they compute differ in their seconds.
        wanted = (tuple(plan["devices"]), label, plan["micro_batches"], plan["predicted_s"])
        choice.append([(o.devices, o.strategy, o.micro_batches, o.time_s) for o in call.options].index(wanted))
    evaluation = native_problem(problem).evaluate(choice)
    assert evaluation["step_time"] == pytest.approx(planned["certificate"]["cost_s"], abs=1e-9)
    assert evaluation["peak_bytes"] == pytest.approx(searched["peak_bytes"], abs=1)
    # The planner's search begins with the plans by rule, that of a file with none: the bounds are about the same plans.
    assert planned["certificate"]["lower_bound_s"] * 1e6 <= found["us_per_step"] + 1e-3
    assert found["lower_bound_us"] <= planned["certificate"]["cost_s"] * 1e6 + 1e-3


def test_a_budget_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in ON_8 if word not in ("--evaluations", "2000")]
    assert main([*words, "--seconds", "5", "--json", "out.json"]) == 0
    trace = json.loads(Path("out.json").read_bytes())["search_trace"]
    assert trace, "something was found in that time"
    assert main([*words, "--seconds", "0"]) == 2
    assert "--seconds 0.0 is not from 0.01 to 10,000,000 seconds" in capsys.readouterr().err
    assert main([*ON_8, "--seconds", "1"]) == 2
    assert "--evaluations and --seconds are two budgets of one search; give one of them" in capsys.readouterr().err


def test_a_model_is_priced_as_its_setup_says() -> None:
    class Recomputing(load_experiment_class(PPO)):  # type: ignore[misc]
        @property
        def models(self) -> dict[str, ModelSetup]:
            full = ComputeConfig(recomputation="full")
            return {**super().models, "actor": replace(super().models["actor"], compute=full)}

    cluster = cpu_cluster(2, memory=2**32)
    needs = {}
    for features in ((), ("no-recomputation",)):
        what_if = WhatIf(prompt_tokens=64, features=features)
        task = task_of(ResolvedExperiment(Recomputing()), cluster, PlanRequest(offload=()), what_if)
        rows = {call.name: call for call in build_problem(task, all_options(task)).calls}
        needs[features] = {
            name: next(o.dynamic_bytes for o in rows[name].options if o.devices == (0, 1) and o.micro_batches == 1)
            for name in ("actor_train_step", "critic_train_step")
        }
    assert needs[()]["actor_train_step"] < 0.5 * needs["no-recomputation",]["actor_train_step"]
    assert needs[()]["critic_train_step"] == needs["no-recomputation",]["critic_train_step"]


@pytest.mark.slow
def test_what_if_the_engine_had_other_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--features", "", "--json", "own.json"]) == 0
    assert "what if" not in capsys.readouterr().out
    assert main([*ON_8, "--features", "cuda-graphs", "--json", "graphs.json"]) == 0
    assert main([*ON_8, "--features", "no-cuda-graphs", "--json", "eager.json"]) == 0
    printed = capsys.readouterr().out  # whichever of the two the engine is not
    assert printed.count("cuda-graphs; the engine is not so, and a run of this plan would take") == 1
    own, graphs, eager = (json.loads(Path(f"{name}.json").read_bytes()) for name in ("own", "graphs", "eager"))
    assert graphs["plans"][0]["step_s"] < eager["plans"][0]["step_s"]
    assert own["features"] == []
    assert sorted([*graphs["features"], *eager["features"]]) in (["cuda-graphs"], ["no-cuda-graphs"])
    # The optimizer's states are divided over dp, and activations are fewer.
    needs = []
    for names in ("no-zero1,no-recomputation", "zero1, recomputation"):
        small = ("--cluster", "h100-1x8", "--memory-gb", "2", "--offload", "none")
        assert main([*WHAT_IF, *small, "--features", names]) == 2
        needs.append(float(capsys.readouterr().err.split(" GiB on a device")[0].rsplit(" ", 1)[1]))
    assert needs[1] < needs[0]


def test_clusters_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WHAT_IF, "--offload", "none", "--cluster", "h100-1x1,h200-1x8", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out
    assert "h100-1x1: no plan fits into memory" in printed
    assert "GPU-h/Mtok" in printed
    content = json.loads(Path("out.json").read_bytes())["cases"]
    assert not content["h100-1x1"]["feasible"]
    assert content["h200-1x8"]["plans"][0]["feasible"]


@pytest.mark.slow
def test_stale_rollouts_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--staleness", "0,1", "--json", "out.json"]) == 0
    assert "fastest plan found generates and trains on devices of their own" in capsys.readouterr().out
    cases = json.loads(Path("out.json").read_bytes())["cases"]
    fresh, stale = (cases[f"staleness {k}"]["plans"][0] for k in (0, 1))
    # What can run on-policy can run with older weights.
    assert stale["step_s"] <= fresh["step_s"] * 1.001
    assert (fresh["plan"]["max_steps_in_flight"], stale["plan"]["max_steps_in_flight"]) == (2, 3)


@pytest.mark.slow
def test_a_cluster_file_and_longer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("groups: [{hardware: h200, nodes: 1, devices_per_node: 8}]")
    assert main([*WHAT_IF, "--cluster", "mine.yaml", "--json", "short.json"]) == 0
    assert main([*WHAT_IF, "--cluster", "mine.yaml", "--new-tokens", "2048", "--json", "long.json"]) == 0
    short, long = (json.loads(Path(name).read_bytes()) for name in ("short.json", "long.json"))
    assert long["plans"][0]["step_s"] > short["plans"][0]["step_s"]
    assert (short["workload"]["new_tokens"], long["workload"]["new_tokens"]) == (1024, 2048)
    assert long["workload"]["tokens_per_step"] == 64 * 3072


def test_one_model_by_name_and_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    Path("config.json").write_text(json.dumps({**fields, "model_type": "llama", "vocab_size": 96}))
    words = ["--model-type", "reward=config.json", "--json", "out.json"]
    assert main([*ON_8, *words]) == 0
    models = json.loads(Path("out.json").read_bytes())["plans"][0]["plan"]["models"]
    assert (models["reward"]["num_layers"], models["reward"]["head"]) == (3, "scalar")
    assert models["critic"]["num_layers"] == 32


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*WHAT_IF, "--memory-gb", "24"]
    assert main([*small, "--cluster", "h100-1x2"]) == 2
    error = capsys.readouterr().err
    assert "\nerror: no plan fits into memory: " in error
    assert "the smallest change that is enough: " in error
    assert "GiB of memory a device" in error
    smallest = "the smallest one found, with actor, reward, reference, critic in host memory while nothing needs them,"
    assert smallest in error
    assert main([*small, "--cluster", "h100-1x2", "--offload", "none"]) == 2
    without = capsys.readouterr().err
    needs = [float(text.split(" GiB on a device")[0].rsplit(" ", 1)[1]) for text in (error, without)]
    assert needs[0] < needs[1]
    nodes = int(error.rsplit(" node", 1)[0].rsplit(" ", 1)[1])
    assert main([*small, "--cluster", f"h100-{nodes}x2"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "tpu-2x8"], "hardware='tpu' is not known; choose one of "),
        (["--cluster", "h100"], "cluster 'h100' is neither HARDWARE-NODESxDEVICES"),
        (["--cluster", "bad.yaml"], "bad.yaml: not a cluster: Object missing required field `devices_per_node`"),
        (["--cluster", "h100-1x8", "--memory-gb", "-80"], "--memory-gb -80.0 is not from"),
        (["--cluster", "h100-1x8", "--nodes", "2"], "--cluster h100-1x8 says it all; leave out --nodes"),
        (
            ["--cluster", "h100-1x8,h200-1x8", "--compare"],
            "several clusters or values of --staleness are compared by their searched plans",
        ),
        (
            ["--ppo.importance-correction", "token_mask"],
            "--ppo.importance-correction token_mask needs the actor's own log-probabilities before training",
        ),
        (["--hardware", "tpu"], "hardware='tpu' is not known; choose one of "),
        (["--actor", "llama9-7b"], "architecture 'llama9-7b' is not known; choose one of llama2-7b, "),
        (["--actor", "deep"], "deep/config.json: not a config.json: it is nested too deeply; give the config.json of"),
        (
            ["--model-type", "teacher=llama3-7b"],
            "--model-type teacher=...: no call uses such a model; there are actor,",
        ),
        (["--model-type", "llama3-7b"], "--model-type llama3-7b: write it NAME=ARCHITECTURE"),
        (["--new-tokens", "0"], "--new-tokens 0 is not from 1"),
        (["--prompt-tokens", "-1"], "--prompt-tokens -1 is not from 1"),
        (
            ["--features", "zero1,turbo"],
            "feature 'turbo' is not known; choose from zero1, fp32-gradients, recomputation, ",
        ),
        (["--dump-problem", "nowhere/problem.json"], "nowhere/problem.json: cannot write"),
        (["--staleness", "-1"], "--staleness -1 is not from 0 to 64"),
        (["--staleness", "many"], "--staleness many must be whole numbers"),
        (["--staleness", "0,1", "--cluster", "h100-1x8,h200-1x8"], "several clusters or values of --staleness are"),
        (
            ["--cluster", "h200-1x8", "--actor", "llama3-7b", "--json", "nowhere/out.json"],
            "nowhere/out.json: cannot write",
        ),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text("groups: [{hardware: h100, nodes: 2}]")
    Path("deep").mkdir()
    Path("deep/config.json").write_text('{"a":' * 100_000)
    assert main(["plan", PPO, "--evaluations", "1000", *words]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_a_plan_of_another_graph(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(ROOT / "experiments/sft.py"), "--plan", str(ROOT / "tests/plans/single.json")]
    assert main([*words, "--prompt-tokens", "64"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the plan is for other calls: it has actor_generate, ")
    assert "make a plan for this experiment with `realhf plan`" in error


def test_planning_needs_no_torch() -> None:
    words = [*ON_8, "--compare", "--html", "out.html"]
    code = f"import sys; from realhf.cli import main; assert main({words!r}) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, capture_output=True)


def test_help_comes_at_once() -> None:
    """It imports nothing that takes long."""
    code = """
import sys
from realhf.cli import main
from realhf.planning.model.descriptions import load_hardware
try:
    main(["plan", "--help"])
finally:
    print(sorted(sys.modules.keys() & {"torch", "numpy", "plotly", "transformers", "tokenizers", "yaml", "zmq"}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, capture_output=True, text=True)
    assert "--compare" in done.stdout
    assert done.stdout.endswith("\n[]\n")


def test_offload_is_planned(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_8, "--offload", "reward,reference", "--output", "plan.json"]) == 0
    assert json.loads((empty_folder / "plan.json").read_bytes())["offload"] == ["reward", "reference"]
    capsys.readouterr()
    for words, message in (
        (["--plan", "plan.json", "--offload", "reward"], "--offload is for the search of a plan"),
        (["--offload", "reward,nobody"], "offload: 'nobody' is no model of the experiment; choose from actor, reward"),
    ):
        assert main([*ON_8, *words]) == 2
        assert message in capsys.readouterr().err
