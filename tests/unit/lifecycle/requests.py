"""Requests for runs."""

from pathlib import Path

from realhf.cli import parser
from realhf.cli.request import run_request
from realhf.lifecycle.request import RunRequest


def request_of(*words: str | Path) -> RunRequest:
    """What `realhf run WORDS` asks for."""
    command = ["run", *map(str, words)]
    arguments, arguments.overrides = parser("run").parse_known_args(command[1:])
    arguments.words = command
    return run_request(arguments)
