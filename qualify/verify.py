"""``verify-checkpoint DIR``: the full SHA-256 of every file against the catalogue.

Parallel, with progress, resumable.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from qualify import catalogue
from qualify.checkpoint import files, report
from qualify.checkpoint.hashing import Journal, digests, progress
from qualify.checkpoint.problems import Findings, show
from qualify.errors import CannotRun, Rejected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="directory of the checkpoint")
    parser.add_argument("--repository", metavar="R", help="the catalogue entry to compare with (default: by config)")
    parser.add_argument("--recipes", metavar="DIR", help="another directory of artifact files")
    parser.add_argument("--workers", type=int, metavar="N", help="files read at once (default: one a CPU)")
    parser.add_argument("--fresh", action="store_true", help="read every byte again, whatever an earlier run found")
    parser.add_argument("--json", action="store_true", help="the same facts for a machine")


def run(args: argparse.Namespace) -> int:
    """Print the outcome; 0 every catalogued file is there and right, 1 not so, 2 cannot run."""
    try:
        findings, entry, outcome = _outcome(args)
    except KeyboardInterrupt:
        raise CannotRun("interrupted; run it again and it goes on with the files that are left") from None
    except (CannotRun, Rejected) as error:
        if args.json:
            verdict = "cannot-run" if isinstance(error, CannotRun) else "rejected"
            print(json.dumps({"verdict": verdict, "reason": str(error), "problems": []}, indent=1))
        raise
    if args.json:
        print(json.dumps(outcome, indent=1))
    else:
        print(f"{outcome['verdict'].upper()}  {entry.repository} {entry.revision[:12]}  {outcome['summary']}")
        if findings.problems:
            print("\n".join(report.grouped(findings.problems)))
    return 0 if outcome["verdict"] == "accepted" else 1


def _outcome(args: argparse.Namespace) -> tuple[Findings, catalogue.Entry, dict[str, Any]]:
    if args.workers is not None and args.workers < 1:
        raise Rejected("--workers must be at least 1")
    findings = Findings()
    try:
        checkpoint = files.open_checkpoint(args.directory, findings)
    except OSError as error:
        raise CannotRun(f"cannot read {show(str(error.filename))}: {error.strerror}") from None
    artifacts = catalogue.load(Path(args.recipes) if args.recipes else None)
    entry = _entry(checkpoint, artifacts, args.repository)
    if entry is None or not entry.files:
        what = args.repository or "a checkpoint with this config"
        entries = [entry for artifact in artifacts.values() for entry in catalogue.unpinned(artifact)]
        unpinned = ", ".join(entry.repository for entry in entries if entry.repository)
        raise Rejected(
            f"the catalogue has no digests for {show(what)} (unpinned: {unpinned}); name the entry with "
            "--repository, or run pin and have the proposal reviewed"
        )
    journal = Journal(None if args.fresh else journal_path(checkpoint.root))
    return findings, entry, verify(checkpoint, entry, findings, journal, args.workers)


def verify(
    checkpoint: files.Checkpoint,
    entry: catalogue.Entry,
    findings: Findings,
    journal: Journal,
    workers: int | None,
) -> dict[str, Any]:
    """Hash all files and compare.

    Files that the catalogue lists must be there and equal; weights must be listed.
    """
    listed = {file.name: file for file in entry.files}
    for name in sorted(set(listed) - set(checkpoint.files)):
        findings.problem("file-missing", name, f"{show(name)} is in the catalogue and not in the directory")
    for name in sorted(set(checkpoint.files) - set(listed)):
        # An unknown README serves nothing; an unknown weight, declaration, tokenizer, template or program would.
        # An entry without the weights' digests says nothing against them.
        if entry.pinned and (files.role(name) != "other" or name == files.HF_QUANT):
            findings.problem("file-uncatalogued", name, f"{show(name)} is not in the catalogue, and engines read it")
    if not entry.pinned:
        findings.problem(
            "catalogue-incomplete",
            entry.repository,
            f"the catalogue cannot prove {entry.repository}: {entry.unpinned}",
        )
    paths = {name: checkpoint.files[name][0] for name in listed if name in checkpoint.files}
    began = time.monotonic()
    try:
        found = digests(paths, journal, progress(), workers)
    except OSError as error:
        raise CannotRun(f"cannot read {show(str(error.filename))}: {error.strerror}") from None
    for name, digest in sorted(found.items()):
        if digest != listed[name].sha256:
            findings.problem(
                "file-digest",
                name,
                f"{show(name)} has SHA-256 {digest}; the catalogue has {listed[name].sha256}",
            )
    size = sum(checkpoint.files[name][1] for name in paths)
    return {
        "verdict": "rejected" if findings.problems else "accepted",
        "repository": entry.repository,
        "revision": entry.revision,
        "files": len(paths),
        "bytes": size,
        "seconds": round(time.monotonic() - began, 3),
        "summary": f"{len(paths)} files, {size / 1e9:.2f} GB, {time.monotonic() - began:.1f} s",
        "problems": [problem.as_dict() for problem in findings.problems],
    }


def _entry(
    checkpoint: files.Checkpoint, artifacts: dict[str, catalogue.Artifact], repository: str | None
) -> catalogue.Entry | None:
    digest = hashlib.sha256(checkpoint.config_raw).hexdigest() if checkpoint.config_raw is not None else None
    entries = [entry for artifact in artifacts.values() for entry in artifact.checkpoints]
    if repository is not None:
        entries = [entry for entry in entries if entry.repository == repository]
        if not entries:
            raise Rejected(f"the catalogue has no repository {show(repository)}")
    else:
        entries = [entry for entry in entries if digest is not None and entry.digest("config") == digest]
    # Of several epochs of one repository the latest reviewed one counts.
    return max(entries, key=lambda entry: (entry.pinned, entry.source_epoch), default=None)


def journal_path(root: Path) -> Path:
    """Where digests of the checkpoint at ``root`` are remembered: the user's cache, never the checkpoint."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(str(root).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return Path(base) / "horizon-images" / "verify" / f"{name}.json"
