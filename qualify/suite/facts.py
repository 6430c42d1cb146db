"""What run.json says: the image, the checkpoint with its full manifest, the plan, and who declared what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.plan import Plan
from qualify import catalogue, verify
from qualify.checkpoint import inspection
from qualify.checkpoint.hashing import Journal, digests, progress
from qualify.checkpoint.problems import Findings
from qualify.errors import CannotRun, Rejected
from qualify.suite.rundir import RUN_SCHEMA

#: Where the image keeps what is its own.
HOME = Path("/opt/horizon")
POLICY = Path(__file__).resolve().parents[1] / "policy.toml"
MOUNTINFO = Path("/proc/self/mountinfo")
#: Variables by which libraries come from elsewhere than from the image.
LIBRARIES = ("LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
#: Flags that say where this machine keeps and serves things, and nothing of how.
PLACES = ("--model-path", "--host", "--port", "--served-model-name")


def image(artifact: str, home: Path, mountinfo: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """The image that this runs in. Raises CannotRun outside an image, Rejected in another artifact's."""
    try:
        raw = (home / "identity.json").read_bytes()
    except OSError:
        raise CannotRun("`qualify run --tier gpu` works inside an image of this project: no identity here") from None
    identity = json.loads(raw)
    if identity["artifact"] != artifact:
        raise Rejected(f"--artifact {artifact}: this is the image of {identity['artifact']}")
    return {
        "identity": identity,
        "identity_sha256": hashlib.sha256(raw).hexdigest(),
        "substituted_libraries": substituted(home, mountinfo, variables),
    }


def substituted(home: Path, mountinfo: str, variables: Mapping[str, str]) -> list[str]:
    """Folders and files below ``home`` that something else is mounted over, relative to it; variables of LIBRARIES."""
    points = {line.split()[4] for line in mountinfo.splitlines() if len(line.split()) > 5}
    mounted = sorted(point[len(str(home)) + 1 :] for point in points if point.startswith(f"{home}/"))
    return mounted + [name for name in LIBRARIES if variables.get(name)]


def manifest(result: inspection.Inspection, journal: Journal) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of every file of a checkpoint directory, by name."""
    files = result.checkpoint.files
    try:
        found = digests({name: path for name, (path, _) in files.items()}, journal, progress())
    except OSError as error:
        raise CannotRun(f"cannot read {error.filename}: {error.strerror}") from None
    return [{"name": name, "size": files[name][1], "sha256": found[name]} for name in sorted(files)]


def manifest_sha256(files: list[dict[str, Any]]) -> str:
    """The digest of a manifest: of its JSON, files by name, keys sorted, no spaces."""
    ordered = sorted(files, key=lambda file: file["name"])
    return hashlib.sha256(json.dumps(ordered, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checkpoint(result: inspection.Inspection, files: list[dict[str, Any]], journal: Journal) -> dict[str, Any]:
    """The checkpoint; ``published`` only where `verify-checkpoint` would accept every file of it."""
    facts, artifacts = result.as_dict(), catalogue.load()
    known = catalogue.lookup(artifacts, facts["identity"], result.synthetic)
    entry = None
    if known["status"] == "catalogued" and known["pinned"]:
        entries = artifacts[known["artifact"]].checkpoints
        entry = next(item for item in entries if (item.name, item.revision) == (known["name"], known["revision"]))
        if verify.verify(result.checkpoint, entry, Findings(), journal, None)["verdict"] != "accepted":
            entry = None
    return {
        "repository": entry.repository if entry else None,
        "revision": entry.revision if entry else None,
        "source_epoch": entry.source_epoch if entry else None,
        "scope": "synthetic" if result.synthetic else "published" if entry else "uncatalogued",
        "format": facts["format"],
        "identity": facts["identity"],
        "manifest_sha256": manifest_sha256(files),
        "bytes": facts["bytes"],
        "tensors": facts["tensors"],
    }


def run(target: str, planned: Plan, image: dict[str, Any], checkpoint: dict[str, Any]) -> dict[str, Any]:
    """All of run.json."""
    return {
        "schema": RUN_SCHEMA,
        "artifact": planned.artifact,
        "target": planned.target,
        "target_name": target,
        "topology": {
            "tp": planned.tp,
            "ep": planned.ep,
            "pp": planned.value("--pp-size", 1),
            "dp": planned.value("--dp-size", 1),
            "a2a": planned.value("--moe-a2a-backend", "none"),
        },
        "image": image,
        "checkpoint": checkpoint,
        "declared": planned.declared,
        "flags": {name: choice.value for name, choice in planned.choices.items() if name not in PLACES},
        "policy_sha256": hashlib.sha256(POLICY.read_bytes()).hexdigest() if POLICY.is_file() else None,
    }
