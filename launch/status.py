"""The launcher's state in a file: what the health probe reads, and the qualification after it.

Standard library alone: the probe starts often.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun

FILE = Path(os.environ.get("HORIZON_STATUS") or "/tmp/horizon-status.json")
LIVING = ("loading", "ready", "draining")


def write(state: str, detail: str, **facts: Any) -> None:
    """Replace the file. ``state`` is loading, ready, draining, broken or stopped; ``detail`` one sentence."""
    new = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    new.write_text(json.dumps({"state": state, "detail": detail, "launcher": os.getpid(), **facts}) + "\n")
    new.replace(FILE)


def read() -> dict[str, Any]:
    """The last state; ``broken`` where there is none."""
    try:
        found = json.loads(FILE.read_text())
        found["state"], found["detail"]
    except FileNotFoundError:
        return {"state": "broken", "detail": "no server has been launched here"}
    except (OSError, ValueError, TypeError, KeyError) as error:
        return {"state": "broken", "detail": f"{FILE} cannot be read: {error}"}
    return found


def claim() -> None:
    """Take the file for this process.

    Raises CannotRun where it cannot be written, or belongs to a launch that is still there.
    """
    found = read()
    owner = found.get("launcher", os.getpid())
    if found["state"] in LIVING and owner != os.getpid() and Path(f"/proc/{owner}").exists():
        raise CannotRun(
            f"{FILE} belongs to a launch that is {found['state']} (pid {owner}): set HORIZON_STATUS to another"
        )
    try:
        write("loading", "starting")
    except OSError as error:
        raise CannotRun(f"{FILE} cannot be written: {error.strerror}; set HORIZON_STATUS") from None
