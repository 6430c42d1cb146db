"""One sitting of the GPU tier: which stages must run, each in a process of its own, and the server beside them.

Between ``load`` and ``cleanup`` one server runs. If any stage of that group must run, load and cleanup run with it; a
stage that does not pass leaves the later ones of the group not-run, but for cleanup, which always runs. ``--full``
starts a server once more before that, for the performance stage alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import machine, plan, recipe
from qualify import run as tiers
from qualify.checkpoint import inspection
from qualify.checkpoint.hashing import Journal
from qualify.errors import Rejected
from qualify.receipt import sanitise
from qualify.suite import facts, processes, targets
from qualify.suite.rundir import STAGE_SCHEMA, VARIABLE, RunDirectory, write_json
from qualify.suite.screen import Screen
from qualify.suite.server import Server

ORDER = tuple(tiers.TIERS["gpu"])
SERVED = ORDER[ORDER.index("load") :]
FIRST, LAST = SERVED[0], SERVED[-1]
#: variables by which a stage's process finds the launch and the checkpoint
LAUNCH, MODEL = "HORIZON_LAUNCH", "HORIZON_MODEL_DIR"
#: variable that has the number of the launch where the performance stage measures the cookbook's workload, and how many
#: launches that takes
FULL, LAUNCHES, MEASURED = "HORIZON_FULL", 2, "performance"
POLL = 0.2
#: seconds that a stage has to notice by itself that its server is gone
GRACE = 20
#: seconds that the launcher has to notice, after a stage that passed and after one that did not, that its engine is
#: gone: it looks twice a second
SETTLE = {True: 1, False: 5}


def sit(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Run what must be run and return {stage: its file}, of the wanted stages; ``args`` are those of the command.

    Raises Rejected or CannotRun before the first stage; afterwards every outcome is in a stage file.
    """
    model, out, artifact, only = args.model_dir.absolute(), Path(os.path.realpath(args.out)), args.artifact, args.only
    wanted = [name for name in ORDER if not only or name in only]
    arch = targets.get(args.target).arch
    settings = recipe.load(artifact)
    image = facts.image(artifact, facts.HOME, facts.MOUNTINFO.read_text(), environment)
    arguments = ["--model-path", str(model), "--tp-size", str(args.tp), "--ep-size", str(args.ep)]
    arguments += ["--host", "127.0.0.1"]
    planned = plan.build(settings, environment, arguments, arch)
    gpu = targets.check(args.target, machine.query(), args.tp)
    result = inspection.inspect(model, headers_only=True, revision=planned.revision)
    root = result.checkpoint.root
    if result.checkpoint.config is None:
        raise Rejected(f"--model-dir {model}: {result.findings.problems[0].message}")
    if Path(os.path.realpath(root)) in (out, *out.parents):
        raise Rejected(f"--out {out}: lies inside the checkpoint, which is never written to")
    run = RunDirectory(out)
    run.create()
    with run.lock():
        journal = Journal(run.journal)
        files = facts.manifest(result, journal)
        described = facts.run(args.target, planned, image, facts.checkpoint(result, files, journal))
        sha256 = run.begin(described)
        write_json(run.manifest, files)
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
        sitting = Sitting(
            run, sha256, gpu, [artifact, *arguments],
            {**environment, VARIABLE: str(out), MODEL: str(root), "TARGET": arch, "PYTHONPATH": os.pathsep.join(paths),
             LAUNCH: json.dumps({"artifact": artifact, "arguments": arguments, "target": arch})},
        )  # fmt: skip
        sitting.run(wanted, args.full)
        return {name: run.read(name, sha256) or sitting.blank(name, "nobody has run it") for name in wanted}


class Sitting:
    """Stages of one run on this machine's GPUs."""

    def __init__(
        self, run: RunDirectory, run_sha256: str, gpu: dict[str, Any], launch: list[str], environment: dict[str, str]
    ):
        self.directory, self.sha256, self.gpu = run, run_sha256, gpu
        self.environment = environment
        self.server = Server(run, launch, environment, gpu["count"])
        self.screen = Screen()

    def run(self, wanted: list[str], full: bool) -> None:
        """Run the wanted stages that have not passed, and what they need; ``full``: the cookbook's workload too."""
        self.environment.pop(FULL, None)
        if self._unclean():  # what that server did is not joined with the clean end of another one
            for name in SERVED:
                self.directory.stage(name).unlink(missing_ok=True)
        due = [name for name in wanted if not self._kept(name, full)]
        served = [name for name in due if name in SERVED and self._exists(name)]
        if served and self._exists(FIRST):
            served = [name for name in SERVED if name in (FIRST, LAST, *served) and self._exists(name)]
        for name in wanted:
            if name not in due and name not in served:
                self.screen.line(name, "kept", 0, "passed in an earlier sitting")
            elif name not in SERVED:
                self._stage(name)
            elif not self._exists(name):
                self._missing(name)
            elif not self._exists(FIRST):
                self._note(name, "not-run", f"there is no module of the stage {FIRST}")
        if served and self._exists(FIRST):
            if full and MEASURED in served:
                (self.directory.work / "cookbook.json").unlink(missing_ok=True)
                for launch in range(1, LAUNCHES):
                    self.environment[FULL] = str(launch)
                    self._serve([name for name in served if name in (FIRST, MEASURED, LAST)])
                    if self._unclean():
                        return
                self.environment[FULL] = str(LAUNCHES)
            self._serve(served)

    def blank(self, name: str, reason: str, result: str = "not-run") -> dict[str, Any]:
        """A stage file without any test."""
        return {
            "schema": STAGE_SCHEMA, "stage": name, "run_sha256": self.sha256, "result": result, "reason": reason,
            "tests": {"passed": [], "failed": [], "skipped": []}, "numbers": {}, "gpu": self.gpu,
            "began": _now(), "seconds": 0.0,
        }  # fmt: skip

    def _kept(self, name: str, full: bool) -> bool:
        """Passed for the same run and on the same GPU model, and could run again: a removed stage is not kept.

        Nor is a performance stage without the cookbook's workload, where that is wanted.
        """
        found = self.directory.read(name, self.sha256)
        return (
            found is not None
            and found.get("result") == "passed"
            and self._exists(name)
            and (found.get("gpu") or {}).get("name") == self.gpu["name"]
            and (name != MEASURED or not full or "cookbook" in found["numbers"])
        )

    def _unclean(self) -> bool:
        """Whether the last server left something behind, or did not end in order."""
        return (self.directory.read(LAST, self.sha256) or {}).get("result") == "failed"

    def _exists(self, name: str) -> bool:
        return tiers.module("gpu", name).exists()

    def _missing(self, name: str) -> None:
        self._note(name, "not-run", f"there is no module of the stage {name}")

    def _note(self, name: str, result: str, reason: str) -> None:
        write_json(self.directory.stage(name), self.blank(name, reason, result))
        self.screen.line(name, result, 0, reason)

    def _serve(self, names: list[str]) -> None:
        broken = ""
        # What an earlier sitting left is not the outcome of this one, should it end half-way.
        for name in names:
            self.directory.stage(name).unlink(missing_ok=True)
        try:
            self.server.start()
            for name in names:
                if name == LAST:
                    self._stage(name, watched=False)
                elif broken:
                    self._note(name, "not-run", f"{broken} did not pass")
                elif self._stage(name, watched=True) != "passed" and (name == FIRST or self.server.trouble()):
                    broken = name
        finally:
            self.server.end()

    def _stage(self, name: str, watched: bool | None = None) -> str:
        """Run one stage and write its file. ``watched``: the server must live until its end; None: there is none."""
        path = self.directory.stage(name)
        # Until it is written anew there is no result: whatever ends this process leaves not-run.
        path.unlink(missing_ok=True)
        if not self._exists(name):
            self._missing(name)
            return "not-run"
        stage = self.blank(name, "")
        began = time.monotonic()
        code, trouble = self._process(name, began, watched)
        stage["seconds"] = round(time.monotonic() - began, 1)
        stage |= self._outcome(name, code)
        if watched and (trouble := trouble or self._settled(SETTLE[stage["result"] == "passed"])):
            stage |= {"result": "failed", "reason": self._public(trouble)}
        write_json(path, stage)
        self.screen.line(name, stage["result"], stage["seconds"], stage["reason"])
        return stage["result"]

    def _process(self, name: str, began: float, watched: bool | None) -> tuple[int, str]:
        """Exit code of the stage's process, and what happened to a watched server meanwhile."""
        result, trouble, deadline = self.directory.result(name), "", None
        result.unlink(missing_ok=True)
        logs = [self.directory.log(name)] + ([self.directory.log("server")] if watched is not None else [])
        with logs[0].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-B", "-P", "-m", "qualify.suite.stage", name], env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=processes.end_with_parent,
            )  # fmt: skip
        try:
            while process.poll() is None:
                if watched is not None:
                    found = self.server.trouble()
                    if watched and found and not trouble:
                        trouble, deadline = found, time.monotonic() + GRACE
                if deadline is not None and time.monotonic() > deadline:
                    process.kill()
                self.screen.progress(name, time.monotonic() - began, logs)
                time.sleep(POLL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return process.returncode, trouble

    def _settled(self, seconds: float) -> str:
        """The trouble of a server that may be dying."""
        deadline = time.monotonic() + seconds
        while not (found := self.server.trouble()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return found

    def _outcome(self, name: str, code: int) -> dict[str, Any]:
        """Result, reason, tests and numbers of a process that has ended."""
        try:
            # NaN becomes a word: it misses every bound, and the stage's file stays JSON.
            told = json.loads(self.directory.result(name).read_text(), parse_constant=str)
        except (OSError, ValueError):
            told = {"result": "failed", "reason": f"the stage's process ended without a result ({code})",
                    "tests": {}, "numbers": {}}  # fmt: skip
        tests = {
            kind: [test for test, outcome in told["tests"].items() if outcome == kind]
            for kind in ("passed", "failed", "skipped")
        }
        reason = self._public(told["reason"])
        return {"result": told["result"], "reason": reason, "tests": tests, "numbers": told["numbers"]}

    def _public(self, text: str) -> str:
        """A reason that can stand in a receipt: also a run that ended with a traceback must be sealed as failed."""
        text = text.replace(self.environment[MODEL], "MODEL_DIR").replace(str(self.directory.path), "OUT")
        return sanitise.redact(text)[:500]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
