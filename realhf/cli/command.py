"""The parser of a command, whose help shows the common options, and with `--help-all` all of them."""

import argparse
from collections.abc import Collection
from functools import partial
from typing import Any

from realhf.base.options import HEADINGS, Common, Option

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
_LEFT_COLUMN = 34


def launcher_heading(name: str) -> str:
    """The heading of a launcher's options, which the help shows where it is chosen."""
    return f"--launcher {name}"


class Command(argparse.ArgumentParser):
    """The parser of `realhf NAME`. `takes_fields`: options that it does not know are fields of an experiment, whose
    headings come first in its help."""

    def __init__(self, name: str, *, takes_fields: bool = False) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=_LEFT_COLUMN)
        super().__init__(
            prog=f"realhf {name}", formatter_class=formatter, add_help=False, allow_abbrev=not takes_fields
        )
        self.takes_fields = takes_fields
        self._headings = {title: self.add_argument_group(title) for title in HEADINGS if takes_fields}
        self._headings["options"] = self._optionals
        self._action_groups.append(self._action_groups.pop(1))  # the options behind these headings
        self.declared: dict[argparse.Action, Option] = {}

    def add(self, flag: str, option: Option, said: str = "", **settings: Any) -> None:
        """Adds an option, with further `settings` of `argparse.ArgumentParser.add_argument`. `said`: what the help says
        of its default."""
        title = option.group or "options"
        if title not in self._headings:
            self._headings[title] = self.add_argument_group(title)
        text, choices = option.documentation, [str(choice) for choice in settings.get("choices", ())]
        if choices and len(flag) + len(",".join(choices)) > _LEFT_COLUMN - 7:
            text, settings["metavar"] = f"{text}: {', '.join(choices)}", "KIND"
        if said:
            text = f"{text[:-1]}; {said})" if text.endswith(")") else f"{text} ({said})".lstrip()
        action = self._headings[title].add_argument(flag, help=text.replace("%", "%%"), **settings)
        self.declared[action] = option

    def end_with_help(self) -> None:
        """Adds the options that show the help. The last ones, so that they stand behind what a command does."""
        self._optionals.add_argument(*HELP, action="store_true", default=argparse.SUPPRESS, help="show this help")
        if not all(isinstance(option, Common) for option in self.declared.values()):
            text = "show all options; this help has the common ones"
            self._optionals.add_argument(HELP_ALL, action="store_true", default=argparse.SUPPRESS, help=text)

    def leave_out(self, *names: str) -> None:
        """Takes arguments out of the help."""
        for action in self._actions:
            if action.dest in names:
                action.required, action.help = False, argparse.SUPPRESS

    def has(self, flag: str) -> bool:
        """Whether the command has an option of its own of this name."""
        return flag in self._option_string_actions

    def help_text(self, *, shows_all: bool, without: Collection[str] = ()) -> str:
        """The help: the common options, or all, but those under the headings `without`."""
        for action, option in self.declared.items():
            if option.group in without or not (shows_all or isinstance(option, Common)):
                action.help = argparse.SUPPRESS
        return self.format_help()

    def format_help(self) -> str:
        self._set_usage()
        return super().format_help()

    def format_usage(self) -> str:
        self._set_usage()
        return super().format_usage()

    def _set_usage(self) -> None:
        """One line: the arguments and the options that have to be given."""
        words = [
            f"{one.option_strings[0]} {one.metavar}" if one.option_strings else str(one.metavar or one.dest.upper())
            for one in self._actions
            if one.required
        ]
        self.usage = " ".join((self.prog, *words, "[options]"))
