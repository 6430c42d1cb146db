"""``pin DIR``: write a proposal for the catalogue under a new epoch.

Only a reviewed edit of recipes/ accepts it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path

from qualify import catalogue
from qualify.checkpoint import files, inspection
from qualify.checkpoint.hashing import Journal, digests, progress
from qualify.checkpoint.problems import show
from qualify.errors import CannotRun, Rejected
from qualify.verify import journal_path

_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_TAKEN = "{} is there already: pin overwrites nothing; name another file with --output"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="directory of the published files")
    parser.add_argument(
        "--repository", metavar="OWNER/NAME", help="where they come from (default: the hub cache's name)"
    )
    parser.add_argument("--revision", metavar="SHA", help="their commit, 40 hex digits (default: the hub cache's)")
    parser.add_argument("--epoch", metavar="YYYY-MM-DD", help="the new source epoch (default: today, UTC)")
    parser.add_argument("--output", metavar="FILE", help="the proposal (default: build/pins/<name>-<epoch>.toml)")


def run(args: argparse.Namespace) -> int:
    """Inspect, hash everything, write the proposal; 0 written, 1 rejected, 2 cannot run."""
    result = inspection.inspect(args.directory)
    if result.verdict != "accepted":
        first = result.findings.problems[0]
        raise Rejected(
            f"a checkpoint with {len(result.findings.problems)} problems is not pinned (first: {first.message}); "
            "see `python3 -m qualify inspect`"
        )
    if result.synthetic:
        raise Rejected("a synthetic checkpoint is not pinned: the catalogue lists published files")
    artifact = result.artifact
    if artifact is None:
        raise Rejected(f"no artifact serves {result.contents.format} checkpoints; there is nothing to pin it for")
    repository = args.repository or hub_repository(result.checkpoint.root)
    revision = args.revision or revision_of(result.checkpoint)
    on_disk = revision_of(result.checkpoint)
    if on_disk is not None and revision != on_disk:
        raise Rejected(f"--revision {show(revision)} is not what is on disk: {on_disk}")
    if repository is not None and not _NAME.match(repository):
        raise Rejected(f"--repository {show(repository)} is not OWNER/NAME")
    if revision is not None and not files.HEX40.match(revision):
        raise Rejected(f"the revision {show(revision)} is not a commit of 40 hex digits")
    known = [e for a in catalogue.load().values() for e in a.checkpoints if e.repository == repository]
    epoch = new_epoch(args.epoch, {entry.source_epoch for entry in known})
    paths = {name: path for name, (path, _) in result.checkpoint.files.items()}
    name = (repository or result.checkpoint.root.name).rpartition("/")[2]
    output = (
        Path(args.output)
        if args.output
        else Path("build/pins") / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{epoch}.toml"
    )
    if os.path.lexists(output):  # asked before hours of hashing, and once more when it is written
        raise Rejected(_TAKEN.format(output))
    try:
        found = digests(paths, Journal(journal_path(result.checkpoint.root)), progress())
    except OSError as error:
        raise CannotRun(f"cannot read {show(str(error.filename))}: {error.strerror}") from None
    if found["config.json"] != hashlib.sha256(result.checkpoint.config_raw or b"").hexdigest():
        raise CannotRun("config.json changed between inspection and hashing: pin a checkpoint at rest")
    text = proposal(result, artifact, repository, revision, epoch, found)
    write(output, text)
    print(f"wrote {output}: {len(found)} files of {repository or 'an unnamed repository'}, epoch {epoch}")
    print(f"to accept it, a reviewer copies it into recipes/{artifact}.toml and fills in reviewed_by")
    return 0


def proposal(
    result: inspection.Inspection,
    artifact: str,
    repository: str | None,
    revision: str | None,
    epoch: str,
    found: dict[str, str],
) -> str:
    """The text of a proposal: a catalogue entry that is not reviewed, and therefore matches nothing yet."""
    lines = [
        f"# Proposal for recipes/{artifact}.toml, written by `python3 -m qualify pin`. It accepts nothing by itself:",
        "# compare the revision with the publisher's page, then copy it there with reviewed_by filled in.",
        "",
        "[[checkpoints]]",
        f"name = {json.dumps((repository or result.checkpoint.root.name).rpartition('/')[2].lower())}",
        f"repository = {json.dumps(repository or '')}" + ("" if repository else "  # not known: fill in"),
        f"revision = {json.dumps(revision or '')}" + ("" if revision else "  # not known: fill in"),
        f"source_epoch = {json.dumps(epoch)}",
        'reviewed_by = ""',
        f"headers_sha256 = {json.dumps(result.identity()['headers'])}",
    ]
    for name, digest in sorted(found.items()):
        lines += [
            "",
            "[[checkpoints.files]]",
            f"role = {json.dumps(files.role(name))}",
            f"name = {json.dumps(name)}",
            f"bytes = {result.checkpoint.files[name][1]}",
            f"sha256 = {json.dumps(digest)}",
        ]
    return "\n".join(lines) + "\n"


def hub_repository(root: Path) -> str | None:
    """OWNER/NAME of a hub cache snapshot (``models--OWNER--NAME/snapshots/<sha>``), or None."""
    if root.parent.name != "snapshots":
        return None
    kind, _, rest = root.parent.parent.name.partition("--")
    owner, separator, name = rest.partition("--")
    return f"{owner}/{name}" if kind == "models" and separator else None


def revision_of(checkpoint: files.Checkpoint) -> str | None:
    """The commit on disk: the snapshot's name, or what the hub client noted beside a plain download."""
    if checkpoint.snapshot is not None and files.HEX40.match(checkpoint.snapshot):
        return checkpoint.snapshot
    try:
        note = checkpoint.root / ".cache" / "huggingface" / "download" / "config.json.metadata"
        first = note.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return None
    return first if files.HEX40.match(first) else None


def new_epoch(wanted: str | None, taken: set[str]) -> str:
    """The epoch of the proposal: a date that no entry of the repository has. Raises ``Rejected``."""
    epoch = wanted or time.strftime("%Y-%m-%d", time.gmtime())
    try:
        time.strptime(epoch, "%Y-%m-%d")
    except ValueError:
        raise Rejected(f"--epoch {show(epoch)} is not a date YYYY-MM-DD") from None
    if epoch in taken:
        raise Rejected(f"the epoch {epoch} is in the catalogue already; a new pin needs a new one (--epoch)")
    return epoch


def write(output: Path, text: str) -> None:
    """Write the whole proposal or nothing, and never over another file. Raises ``Rejected`` when there is one."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            Path(temporary).chmod(0o644)
            os.link(temporary, output)  # a rename would replace what is there
        finally:
            Path(temporary).unlink()
    except FileExistsError:
        raise Rejected(_TAKEN.format(output)) from None
    except OSError as error:
        raise CannotRun(f"cannot write {output}: {error.strerror}") from None
