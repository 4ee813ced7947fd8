"""What is printed acts on no terminal, is no markup, and breaks no table."""

import io
import logging

import pytest
from rich.text import Text

from realhf.base.errors import RunError, UserError
from realhf.base.shown import visible
from realhf.cli import print_error
from realhf.cli.output import Output, table_of
from realhf.cli.status import summary
from realhf.report.run_status import read_run_status
from realhf.rundir.logs import start_logging
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import Status, write_status
from tests.unit.report.run_directories import good_run

# Clears the screen; sets the window's title; C1's CSI; turns the text around; hides a character; is no markup.
HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\u202ee\u200bf\rg\x7f[/bold][red]:smile:\nsecond"
SHOWN = "a\\x1b[2Jb\\x1b]0;title\\x07c\\x9b31md\\u202ee\\u200bf\\rg\\x7f[/bold][red]:smile:\nsecond"
IN_TABLES = SHOWN.replace("\\x07", "").replace("\\r", "")  # rich leaves these out


def test_every_acting_character_is_its_escape() -> None:
    assert visible(HOSTILE) == SHOWN
    for text in ("plain", "two\nlines\n", "é 漢字 🙂", "a\u200db", ""):
        assert visible(text) == text
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029, 0xFEFF, 0xE000, 0xD800):
        assert code == 10 or chr(code) not in visible(f"a{chr(code)}b"), hex(code)


def test_lines_and_tables_show_texts_as_they_are() -> None:
    out = Output(file=io.StringIO(), width=400)
    out.say(HOSTILE)
    table = table_of(HOSTILE, HOSTILE, "number")
    table.add_row(HOSTILE, Text(HOSTILE))
    out.print(table)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert shown.startswith(IN_TABLES)
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e", "\u200b", "\r", "\x7f"}


def test_brackets_are_no_markup() -> None:
    out = Output(file=io.StringIO(), width=100)
    table = table_of("title[red]", "[/bold]column")
    table.add_row("cell[red]:smile:[/q]")
    out.print(table)
    out.say("line[/q]")
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    for text in ("title[red]", "[/bold]column", "cell[red]:smile:[/q]", "line[/q]"):
        assert text in shown


@pytest.mark.parametrize("error", [UserError(HOSTILE), RunError(HOSTILE), HOSTILE])
def test_errors_show_texts_as_they_are(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(error, Exception):
        error.add_note(HOSTILE)
    print_error(error)
    printed = capsys.readouterr().err
    assert SHOWN in printed
    assert printed == visible(printed)


def test_a_runs_message_in_its_status(tmp_path) -> None:
    directory = RunDirectory(good_run(tmp_path / "run"))
    write_status(directory.status, Status(state="failed", step=1, steps=2, message=HOSTILE))
    out = Output(file=io.StringIO(), width=400)
    out.print(*summary(read_run_status(directory, now_s=2e9)), sep="\n", highlight=False, soft_wrap=True)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert IN_TABLES in shown
    assert shown == visible(shown)


def test_log_lines_show_texts_as_they_are() -> None:
    before, stream = list(logging.root.handlers), io.StringIO()
    try:
        start_logging("worker-0", stream=stream)
        logging.getLogger("realhf").warning("%s", HOSTILE)
    finally:
        logging.root.handlers[:] = before
    assert SHOWN in stream.getvalue()
