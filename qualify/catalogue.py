"""The catalogue of checkpoints: what ``recipes/<artifact>.toml`` says of each published revision.

An entry is *pinned* when config, index and every weight file have a SHA-256; *recognised* (enough for
``preflight``) when config and headers have one; otherwise *unpinned*, and its ``unpinned`` sentence says why.
Nothing is invented: an entry without digests matches nothing.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ROLES = ("weights", "index", "config", "tokenizer", "template", "generation", "code", "other")
_SHA256 = re.compile(r"^[0-9a-f]{64}\Z")
_REVISION = re.compile(r"^[0-9a-f]{40}\Z")
_EPOCH = re.compile(r"^\d{4}-\d{2}-\d{2}\Z")


@dataclass(frozen=True, slots=True)
class File:
    """One file of a pinned checkpoint."""

    role: str
    name: str
    sha256: str
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One published revision. Empty strings stand for what is not known."""

    artifact: str
    name: str
    repository: str
    revision: str = ""
    source_epoch: str = ""
    reviewed_by: str = ""
    unpinned: str = ""
    headers_sha256: str = ""
    files: tuple[File, ...] = ()
    #: (TP, EP) pairs that the artifact lists for it
    topologies: tuple[tuple[int, int], ...] = ()

    def digest(self, role: str) -> str | None:
        """SHA-256 of the one file with ``role``, or None."""
        return next((file.sha256 for file in self.files if file.role == role), None)

    @property
    def pinned(self) -> bool:
        """True when ``verify-checkpoint`` can prove every byte that is served."""
        roles = [file.role for file in self.files]
        weights = roles.count("weights")
        return bool(
            self.reviewed_by and self.revision and "config" in roles and weights and (weights == 1 or "index" in roles)
        )

    @property
    def recognised(self) -> bool:
        """True when typed metadata alone identifies it: config and all headers are known."""
        return bool(self.reviewed_by and self.digest("config") and self.headers_sha256)


@dataclass(frozen=True, slots=True)
class Artifact:
    """The checkpoint part of one artifact file."""

    name: str
    formats: tuple[str, ...]
    #: architecture (sm90) -> status
    targets: dict[str, str]
    checkpoints: tuple[Entry, ...] = field(default=())


def load(recipes: Path | None = None, fixtures: bool = False) -> dict[str, Artifact]:
    """Read every ``recipes/*.toml``. Only tests set ``fixtures``: an entry with ``fixture = true`` was never published.

    Raises ``CannotRun`` when one is unusable: our file is wrong, not the input.
    """
    folder = recipes or RECIPES
    found = sorted(folder.glob("*.toml"))
    if not found:
        raise CannotRun(f"no artifact files in {folder.name}/: run from a complete checkout")
    artifacts = {}
    for path in found:
        try:
            with path.open("rb") as file:
                artifact = _artifact(tomllib.load(file), fixtures)
        except (OSError, tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CannotRun(f"{folder.name}/{path.name} is not a usable artifact file: {error}") from None
        if artifact.name != path.stem:
            raise CannotRun(f"{folder.name}/{path.name} describes the artifact {artifact.name!r}")
        artifacts[artifact.name] = artifact
    return artifacts


def _artifact(raw: dict[str, Any], fixtures: bool) -> Artifact:
    name = raw["artifact"]
    return Artifact(
        name,
        tuple(raw["formats"]),
        {arch: target["status"] for arch, target in raw.get("targets", {}).items()},
        tuple(_entry(name, entry, fixtures) for entry in raw.get("checkpoints", ())),
    )


def _entry(artifact: str, raw: dict[str, Any], fixtures: bool) -> Entry:
    if raw.get("fixture", False) is not False and not fixtures:
        raise ValueError(f"checkpoint {raw['name']!r} is a fixture of the tests: no command takes it")
    files = tuple(File(file["role"], file["name"], file["sha256"], file.get("bytes")) for file in raw.get("files", ()))
    entry = Entry(
        artifact,
        raw["name"],
        raw["repository"],
        raw.get("revision", ""),
        raw.get("source_epoch", ""),
        raw.get("reviewed_by", ""),
        raw.get("unpinned", ""),
        raw.get("headers_sha256", ""),
        files,
        tuple((tp, ep) for tp, ep in raw.get("topologies", ())),
    )
    where = f"checkpoint {entry.name!r}"
    for file in files:
        if not _SHA256.match(file.sha256) or file.role not in ROLES or "/" in file.name:
            raise ValueError(f"{where}: bad file entry {file.name!r}")
    if len({file.name for file in files}) != len(files):
        raise ValueError(f"{where}: a file is listed twice")
    if entry.revision and not _REVISION.match(entry.revision):
        raise ValueError(f"{where}: the revision is not 40 hex digits")
    if entry.source_epoch and not _EPOCH.match(entry.source_epoch):
        raise ValueError(f"{where}: the source epoch is not a date")
    if entry.headers_sha256 and not _SHA256.match(entry.headers_sha256):
        raise ValueError(f"{where}: headers_sha256 is not a SHA-256")
    if files and not entry.reviewed_by:
        raise ValueError(f"{where}: reviewed_by is empty; a proposal counts once somebody has reviewed it")
    if not entry.pinned and not entry.unpinned:
        raise ValueError(f"{where}: it is not pinned and does not say why")
    if entry.pinned and entry.unpinned:
        raise ValueError(f"{where}: it is pinned and says it is not")
    return entry


def lookup(artifacts: dict[str, Artifact], identity: dict[str, Any], synthetic: bool = False) -> dict[str, Any]:
    """What the catalogue says of an identity (as ``Inspection.identity`` returns it).

    ``status`` is ``catalogued`` (config, headers and index, as far as they are recorded, are those of one
    entry),
    ``config-only`` (the config is, and headers are not recorded or differ) or ``unknown``.
    """
    if synthetic:
        return {"status": "synthetic", "reason": "a synthetic checkpoint is none of the catalogued ones"}
    nearest: dict[str, Any] = {"status": "unknown", "reason": "no catalogued checkpoint has this config"}
    for artifact in artifacts.values():
        for entry in artifact.checkpoints:
            config = entry.digest("config")
            if config is None or config != identity["config"]:
                continue
            result = {
                "status": "config-only",
                "artifact": entry.artifact,
                "name": entry.name,
                "repository": entry.repository,
                "revision": entry.revision,
                "source_epoch": entry.source_epoch,
                "pinned": entry.pinned,
                "topologies": [list(pair) for pair in entry.topologies],
            }
            index = entry.digest("index")
            if not entry.headers_sha256:
                result["reason"] = (
                    f"the config is that of {entry.repository}; {entry.unpinned or 'no headers recorded'}"
                )
            elif entry.headers_sha256 != identity["headers"]:
                result["reason"] = f"the config is that of {entry.repository}; the shard headers are not"
            elif index is not None and index != identity["index"]:
                result["reason"] = f"config and headers are those of {entry.repository}; the index is not"
            elif not entry.reviewed_by:
                result["reason"] = f"the entry of {entry.repository} has not been reviewed"
            else:
                result["status"] = "catalogued"
                result["reason"] = f"config and headers are those of {entry.repository} at {entry.revision[:12]}" + (
                    "" if entry.pinned else f"; {entry.unpinned}"
                )
                return result
            nearest = result
    return nearest


def unpinned(artifact: Artifact) -> list[Entry]:
    """Entries that cannot be qualified yet."""
    return [entry for entry in artifact.checkpoints if not entry.pinned]
