"""The launcher's state in a file: what the health probe reads, and the qualification after it.

Standard library alone: the probe starts often.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from launch import proc
from qualify.errors import CannotRun

FILE = Path(os.environ.get("HORIZON_STATUS") or "/tmp/horizon-status.json")
LIVING = ("loading", "ready", "draining")


def write(state: str, detail: str, **facts: Any) -> None:
    """Replace the file. ``state`` is loading, ready, draining, broken or stopped; ``detail`` one sentence."""
    new = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    launcher = [os.getpid(), _started(os.getpid())]
    new.write_text(json.dumps({"state": state, "detail": detail, "launcher": launcher, **facts}) + "\n")
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
    match found.get("launcher"):
        # A process of the same number that started at another time is another process.
        case [int(pid), int(began)] if found["state"] in LIVING and pid != os.getpid() and _started(pid) == began:
            raise CannotRun(
                f"{FILE} belongs to a launch that is {found['state']} (pid {pid}): set HORIZON_STATUS to another"
            )
    try:
        write("loading", "starting")
    except OSError as error:
        raise CannotRun(f"{FILE} cannot be written: {error.strerror}; set HORIZON_STATUS") from None


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 where there is none."""
    try:
        return int(proc.stat(pid)[19])  # field 22 of the file
    except OSError:
        return -1
