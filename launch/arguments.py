"""Reads arguments meant for the engine, more strictly than the engine does.

The engine accepts abbreviations, takes the last of two contradicting values, and merges a config file; here
each of these is an error, and so is remote code however it is spelled.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from launch import refused
from launch.engine_flags import Flag, table
from qualify.errors import Rejected

REMOTE_CODE = "trustremotecode"
_OFF = ("", "0", "false", "no", "off")


def letters(text: str) -> str:
    """Text without case and separators: every spelling of a name is one."""
    return "".join(character for character in text.lower() if character.isalnum())


def refuse_remote_code(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise Rejected where an argument or variable asks for code from the checkpoint."""
    for argument in arguments:
        name = letters(argument.split("=")[0])
        if REMOTE_CODE in letters(argument) or (
            argument.startswith("-") and len(name) > 3 and REMOTE_CODE.startswith(name)
        ):
            raise Rejected(f"{argument}: code from a checkpoint is never run; leave it out")
    for name, value in environment.items():
        if REMOTE_CODE in letters(name) and value.strip().lower() not in _OFF:
            raise Rejected(f"environment {name}={value}: code from a checkpoint is never run; unset it")


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Return {name of the flag: typed value} in order of appearance.

    Raises Rejected for an unknown or abbreviated flag, a positional word, a missing, surplus or mistyped value, and
    one flag with two different values.
    """
    found: dict[str, Any] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("--") or word == "--":
            raise Rejected(f"{word!r} is no flag of the engine: flags start with --, the model directory is MODEL_DIR")
        spelling, glued, attached = word.partition("=")
        flag = lookup(spelling)
        values = [attached] if glued else []
        if flag.arity in ("one", "optional") and not glued:
            if position < len(arguments) and not arguments[position].startswith("--"):
                values = [arguments[position]]
                position += 1
        elif flag.arity in ("some", "any") and not glued:
            while position < len(arguments) and not arguments[position].startswith("--"):
                values.append(arguments[position])
                position += 1
        value = _typed(flag, spelling, values)
        if flag.name in found and found[flag.name] != value:
            raise Rejected(f"{flag.name} is given twice with different values; give it once")
        found[flag.name] = value
    return found


def lookup(spelling: str) -> Flag:
    """The flag of exactly this spelling. Raises Rejected, naming what may have been meant."""
    flags = table()
    if spelling not in flags:
        begins = sorted(name for name in flags if name.startswith(spelling))
        near = begins or difflib.get_close_matches(spelling, flags, n=3)
        meant = f"; did you mean {' or '.join(near[:3])}?" if near else ""
        raise Rejected(f"{spelling} is no flag of the engine (abbreviations are not taken){meant}")
    flag = flags[spelling]
    if reason := refused.flag(flag.name):
        raise Rejected(f"{spelling}: {reason}")
    return flag


def _typed(flag: Flag, spelling: str, values: list[str]) -> Any:
    """The value of one occurrence."""
    if flag.arity == "none":
        if values:
            raise Rejected(f"{spelling} takes no value")
        return not spelling.startswith("--no-")
    if not values:
        if flag.arity in ("one", "some"):
            raise Rejected(f"{spelling} needs a value")
        return None if flag.arity == "optional" else []
    typed = [flag.value(value) for value in values]
    return typed if flag.arity in ("some", "any") else typed[0]
