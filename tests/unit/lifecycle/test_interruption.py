"""An interruption is not lost, whatever the interpreter does when it comes."""

import os
import signal

import pytest

from realhf.lifecycle.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signals_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        interruption.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
    assert signal.getsignal(number) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_comes_in_a_callback_is_noticed_at_the_next_check() -> None:
    class Dropped:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with Interruption() as interruption:
        interruption.check()
        Dropped()  # the exception ends in the destructor
        with pytest.raises(KeyboardInterrupt):
            interruption.check()


def test_one_that_comes_before_the_first_check_waits_for_it() -> None:
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.check()


def test_who_has_interrupted_does_it_once() -> None:
    with Interruption() as interruption:
        interruption.check()
        with interruption.ignored():
            os.kill(os.getpid(), signal.SIGINT)
        interruption.check()


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            interruption.check()
    finally:
        signal.signal(signal.SIGINT, before)
