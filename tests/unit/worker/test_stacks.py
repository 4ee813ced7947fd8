"""What a stuck process leaves: the stacks of all its threads, the stuck one's among them."""

import threading
from pathlib import Path

from realhf.worker.stacks import write_stacks


def waits_for_ever(started: threading.Event, end: threading.Event) -> None:
    started.set()
    end.wait()


def test_the_stack_of_a_thread_that_waits(tmp_path: Path) -> None:
    started, end = threading.Event(), threading.Event()
    stuck = threading.Thread(target=waits_for_ever, args=(started, end))
    stuck.start()
    started.wait()
    path = tmp_path / "stacks-worker-3.txt"
    for _ in range(2):  # the second takes the place of the first
        write_stacks(path, "actor_generate of step 2: compute")
    end.set()
    stuck.join()
    text = path.read_text()
    assert text.startswith("actor_generate of step 2: compute\n\n")
    assert "in waits_for_ever" in text
    assert "in test_the_stack_of_a_thread_that_waits" in text
    assert list(tmp_path.iterdir()) == [path]
