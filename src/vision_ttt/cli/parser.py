"""The parser of a command's arguments: how flags are spelt, and how help and refusals read."""

import argparse
import dataclasses
import functools
import itertools
import re
import textwrap
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import jsonargparse

from vision_ttt.cli.checks import check_range, shortened
from vision_ttt.errors import UserError, suggestions

# What jsonargparse says of a value: of which argument and, mostly, which value.
_REFUSED = re.compile(
    r'Parser key "(?P<name>\w+)[^"]*"(?: element \d+)?:(?:.*(?:Got|Given) value: ?(?P<value>.*))?'
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")

_DEEPEST = 100
"""Deepest nesting of lists and mappings in a value; parsers fail at depths that vary by version."""


def _nesting(token: str) -> int:
    """The most brackets of YAML that are open at once."""
    opened = itertools.accumulate((c in "{[") - (c in "}]") for c in token)
    return max(opened, default=0)


def within(default: float | None, low: float, high: float) -> Any:
    """Return a dataclass field for a number between two bounds; None passes, where accepted."""
    return dataclasses.field(default=default, metadata={"range": (low, high)})


@functools.cache  # reading the source takes more time than all else before a command begins
def descriptions(declared: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, those of its bases, too, by name."""
    return {
        each.arg_name: " ".join(each.description.split())
        for owner in reversed(declared.__mro__)
        if dataclasses.is_dataclass(owner)
        for each in docstring_parser.parse_from_object(owner).params
    }


class CommandParser(jsonargparse.ArgumentParser):
    """A parser of flags that are declared as `--some_flag` and shown as `--some-flag`.

    It accepts both spellings, and bare `--switch` for `--switch true` where that is accepted; it
    answers an unknown flag with the nearest ones.
    """

    def __init__(self, prog: str, summary: str) -> None:
        super().__init__(
            prog=prog,
            description=f"{summary[0].upper()}{summary[1:]}.",
            exit_on_error=False,
            formatter_class=_HelpFormatter,
        )
        self.long_names: dict[str, str] = {}
        """Other names of flags, e.g. --optimisation.epochs → --epochs."""
        self._ranges: dict[str, tuple[float, float]] = {}

    def add_fields(self, declared: type) -> None:
        """Declare a flag for each field of a dataclass; its docstring is the help.

        One without a default is required, and :func:`within` bounds a number.
        """
        types = get_type_hints(declared)
        for field in dataclasses.fields(declared):
            default = {"default": field.default}
            if field.default is dataclasses.MISSING:
                default = {"required": True}
            text = descriptions(declared)[field.name]
            self.add_argument(f"--{field.name}", type=types[field.name], help=text, **default)
            if "range" in field.metadata:
                self._ranges[field.name] = field.metadata["range"]

    def parse_command(
        self, argv: Sequence[str], *, defaults: bool = True
    ) -> jsonargparse.Namespace:
        """Parse `argv`; with `defaults=False` only what was given is in the answer.

        Raises:
            UserError: the arguments do not fit, in one line.
        """
        for token in argv:
            if _nesting(token) > _DEEPEST:
                raise UserError(f"a value is nested too deeply: {shortened(token)}")
        try:
            # parse_args merges defaults by default; its `defaults` cannot do so with required ones.
            arguments = self.parse_args(self._spelt_out(argv), defaults=defaults)
        except argparse.ArgumentError as error:
            raise UserError(f"{self._explained(error, argv)} (see {self.prog} --help)") from error
        check_range(arguments, **self._ranges)
        return arguments

    def format_help(self) -> str:
        """The help, every flag in it spelt with hyphens."""
        return _FLAG.sub(lambda match: _shown(match[0]), super().format_help())

    def _explained(self, error: argparse.ArgumentError, argv: Sequence[str]) -> str:
        """What the parsers say, in one line, with our names of flags and types."""
        text = " ".join(str(error).split())
        for flag, value in itertools.pairwise(argv):
            # A word behind a switch is its value only where no positional argument takes it.
            action = self._option_string_actions.get(self._declared(flag))
            unread = f"{text} ".startswith(f"unrecognized arguments: {value} ")
            if unread and _is_switch(action, value):
                return f"{_called(action)} is {value!r}; it must be {_words(action._typehint)}"
        refused = _REFUSED.match(text)
        if refused is not None:
            action = next(each for each in self._actions if each.dest == refused["name"])
            value = refused["value"]
            if value is None:  # Python reads no integer of thousands of digits
                received = "is too long" if "digits" in text else "is not accepted"
            else:
                received = f"is {value!r}"
            text = f"{_called(action)} {received}; it must be {_words(action._typehint)}"
        missing, colon, names = text.partition("are required: ")
        if colon:
            by_name = {action.dest: _called(action) for action in self._actions}
            names = ", ".join(by_name.get(name, name) for name in names.split(", "))
        return _FLAG.sub(lambda match: _shown(match[0]), missing + colon + names)

    def _declared(self, name: str) -> str:
        """A flag by the name that it is declared by, and a key of its mapping, if it has one."""
        for long, short in self.long_names.items():
            if _shown(name) == _shown(long) or _shown(name).startswith(f"{_shown(long)}."):
                name = short + name[len(long) :]
                break
        top, dot, key = name.partition(".")
        alike = (flag for flag in self._option_string_actions if _shown(flag) == _shown(top))
        return next(alike, top) + dot + key

    def _spelt_out(self, argv: Sequence[str]) -> list[str]:
        flags = self._option_string_actions
        spelt = []
        for position, token in enumerate(argv):
            if not token.startswith("--") or token == "--":
                spelt.append(token)
                continue
            name, equals, value = token.partition("=")
            top, dot, key = self._declared(name).partition(".")
            if top not in flags or (dot and (not key or not _is_mapping(flags[top]))):
                named = name[2:].replace("-", "_")
                if any(named == each.dest for each in self._actions if not each.option_strings):
                    raise UserError(
                        f"unknown flag {name}; give the {named} without it (see {self.prog} --help)"
                    )
                known = [_shown(flag) for flag in flags if flag.startswith("--")]
                # A flag with a section is nearest to those of its own name.
                own = f"--{key}" if dot and top not in flags else top
                raise UserError(
                    f"unknown flag {name}; {suggestions(_shown(own), known)}"
                    f" (see {self.prog} --help)"
                )
            spelt.append(top + dot + key + equals + value)
            follower = argv[position + 1] if position + 1 < len(argv) else "--"
            if not equals and _is_switch(flags[top], follower):
                spelt.append("true")
        return spelt


class _HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Keeps the paragraphs of a description or epilog apart, and indented lines and names whole."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(
            part if part.startswith(" ") or "\n " in part else fill(part, width, indent)
            for part in text.split("\n\n")
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _shown(flag: str) -> str:
    return flag.replace("_", "-")


def _called(action: argparse.Action) -> str:
    """An argument as its user calls it: --flag or name."""
    # A flag for a list has a second name, with a plus, to append to it.
    names = [name for name in action.option_strings if not name.endswith("+")]
    return _shown(names[-1]) if names else action.dest


def _is_mapping(action: argparse.Action) -> bool:
    return get_origin(getattr(action, "_typehint", None)) is dict


def _is_switch(action: argparse.Action, follower: str) -> bool:
    """Whether a flag stands for `--flag true`, by what follows it."""
    kind = getattr(action, "_typehint", None)
    accepted = ("true", "false") if kind is bool else get_args(kind)
    return "true" in accepted and follower.lower() not in accepted


def _words(kind: Any) -> str:
    """What a type accepts, for a sentence."""
    accepted = get_args(kind)
    if get_origin(kind) is Literal:
        return ("one of " if len(accepted) > 1 else "") + ", ".join(map(str, accepted))
    if get_origin(kind) is dict:
        return "names with values, such as --arguments.depth 2"
    if get_origin(kind) is list:
        return f"a list in brackets, each item {_words(*accepted)}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(each) for each in accepted)
    plain = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    return plain.get(kind, "text")
