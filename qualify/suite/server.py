"""The server under test: the artifact's launcher as a child of the sitting, from the load stage to the cleanup stage.

The stages run in processes of their own and find it by the files of the run directory: ``work/server.json`` (what was
started), ``work/status.json`` (the launcher's own) and ``work/exit.json`` (how it ended, which only its parent can
know).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import machine
from qualify.suite import load_report, processes
from qualify.suite.rundir import RunDirectory, write_json

COMMAND = [sys.executable, "-P", "-m", "launch"]
#: folder in which the engine records its modules when the numerics stage asks it to (``qualify.numerics``)
MODULE_OUTPUTS = "HORIZON_MODULE_OUTPUTS"
#: seconds for the launcher to end by itself when the sitting is broken off; it kills its engine before it ends
GRACE = 20


def used(count: int) -> list[int]:
    """Bytes in use on each of the first ``count`` GPUs, whoever uses them. Raises CannotRun."""
    return [gpu.total - gpu.free for gpu in machine.query().gpus[:count]]


class Server:
    """One launch. :meth:`poll` must be called now and then: it writes ``work/exit.json``."""

    def __init__(self, run: RunDirectory, arguments: list[str], environment: Mapping[str, str], gpus: int):
        self.run, self.arguments, self.environment, self.gpus = run, arguments, environment, gpus
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the launcher. Descendants that outlive their parents become ours."""
        run = self.run
        told = {load_report.VARIABLE: run.load_reports, MODULE_OUTPUTS: run.module_outputs}
        for folder in told.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        told["HORIZON_STATUS"] = run.status
        for path in (run.server, run.status, run.exit):
            path.unlink(missing_ok=True)
        processes.become_subreaper()
        before = used(self.gpus)
        with run.log("server").open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches the sitting alone, which stops it in order.
                start_new_session=True, preexec_fn=processes.end_with_parent,
                env=self.environment | {name: str(path) for name, path in told.items()},
            )  # fmt: skip
        write_json(run.server, {"pid": self.process.pid, "began": time.time(), "gpu_bytes_before": before})

    def status(self) -> dict[str, Any]:
        """The launcher's last word, empty where there is none."""
        try:
            return json.loads(self.run.status.read_text())
        except (OSError, ValueError):
            return {}

    def poll(self) -> int | None:
        """The launcher's exit code, None while it runs."""
        code = self.process.poll()
        if code is not None and not self.run.exit.exists():
            write_json(self.run.exit, {"code": code})
        return code

    def trouble(self) -> str:
        """One sentence where it has ended or is broken, else empty."""
        code, status = self.poll(), self.status()
        if code is None and status.get("state") != "broken":
            return ""
        if status.get("state") == "broken":
            return f"the server broke: {status['detail']}"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the launcher ended {how}: {last_line(self.run.log('server')) or 'it said nothing'}"

    def end(self) -> None:
        """Whatever has happened: nothing of it runs when this returns. In order where it can."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        processes.kill(os.getpid())
        self.process.wait()


def last_line(path: Path, size: int = 4096) -> str:
    """The last non-empty line of a log, progress bars included; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = text.replace("\r", "\n").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
