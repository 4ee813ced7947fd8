"""`realhf evaluate`: the answers are those of transformers, whatever the batch and the plan; the figures are theirs."""

import json
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf import cli
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from tests.docs.tiny_models import write_tiny_model

ROWS, TOKENS = 19, 6
REWARDS = """\
def even(response): return float(len(response) % 2 == 0)
def length(response): return len(response) / 10
"""
FORKED = ("--launcher", "tests.e2e.forked:ForkedLauncher")
COMMON = ("--data", "rows.jsonl", "--dtype", "float64", "--generation.max-new-tokens", str(TOKENS))
ONE = ("--num-workers", "1", "--evaluations", "100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate")
    rows = ({"prompt": f"What is {i} + {i * i}?", "answer": str(i + i * i)} for i in range(ROWS))
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rewards.py").write_text(REWARDS)
    for seed, name in enumerate(("Llama-one", "Llama-two")):
        write_tiny_model(path / name)
        model, drawn = AutoModelForCausalLM.from_pretrained(path / name), torch.Generator().manual_seed(seed)
        with torch.no_grad():  # weights so large that prompts differ in what is likely next
            for parameter in (each for each in model.parameters() if each.dim() == 2):
                parameter.normal_(0, 0.3, generator=drawn)
        generation = (path / name / "generation_config.json").read_bytes()
        model.save_pretrained(path / name)
        (path / name / "generation_config.json").write_bytes(generation)
    return path


def evaluated(folder: Path, run_dir: str, *words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return cli.main(["evaluate", "--run-dir", run_dir, *COMMON, *words, *FORKED])


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def both(folder: Path) -> dict[str, Any]:
    """The figures of two models, in batches of 6, 6 and 7."""
    models = ("--model", "Llama-one", "--model", "Llama-two", "--reward", "rewards.py:even")
    assert evaluated(folder, "both", *models, *ONE, "--batch-size", "8", "--json", "both.json") == 0
    content: dict[str, Any] = json.loads((folder / "both.json").read_text())
    return content


def most_likely(model: Path) -> list[str]:
    """By transformers: one prompt at a time."""
    tokenizer, hf = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).double().eval()
    texts = []
    for line in (model.parent / "rows.jsonl").read_text().splitlines():
        prompt = tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids
        out = hf.generate(prompt, do_sample=False, max_new_tokens=TOKENS, attention_mask=torch.ones_like(prompt))
        texts.append(tokenizer.decode(out[0, prompt.shape[1] :]))
    return texts


@pytest.mark.distributed
@pytest.mark.parametrize("place", [0, 1])
def test_each_row_is_answered_once_as_transformers_does(place: int, both: dict[str, Any], folder: Path) -> None:
    model = both["models"][place]
    found = samples(Path(model["run_dir"]))
    assert [one["sample"] for one in found] == list(range(ROWS))
    responses = [one["response"] for one in found]
    assert responses == most_likely(folder / model["model"])
    assert len(set(responses)) > ROWS // 2, "prompts are told apart"


@pytest.mark.distributed
def test_the_figures_are_those_of_the_answers(both: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ([one["reward"] for one in samples(Path(model["run_dir"]))] for model in both["models"])
    assert {*first, *second} == {0.0, 1.0}
    for rewards, model in zip((first, second), both["models"], strict=True):
        mean = sum(rewards) / ROWS
        assert model["estimates"]["reward"]["mean"] == pytest.approx(mean)
        assert model["estimates"]["pass@1"] == model["estimates"]["reward"]
        assert model["statistics"]["reward_even"] == pytest.approx(mean)
    (comparison,) = both["comparisons"]
    fewer, more = sorted(sum(a - b == side for a, b in zip(first, second, strict=True)) for side in (1, -1))
    p = min(1.0, 2 * sum(comb(fewer + more, i) for i in range(fewer + 1)) / 2 ** (fewer + more))
    assert (comparison["p"], comparison["test"]) == (pytest.approx(p), "McNemar's exact test")
    assert comparison["difference"]["mean"] == pytest.approx((sum(second) - sum(first)) / ROWS)
    assert (both["prompts"], both["samples_per_prompt"]) == (ROWS, 1)


TWO = {"dp": CallPlan(devices=(0, 2), dp=2), "pp": CallPlan(devices=(0, 2), pp=2)}


@pytest.mark.distributed
@pytest.mark.parametrize(("batch_size", "plan"), [(1, ""), (3, "pp"), (4, "dp")])
def test_answers_depend_neither_on_the_batch_nor_on_the_plan(
    batch_size: int, plan: str, both: dict[str, Any], folder: Path
) -> None:
    words: Sequence[str] = ONE
    if plan:
        save_plan(ExecutionPlan(num_devices=2, calls={"actor_generate": TWO[plan]}), folder / "plan.json")
        words = ("--plan", "plan.json")
    name = f"batches-{batch_size}"
    words = (*words, "--model", "Llama-one", "--reward", "rewards.py:even", "--batch-size", str(batch_size))
    assert evaluated(folder, name, *words) == 0
    assert samples(folder / name / "1-Llama-one") == samples(Path(both["models"][0]["run_dir"]))


@pytest.mark.distributed
def test_several_answers_to_a_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("--generation.samples-per-prompt", "3", "--generation.temperature", "1", "--batch-size", "15")
    words = ("--model", "Llama-one", "--reward", "rewards.py:length", "--passes-at", "0.55", "--json", "-")
    assert evaluated(folder, "drawn", *words, *drawn, *ONE) == 0
    content = json.loads(capsys.readouterr().out)
    found = samples(folder / "drawn" / "1-Llama-one")
    assert [one["sample"] for one in found] == list(range(3 * ROWS))
    groups = [found[i : i + 3] for i in range(0, 3 * ROWS, 3)]
    assert all(len({one["prompt"] for one in group}) == 1 for group in groups)
    assert len({one["response"] for one in groups[0]}) > 1
    passed = [sum(one["reward"] >= 0.55 for one in group) for group in groups]
    estimates = content["models"][0]["estimates"]
    assert [*estimates] == ["reward", "pass@1", "pass@2", "pass@3"]
    assert estimates["reward"]["mean"] == pytest.approx(sum(one["reward"] for one in found) / len(found))
    assert estimates["pass@1"]["mean"] == pytest.approx(sum(passed) / len(found))
    assert estimates["pass@3"]["mean"] == pytest.approx(sum(count > 0 for count in passed) / ROWS)
    assert 0 < estimates["pass@1"]["mean"] < estimates["pass@3"]["mean"]


MODEL, EVEN = ("--model", "Llama-one"), ("--reward", "rewards.py:even")
MISTAKES = {
    "a model twice": ((*MODEL, *MODEL, *EVEN), "--model Llama-one is given twice"),
    "no reward": (MODEL, "there is no reward; give --reward FILE.py:FUNCTION"),
    "the same answer several times": (
        (*MODEL, *EVEN, "--generation.samples-per-prompt", "4"),
        "--generation.samples-per-prompt 4 without a temperature gives one answer 4 times",
    ),
    "answers without a score": ((*MODEL, *EVEN, "--reward.on-error", "drop"), "each answer counts; give fail or zero"),
    "steps": ((*MODEL, *EVEN, "--steps", "3"), "evaluate trains nothing and evaluates --data; leave --steps and"),
    "no folder for the figures": ((*MODEL, *EVEN, "--json", "no/x.json"), "--json no/x.json: there is no folder no"),
    "other prompts": (
        (*MODEL, "--model", "Llama-two", *EVEN, "--max-prompt-tokens", "17", "--too-long", "drop", *ONE),
        "models are compared on the same prompts",
    ),
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.values(), ids=MISTAKES)
def test_what_says_nothing_is_refused(
    words: Sequence[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(folder, "refused", *words) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "refused").exists()
