"""Log lines: time, process, step and call before every message, whoever logs it."""

import io
import logging
import re
import threading
from collections.abc import Iterator

import pytest

from realhf.rundir.logs import at, doing, place_of, start_logging

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("activity", "place"),
    [
        ("actor_generate of step 3: compute", "step=3 call=actor_generate "),
        ("critic_train_step of step 12: reallocation", "step=12 call=critic_train_step "),
        ("reward_inference of evaluation batch 2: transfer", "evaluation_batch=2 call=reward_inference "),
        ("score of evaluation/math-500 batch 2: beside", "evaluation/math-500_batch=2 call=score "),
        ("waiting, after actor_generate of step 3: compute", ""),
        ("setup: model actor", ""),
        ("/runs/a/checkpoints/.step-2.part: checkpoint", ""),
        ("", ""),
    ],
)
def test_where_an_activity_is(activity: str, place: str) -> None:
    assert place_of(activity) == place


def test_every_line_says_when_who_and_where() -> None:
    stream, doing = io.StringIO(), ["actor_generate of step 3: compute"]
    start_logging("worker-1", lambda: doing[0], stream)
    logging.getLogger("some.library").warning("a word of %s", "another")
    doing[0] = "waiting, after actor_generate of step 3: compute"
    logging.getLogger("realhf").info("idle")
    logging.getLogger("realhf").debug("not of interest")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(rf"{TIME} WARNING worker-1 step=3 call=actor_generate a word of another", first)
    assert re.fullmatch(rf"{TIME} INFO worker-1 idle", second)


def test_a_record_may_say_itself_where_it_belongs() -> None:
    stream = io.StringIO()
    start_logging("master", stream=stream)
    logging.getLogger("realhf").info("took 1 s", extra=at(4, "actor_generate"))
    logging.getLogger("realhf").info("ended", extra=at(4))
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" INFO master step=4 call=actor_generate took 1 s")
    assert second.endswith(" INFO master step=4 ended")


def test_a_thread_may_do_something_else_than_the_process() -> None:
    stream = io.StringIO()
    start_logging("worker-1", lambda: "actor_generate of step 3: compute", stream)

    def score() -> None:
        with doing("score of step 2: beside"):
            logging.getLogger("rewards").warning("no reward")

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    logging.getLogger("realhf").info("on")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("WARNING worker-1 step=2 call=score no reward")
    assert second.endswith("INFO worker-1 step=3 call=actor_generate on")


def test_a_traceback_follows_its_line() -> None:
    stream = io.StringIO()
    start_logging("worker-0", lambda: "actor_train_step of step 1: compute", stream)
    try:
        raise ValueError("the gradient norm is nan")
    except ValueError:
        logging.getLogger("realhf").exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ERROR worker-0 step=1 call=actor_train_step failed")
    assert lines[-1] == "ValueError: the gradient norm is nan"
