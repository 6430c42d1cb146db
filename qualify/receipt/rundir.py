"""A run directory, as the stages left it: ``run.json`` and ``stages/NAME.json``, read and not believed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.errors import Rejected
from qualify.policy import STAGES
from qualify.receipt import schema
from qualify.receipt.canonical import parse, read, render


@dataclass(frozen=True, slots=True)
class Run:
    """One qualification."""

    facts: dict[str, Any]
    #: of the bytes of run.json
    sha256: str
    #: stage -> content of its file, with "file_sha256"; a stage without a file, or with another run's, has a sentence
    stages: dict[str, dict[str, Any] | str]


def load(folder: Path) -> Run:
    """Read a run directory.

    Raises ``Rejected`` for a file that is not what it should be: a malformed stage is not a stage that did not run.
    """
    raw = read(folder / "run.json", "run.json")
    facts = parse(raw, "run.json")
    if found := schema.defect(facts, "runFile"):
        raise Rejected(f"run.json: {found}")
    _identity(facts["artifact"], facts["image"])
    sha256 = hashlib.sha256(raw).hexdigest()
    return Run(facts, sha256, {name: _stage(folder / "stages" / f"{name}.json", name, sha256) for name in STAGES})


def _stage(path: Path, name: str, run_sha256: str) -> dict[str, Any] | str:
    if not path.exists():
        return "the stage has no file"
    raw = read(path, f"stages/{name}.json")
    stage = parse(raw, f"stages/{name}.json")
    if found := schema.defect(stage, "stageFile"):
        raise Rejected(f"stages/{name}.json: {found}")
    if stage["stage"] != name:
        raise Rejected(f"stages/{name}.json holds the stage {stage['stage']}")
    if stage["run_sha256"] != run_sha256:
        return "the stage's file belongs to another run"
    return {**stage, "file_sha256": hashlib.sha256(raw).hexdigest()}


def _identity(artifact: str, image: dict[str, Any]) -> None:
    """The identity must be what the image build wrote: it holds a digest of its own inputs."""
    identity = image["identity"]
    if hashlib.sha256(render(identity)).hexdigest() != image["identity_sha256"]:
        raise Rejected("run.json: image.identity is not the file that image.identity_sha256 names")
    inputs = {key: value for key, value in identity.items() if key not in ("source_sha256", "manifests")}
    if hashlib.sha256(render(inputs)).hexdigest() != identity["source_sha256"]:
        raise Rejected("run.json: image.identity does not have the digest of its own inputs, source_sha256")
    if identity["artifact"] != artifact:
        raise Rejected(f"run.json: the run is of {artifact}, its image of {identity['artifact']}")
