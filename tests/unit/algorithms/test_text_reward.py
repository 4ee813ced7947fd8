"""Rewards on texts as a call: tokens become texts, rows give the other columns, scores become tensors."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.decoders import Fuse

from realhf.algorithms.text_reward import config as text_reward_config
from realhf.algorithms.text_reward import interface
from realhf.algorithms.text_reward.config import TextReward
from realhf.algorithms.text_reward.interface import TextRewardInterface
from realhf.algorithms.text_reward.samples import messages_of
from realhf.api import inputs
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.dataflow.interface import Nulls
from realhf.engine.batch import Batch
from realhf.engine.returned import InterfaceError, check_result
from realhf.rewards.details import RewardDetails
from realhf.rewards.jobs import RewardError
from realhf.rewards.pool import Score
from tests.unit.algorithms.conftest import SingleContext

FUNCTIONS = """
def seen(prompt, response, response_length, number):
    assert prompt == "cab>", prompt
    return {"abc": 1.0, "ab": 0.5}[response] + number + 100 * response_length

def broken(response):
    if response == "ab":
        raise ValueError("not ab")
    return None if response == "" else 2

def logging(completions, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_extra("letters", [len(one) for one in completions])
    return [1.0] * len(completions)

def trl(prompts, completions, completion_ids, **kwargs):
    assert prompts[0][0]["role"] == "user", prompts
    return [len(ids) + (completion[0]["content"] == "abc") for completion, ids in zip(completions, completion_ids)]

def raises(response):
    raise ValueError("no letters")

def words(response):
    return "good"

def nothing(response):
    pass

def counts(prompt, response, number):
    print("called")
    with open(__file__.replace("functions.py", "calls"), "a") as file:
        print(prompt, response, number, sep="|", file=file)
    return 1

def each(response, response_length):
    return [0.5] * response_length

def letters(response, response_ids, response_tokens):
    assert len(response_ids) == len(response_tokens)
    return [float(text in "ab" and text != "") for text in response_tokens]
"""


@dataclass
class RowContext(SingleContext):
    row: dict[str, Any] = field(default_factory=dict)
    step: int = 4
    steps_made: int = 4
    steps: int = 20

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        return [{"number": id, **self.row} for id in ids]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    tokenizer = tmp_path / "tokenizer.json"
    characters = sort_task.make_tokenizer()
    characters.decoder = Fuse()  # by itself it puts spaces between tokens
    characters.save(str(tokenizer))
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def config(*functions: str, **options: Any) -> TextReward:
        names = tuple(f"{tmp_path}/functions.py:{function}" for function in functions)
        return TextReward(rewards=names, tokenizer=str(tokenizer), processes=1, **options)

    return config


def test_the_files_of_functions_are_inputs_of_the_run() -> None:
    rewards = ("rewards.py:one=0.5", "ready:exact_match", "other/more.py:two", "rewards.py:three")
    assert TextReward(rewards=rewards, tokenizer="model").read_files == ("rewards.py", "other/more.py")


def rollouts(*responses: str) -> Batch:
    """Responses to `cab>` in the vocabulary of the sorting task, with ids from 3 on; "." is the end token."""
    tokenizer = sort_task.make_tokenizer()
    prompt = tokenizer.encode("cab>").ids
    texts = [response.replace(".", sort_task.EOS) for response in responses]
    answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return Batch(
        tuple(range(3, 3 + len(responses))),
        {
            "prompt": [torch.tensor(prompt) for _ in answers],
            "seq": [torch.tensor(prompt + answer) for answer in answers],
        },
    )


def test_texts_and_columns_become_rewards(make: Any) -> None:
    batch = rollouts("abc.", "ab")
    result = TextRewardInterface(make("seen")).inference(None, batch, RowContext())  # type: ignore[arg-type]
    check_result(result, batch.ids, declared={"reward"}, recorded=(), holds_outputs=True)
    assert torch.cat(result.outputs["reward"]).tolist() == [1 + 3 + 400, 0.5 + 4 + 200]
    assert result.outputs["reward"][0].dtype == torch.float32
    total, weight = result.stats["reward_total"]
    assert total / weight == (404 + 204.5) / 2
    assert result.stats["reward_seen"] == result.stats["reward_total"]
    assert result.stats["reward_failures"] == (0, 2)
    assert result.stats["reward_seconds"][1] == 2


def test_rewards_of_tokens(make: Any) -> None:
    """`.` is the end token, whose text is empty; the last reward is of the whole response."""
    batch = rollouts("cab.", "c", ".")
    config = make("letters", "logging")
    result = TextRewardInterface(config).inference(None, batch, RowContext())  # type: ignore[arg-type]
    taken = check_result(result, batch.ids, declared={"reward"}, recorded=(), holds_outputs=True)
    assert [x.tolist() for x in taken.outputs["reward"]] == [[0, 1, 1, 1], [1], [1]]
    assert {x.dtype for x in taken.outputs["reward"]} == {torch.float32}
    assert result.stats["reward_total"] == (5, 3)
    assert result.stats["reward_letters"] == (2, 3)
    assert result.details[3].rewards == {"letters": 2, "logging": 1}


def test_rewards_of_as_many_tokens_as_the_response_has(make: Any) -> None:
    """Without the tokens themselves."""
    result = TextRewardInterface(make("each")).inference(None, rollouts("cab.", "c"), RowContext())  # type: ignore[arg-type]
    assert [x.tolist() for x in result.outputs["reward"]] == [[0.5] * 4, [0.5]]


def test_a_failure_names_step_and_sample(make: Any) -> None:
    interface = TextRewardInterface(make("broken"))
    with pytest.raises(InterfaceError, match=r"broken \(functions.py:6\) of step 5, sample 4, prompt 'cab>'.*not ab"):
        interface.inference(None, rollouts("abc.", "ab"), RowContext())  # type: ignore[arg-type]


def test_what_a_function_logs(make: Any) -> None:
    batch = rollouts("abc.", "ab")
    result = TextRewardInterface(make("logging", prefix="first")).inference(None, batch, RowContext())  # type: ignore[arg-type]
    assert result.stats["first_progress"] == (2 * 4 / 20, 2)
    taken = check_result(result, batch.ids, declared={"reward"}, recorded=(), holds_outputs=True)
    assert {id: of.notes for id, of in taken.details.items()} == {3: {"letters": 3}, 4: {"letters": 2}}


@pytest.mark.parametrize(("policy", "total"), [("zero", (4, 4)), ("drop", (4, 2))])
def test_failures_are_counted(make: Any, policy: Any, total: tuple[float, float]) -> None:
    config = make("broken", on_error=policy)
    batch = rollouts("abc.", "ab", ".", "abc")
    result = TextRewardInterface(config).inference(None, batch, RowContext())  # type: ignore[arg-type]
    check_result(result, batch.ids, declared=set(config.output_data), recorded=(), holds_outputs=True)
    assert torch.cat(result.outputs["reward"]).tolist() == [2, 0, 0, 2]
    assert set(result.outputs) == set(config.output_data)
    if policy == "drop":
        assert torch.cat(result.outputs["valid"]).tolist() == [1, 0, 0, 1]
    assert result.stats["reward_total"] == total
    assert result.stats["reward_broken"] == (4, 2)
    assert result.stats["reward_failures"] == (2, 4)


def test_a_call_may_have_names_of_its_own(make: Any) -> None:
    """The columns under the call's keys, the statistics behind its prefix."""
    batch = rollouts("abc.", "ab")
    batch = Batch(batch.ids, {"prompt": batch.data["prompt"], "second_seq": batch.data["seq"]})
    named = {"batch": inputs("prompt", seq="second_seq"), "outputs": ("cost", "cost_valid")}
    config = make("broken", on_error="drop", prefix="cost", **named)
    result = TextRewardInterface(config).inference(None, batch, RowContext())  # type: ignore[arg-type]
    assert torch.cat(result.outputs["cost"]).tolist() == [2, 0]
    assert torch.cat(result.outputs["cost_valid"]).tolist() == [1, 0]
    assert set(result.stats) == {f"cost_reward_{name}" for name in ("total", "failures", "seconds", "broken")}
    unnamed = make("broken", on_error="drop", **named)
    result = TextRewardInterface(unnamed).inference(None, batch, RowContext())  # type: ignore[arg-type]
    assert result.stats["reward_failures"] == (1.0, 2.0)


@pytest.mark.parametrize(("nodes", "cores", "processes"), [("2", 7, 2), ("1", 7, 1), ("5", 4, 4), ("3", 1, 1)])
def test_a_worker_s_share_of_its_host(
    make: Any, monkeypatch: pytest.MonkeyPatch, nodes: str, cores: int, processes: int
) -> None:
    """Five workers on the nodes; those that share one share its cores, with one process each at least."""
    monkeypatch.setenv("SLURM_NNODES", nodes)
    monkeypatch.setattr(interface.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(interface.dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(interface, "read_host", lambda: SimpleNamespace(cores=cores))
    assert interface._options(dataclasses.replace(make("seen"), processes=0)).processes == processes


def test_ranks_that_hold_no_outputs_give_none(make: Any) -> None:
    interface = TextRewardInterface(make("broken"))
    result = interface.inference(None, rollouts("abc."), RowContext(holds_outputs=False))  # type: ignore[arg-type]
    assert not result.outputs
    assert not result.stats


def test_chats_reach_trl_s_functions_as_messages(make: Any) -> None:
    messages = [{"role": "user", "content": "sort cab"}]
    for row in ({"prompt": messages}, {"messages": [*messages, {"role": "assistant", "content": "abc"}]}):
        context = RowContext(row=row)
        result = TextRewardInterface(make("trl")).inference(None, rollouts("abc.", "ab"), context)  # type: ignore[arg-type]
        assert torch.cat(result.outputs["reward"]).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ("abc.", {}, "abc"),
        ("abc", {}, "abc"),
        ("abz", {"eos_token": sort_task.VOCABULARY.index("z")}, "ab"),
        ("zaz", {"eos_token": sort_task.VOCABULARY.index("z")}, "za"),
        ("abxy", {"stop_strings": ("xy",)}, "ab"),
        ("xyab", {"stop_strings": ("xy",)}, "xyab"),
        ("xya", {"stop_strings": ("xy",)}, "xya"),
        ("a", {"stop_strings": ("xy",)}, "a"),
        ("xy", {"stop_strings": ("xy",)}, ""),
        ("xyaxy", {"stop_strings": ("xy",)}, "xya"),
        ("abxy", {"stop_strings": ("ab", "xy")}, "ab"),
        ("xyz", {"stop_strings": ("xy",), "eos_token": sort_task.VOCABULARY.index("z")}, "xy"),
        ("", {"stop_strings": ("xy",)}, ""),
    ],
)
def test_what_ends_a_response_is_no_part_of_its_text(
    make: Any, monkeypatch: pytest.MonkeyPatch, tokens: str, options: Any, text: str
) -> None:
    monkeypatch.setattr(interface, "_pool", lambda *given: None)
    [seq], [prompt] = (rollouts(tokens).data[key] for key in ("seq", "prompt"))
    made = TextRewardInterface(make("seen", **options))
    assert made.response_text(seq[len(prompt) :].tolist()) == text


def test_functions_that_cannot_be_loaded_are_an_error_of_the_call(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RewardError("functions.py:seen cannot be imported")

    monkeypatch.setattr(interface, "_pool", broken)
    with pytest.raises(InterfaceError, match=r"^functions\.py:seen cannot be imported$"):
        TextRewardInterface(make("seen"))


USER, ANSWER = {"role": "user", "content": "sort cab"}, {"role": "assistant", "content": "abc"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({}, None),
        ({"prompt": [USER]}, [USER]),
        ({"prompt": [USER, ANSWER, USER, ANSWER]}, [USER, ANSWER, USER]),
        ({"prompt": "a text", "messages": [USER]}, None),
        ({"conversation": [ANSWER, USER], "messages": [USER, ANSWER]}, [USER]),
        ({"other": [USER, ANSWER]}, [USER]),
        ({"other": [USER, USER], "conversations": [USER]}, [USER]),
        ({"prompt": [], "messages": [USER]}, [USER]),
        ({"prompt": [{"content": "no role"}], "messages": [USER]}, [USER]),
        ({"messages": [USER, "no message"]}, None),
        ({"messages": (USER,)}, None),
        ({"messages": "role"}, None),
    ],
)
def test_the_chat_of_a_row_is_all_before_the_answer(row: dict[str, Any], messages: Any) -> None:
    assert messages_of(row) == messages


def test_statistics_of_scores() -> None:
    """A value of 0 is one, none is none; samples that do not count have values and take time."""
    failed: Any = {"one": SimpleNamespace()}
    scores = [
        Score(reward=2.0, is_valid=True, values={"one": 2.0, "two": 0.0}, failures={}, seconds=0.5),
        Score(reward=0.0, is_valid=False, values={"one": None, "two": 4.0}, failures=failed, seconds=1.0),
        Score(reward=1.0, is_valid=True, values={"one": 1.0, "two": None}, failures={}, seconds=0.25),
    ]
    assert interface.statistics(("one", "two", "three"), scores) == {
        "reward_total": (3.0, 2),
        "reward_failures": (1.0, 3),
        "reward_seconds": (1.75, 3),
        "reward_one": (3.0, 2),
        "reward_two": (4.0, 2),
        "reward_three": (0, 0),
    }


def test_functions_get_rows_steps_and_tokens(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens where a function asks for them, their number always."""
    seen: list[Any] = []

    class Pool(SimpleNamespace):
        def score(self, samples: list[Any]) -> list[Score]:
            seen.extend(samples)
            values = {"right": 0.5}
            return [Score(reward=0.5, is_valid=True, values=values, failures={}, seconds=0.0) for _ in samples]

    batch, context = rollouts("abc.", "b"), RowContext(row={"messages": [USER, ANSWER], "none": None})
    for wants_tokens in (True, False):
        functions = [SimpleNamespace(columns=("number", "none", "missing"))]
        pool = Pool(wants_tokens=wants_tokens, wants_token_texts=wants_tokens, names=(), functions=functions)
        monkeypatch.setattr(interface, "_pool", lambda *given, pool=pool: pool)
        result = TextRewardInterface(make("seen")).inference(None, batch, context)  # type: ignore[arg-type]
        assert [reward.tolist() for reward in result.outputs["reward"]] == [[0.5], [0.5]]
        shown = {i: RewardDetails(rewards={"right": 0.5}, columns={"number": str(i), "none": "null"}) for i in (3, 4)}
        assert result.details == shown
    answers = [seq[len(prompt) :].tolist() for prompt, seq in zip(batch.data["prompt"], batch.data["seq"], strict=True)]
    assert [sample.tokens for sample in seen] == [tuple(answers[0]), tuple(answers[1]), (), ()]
    assert [sample.token_texts for sample in seen] == [("a", "b", "c", ""), ("b",), (), ()]
    assert [(sample.id, sample.step, sample.num_tokens) for sample in seen] == [(3, 4, 4), (4, 4, 1)] * 2
    assert {sample.steps for sample in seen} == {20}
    assert [(sample.prompt, sample.response) for sample in seen] == [("cab>", "abc"), ("cab>", "b")] * 2
    assert [(sample.row["number"], sample.messages) for sample in seen] == [(3, [USER]), (4, [USER])] * 2


def test_the_pool_gets_the_options(make: Any) -> None:
    config = make("seen", on_error="zero", timeout_s=7.0, concurrency=3, batch_samples=5)
    of_config, by_cores = config.pool_options(9), dataclasses.replace(config, processes=0).pool_options(9)
    assert (of_config.processes, by_cores.processes) == (1, 9)
    assert (by_cores.on_error, by_cores.timeout_s, by_cores.concurrency, by_cores.batch_samples) == ("zero", 7.0, 3, 5)
    for name, value in (("concurrency", 0), ("batch_samples", 0)):
        with pytest.raises(UserError, match=name):
            make("seen", **{name: value})


def test_defaults_of_rewards_on_texts() -> None:
    config = TextReward(rewards=("r.py:f",), tokenizer="t")
    assert (config.eos_token, config.stop_strings, config.on_error) == (-1, (), "fail")
    assert (config.timeout_s, config.processes, config.seconds_per_sample) == (60.0, 0, 0.001)
    assert (config.uses_model, config.runs_beside, config.output_data) == (False, True, ("reward",))


def test_notes_of_functions_are_printed_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_reward_config, "notes_of", lambda rewards: [f"{len(rewards)} functions", "more"])
    config = make("seen")
    for _ in range(2):
        config.check_columns(["prompt", "number"])
    assert capsys.readouterr().err == "note: 1 functions\nnote: more\n"


ROW = {"question": "What is 2 + 2?", "number": "4"}
# The line of the function's file that raises, or of its definition.
TRIED = {
    "raises": ("raises (functions.py:20)", "ValueError: no letters\n  | functions.py:21 in raises: raise ValueError"),
    "words": ("words (functions.py:23)", "it returned 'good' (str); return a float, an int, a bool"),
    "nothing": ("nothing (functions.py:26)", "no function gives this sample a reward (None); return a number"),
}


@pytest.mark.parametrize(("function", "said"), TRIED.items(), ids=TRIED)
def test_functions_are_tried_before_a_process_starts(
    function: str, said: tuple[str, str], make: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failure names the line of the function, and the row's own part of the prompt; or it is a note."""
    prompt = {"prompt": sort_task.make_tokenizer().encode("cab>").ids}
    with pytest.raises(UserError) as caught:
        make(function).check_row(ROW, prompt)
    place, reason = said
    assert f"reward {place}, called before the start with the first row of the data" in str(caught.value)
    assert reason in str(caught.value)
    assert capfd.readouterr().err == ""
    make(function, on_error="zero").check_row(ROW, prompt)
    note = capfd.readouterr().err
    assert note.startswith(f"note: reward {place}, called before the start")
    assert note.endswith("; the run goes on, by --reward.on-error zero\n")


def test_functions_that_work_are_tried_once_and_in_silence(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A server is not asked before the start, and may have the reward that the others do not give. Without a prompt in
    the data there is nothing to try."""
    prompt = {"prompt": sort_task.make_tokenizer().encode("cab>").ids}
    config = make("counts")
    config.check_row(ROW, prompt)
    [path] = config.read_files
    assert Path(path).with_name("calls").read_text() == "cab>|0|4\n"
    server = "ready:server(url='http://127.0.0.1:9')"
    dataclasses.replace(make("nothing"), rewards=(*make("nothing").rewards, server)).check_row(ROW, prompt)
    dataclasses.replace(config, rewards=(server,)).check_row(ROW, prompt)
    make("raises").check_row(ROW, {"tokens": [3]})
    assert capfd.readouterr() == ("", "")


def test_columns_are_checked_before_a_process_starts(make: Any) -> None:
    make("seen").check_columns(["prompt", "number"])
    with pytest.raises(UserError, match=r"seen .* asks for 'number'.*they have answer, prompt"):
        make("seen").check_columns(["prompt", "answer"])


def test_rows_without_a_value_are_told_and_columns_without_any_are_refused(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    full, some, none = Nulls(0, 4, ""), Nulls(1, 4, "a.jsonl, line 3"), Nulls(4, 4, "a.jsonl, line 1")
    for _ in range(2):
        make("seen").check_nulls({"prompt": full, "number": some, "hint": none})
    (note,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"note: reward seen \(.*\) reads 'number', which is null or missing in 1 of 4 rows \(a.jsonl, line 3 is the "
        r"first\): the function gets None there",
        note,
    )
    with pytest.raises(UserError, match=r"reads 'number', .* in all 4 rows \(a.jsonl, line 1 is the first\); give"):
        make("seen").check_nulls({"prompt": full, "number": none})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewards": ()}, "names no reward function"),
        ({"rewards": ("r.py:f=nan",)}, "not finite"),
        ({"on_error": "skip"}, "choose one of fail, zero, drop"),
        ({"processes": -1}, r"processes \(0: by the cores\)"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"seconds_per_sample": float("nan")}, "seconds_per_sample"),
    ],
)
def test_options(options: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TextReward(**{"rewards": ("r.py:f",), "tokenizer": "t", **options})
