"""The engine's command-line flags, as data: what `engine_flags.json` holds and how it is made.

A plan is checked against this table, so that a wrong flag is refused in milliseconds and on machines without the
engine. Inside the image, `python3 -m launch.engine_flags` writes the table anew; tests/engine compares the two.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun, Rejected

TABLE = Path(__file__).with_name("engine_flags.json")

#: argparse's ``nargs`` -> how many values a flag takes
ARITY = {None: "one", 0: "none", "?": "optional", "+": "some", "*": "any"}
#: argparse types that read JSON
JSON = ("loads", "json_list_type")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\Z")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: its spellings, the field of ``/server_info`` that it sets, and what it takes."""

    spellings: tuple[str, ...]
    field: str
    arity: str
    type: str
    choices: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """The first spelling: the one that plans and messages use."""
        return self.spellings[0]

    def value(self, text: str) -> Any:
        """The typed value of one argument. Raises Rejected with the flag's name."""
        number = self.type in ("int", "human_readable_int", "float") and _NUMBER.match(text)
        if not text or (text.startswith("-") and not number):
            # The engine reads its arguments again, and would take such a value for a flag.
            raise Rejected(f"{self.name} {text!r}: a value is not empty and does not begin with a dash")
        if self.choices is not None and text not in self.choices:
            raise Rejected(f"{self.name} {text}: must be one of {', '.join(self.choices)}")
        if self.type in ("int", "human_readable_int", "float"):
            if not number:
                raise Rejected(f"{self.name} {text}: must be a number")
            value = float(text)
            if not math.isfinite(value):
                raise Rejected(f"{self.name} {text}: must be a finite number")
            if self.type == "float":
                return value
            if not value.is_integer():
                raise Rejected(f"{self.name} {text}: must be a whole number")
            return int(value)
        if self.type in JSON:
            try:
                return json.loads(text)
            except ValueError:
                raise Rejected(f"{self.name} {text}: must be JSON") from None
        return text


@cache
def table() -> dict[str, Flag]:
    """Every spelling and its flag. Raises CannotRun where the table is missing."""
    try:
        rows = json.loads(TABLE.read_text())
    except (OSError, ValueError) as error:
        raise CannotRun(f"launch/{TABLE.name} is unusable: {error}; run from a complete checkout or image") from None
    flags = {}
    for row in rows:
        choices = row.get("choices")
        flag = Flag(tuple(row["flags"]), row["field"], row["takes"], row["type"], choices and tuple(choices))
        flags.update(dict.fromkeys(flag.spellings, flag))
    return flags


def generate() -> str:
    """The table of the installed engine as JSON, one flag a line. Needs the engine's Python environment."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    rows = []
    for action in parser._actions:
        row = {
            "flags": action.option_strings,
            "field": action.dest,
            "takes": ARITY[action.nargs],
            "type": getattr(action.type, "__name__", "str"),
        }
        if action.choices is not None:
            row["choices"] = sorted(str(choice) for choice in action.choices)
        rows.append(json.dumps(row))
    return "[\n" + ",\n".join(rows) + "\n]\n"


if __name__ == "__main__":
    sys.stdout.write(generate())
