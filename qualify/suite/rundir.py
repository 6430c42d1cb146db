"""The run directory: what is qualified, a file a stage, and the logs. Files are written whole or not at all.

run.json            written once; every later sitting must be of the same image, checkpoint, topology and flags
manifest.json       the checkpoint's files, with size and SHA-256
stages/NAME.json    result, tests, numbers, GPU and time of one stage
logs/NAME.log       its output; logs/server.log that of the server (machine paths may stand in logs)
work/               scratch: digests already computed, the server's status, load reports
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qualify.errors import CannotRun, Rejected

RUN_SCHEMA = "horizon-images/run/v1"
STAGE_SCHEMA = "horizon-images/stage/v1"
#: Where a stage's process finds the run directory.
VARIABLE = "HORIZON_RUN"


def write_json(path: Path, value: Any) -> bytes:
    """Write to a temporary name and rename; returns the bytes."""
    raw = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(raw)
    new.replace(path)
    return raw


class RunDirectory:
    """Paths below OUT. Nothing is created before :meth:`create`."""

    def __init__(self, path: Path):
        self.path = path
        self.run, self.manifest, self.work = path / "run.json", path / "manifest.json", path / "work"
        self.journal = self.work / "digests.json"
        self.server, self.status, self.exit = (self.work / f"{name}.json" for name in ("server", "status", "exit"))
        self.load_reports, self.module_outputs = self.work / "load", self.work / "modules"

    def create(self) -> None:
        """Raises CannotRun where it cannot be written."""
        try:
            for name in ("stages", "logs", "work"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotRun(f"--out {self.path}: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise CannotRun(f"--out {self.path} is not writable for uid {os.getuid()}, gid {os.getgid()}")

    def lock(self) -> IO[str]:
        """Hold the directory while the returned file is open. Raises CannotRun where another sitting holds it."""
        file = (self.work / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise CannotRun(f"--out {self.path}: another sitting is at work there") from None
        return file

    def stage(self, name: str) -> Path:
        return self.path / "stages" / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def result(self, name: str) -> Path:
        """What a stage's process says of itself."""
        return self.work / f"stage-{name}.json"

    def begin(self, facts: dict[str, Any]) -> str:
        """Write run.json, or compare with the one that is there; returns the SHA-256 of its bytes.

        Raises Rejected where the directory holds a run of something else.
        """
        facts = json.loads(json.dumps(facts))
        try:
            raw = self.run.read_bytes()
            there = json.loads(raw)
        except FileNotFoundError:
            raw, there = write_json(self.run, facts), facts
        except (OSError, ValueError):
            raise Rejected(f"{self.run} is no run of this suite: give another --out") from None
        if there != facts:
            first = next(differences(there, facts))
            raise Rejected(f"{self.path} holds a run of something else ({first}): give another --out")
        return hashlib.sha256(raw).hexdigest()

    def read(self, name: str, run_sha256: str) -> dict[str, Any] | None:
        """The stage file, where there is one of this run."""
        try:
            found = json.loads(self.stage(name).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("run_sha256") == run_sha256 else None


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """One phrase for each value in which two JSON documents differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif old != new:
        yield f"{place}: {json.dumps(old)[:80]} there, {json.dumps(new)[:80]} here"
