"""The files of a checkpoint directory: which belong to it, where links lead, what the index says.

Nothing is opened that is not a regular file, and nothing that a link takes out of the checkpoint. The one
legal way out is the Hugging Face cache layout, ``<repo>/snapshots/<commit>/name -> ../../blobs/<hash>``.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qualify.checkpoint import headers, strictjson
from qualify.checkpoint.problems import Findings, show
from qualify.errors import CannotRun

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
HF_QUANT = "hf_quant_config.json"
WEIGHTS = ".safetensors"
#: Formats that unpickle on load: they can run code.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
#: model-00001-of-00042.safetensors -> the split it belongs to
_SPLIT = re.compile(r"^(?P<stem>.*?)-?(?P<index>\d+)-of-(?P<count>\d+)\.safetensors$")
#: A git or hub revision.
HEX40 = re.compile(r"^[0-9a-f]{40}\Z")
_MAX_ENTRIES = 100_000


@dataclass(slots=True)
class Checkpoint:
    """The files of one checkpoint. ``files`` maps a name to (readable path, size in bytes)."""

    root: Path
    snapshot: str | None = None
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_raw: bytes | None = None
    index_raw: bytes | None = None
    hf_quant: dict[str, Any] | None = None
    #: tensor -> shard, None when there is no (usable) index
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    shards: list[str] = field(default_factory=list)
    #: shards that the index names and the directory lacks, or that are unusable links
    absent: list[str] = field(default_factory=list)


def open_checkpoint(directory: str | Path, findings: Findings, revision: str | None = None) -> Checkpoint:
    """List ``directory``, read its config and index, decide which shards make up the checkpoint.

    Raises ``CannotRun`` when the directory itself cannot be listed: then there is no verdict.
    """
    if directory == "":
        raise CannotRun("no model directory is given (MODEL_DIR= or DIR)")  # "" would mean the current one
    root = _directory(Path(directory))
    root, snapshot = _snapshot(root, findings, revision)
    checkpoint = Checkpoint(root, snapshot)
    _list(checkpoint, findings)
    checkpoint.config_raw, checkpoint.config = _json(checkpoint, CONFIG, "config-malformed", findings)
    if CONFIG not in checkpoint.files and not any(p.subject == CONFIG for p in findings.problems):
        findings.problem("config-missing", CONFIG, f"there is no {CONFIG} in the directory{_hint(root)}")
    _, checkpoint.hf_quant = _json(checkpoint, HF_QUANT, "config-malformed", findings)
    checkpoint.index_raw, index = _json(checkpoint, INDEX, "index-malformed", findings)
    if index is not None:
        _weight_map(checkpoint, index, findings)
    _choose_shards(checkpoint, findings)
    return checkpoint


def _directory(directory: Path) -> Path:
    try:
        root = directory.resolve(strict=True)
        if not root.is_dir():
            raise CannotRun(f"{show(str(directory))} is not a directory; name the directory with config.json")
        return root
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "unusable path"
        raise CannotRun(f"cannot open the model directory {show(str(directory))}: {reason}") from None


def _snapshot(root: Path, findings: Findings, revision: str | None) -> tuple[Path, str | None]:
    """Resolve a hub cache root to its snapshot and check ``revision`` against what is on disk."""
    if revision is not None and not HEX40.match(revision):
        findings.problem("revision", revision, f"revision {show(revision)} is not a commit of 40 lower-case hex digits")
    folder = root / "snapshots"
    if folder.is_dir() and not (root / CONFIG).exists():
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
        if revision is not None and revision in names:
            return folder / revision, revision
        if revision is None and len(names) == 1:
            findings.note("hub-root", names[0], f"inspected the hub cache's one snapshot, {show(names[0])}")
            return folder / names[0], names[0]
        if revision is None and names:
            findings.problem(
                "revision",
                root.name,
                f"the hub cache holds {len(names)} snapshots ({', '.join(map(show, names[:4]))}): "
                "name one with --revision, or point at snapshots/<commit>",
            )
    snapshot = root.name if root.parent.name == "snapshots" else None
    if revision is not None and HEX40.match(revision) and snapshot != revision:
        there = [root.name] if snapshot else []
        there = there or (sorted(e.name for e in folder.iterdir()) if folder.is_dir() else [])
        told = f"on disk: {', '.join(map(show, there[:4]))}" if there else "the directory is no snapshot of a hub cache"
        findings.problem("revision", revision, f"there is no snapshots/{revision}; {told}")
    return root, snapshot


def _hint(root: Path) -> str:
    folder = root / "snapshots"
    try:
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    except OSError:
        names = []
    return f"; it is a hub cache: use snapshots/{show(names[0])}" if names else ""


def _list(checkpoint: Checkpoint, findings: Findings) -> None:
    root = checkpoint.root
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    # A blobs/ that is itself a link could lead anywhere.
    allowed = [f"{path}{os.sep}" for path in (root, blobs) if path is not None and not path.is_symlink()]
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise CannotRun(f"cannot list the model directory: {error.strerror}") from None
    if len(entries) > _MAX_ENTRIES:
        raise CannotRun(f"the model directory has {len(entries):,} entries; it is no checkpoint")
    for entry in entries:
        name = entry.name
        path = os.path.realpath(entry.path)
        try:
            status = entry.stat()
        except OSError as error:
            if entry.is_symlink():
                _dangling(entry, blobs, error, findings)
                continue
            raise CannotRun(f"cannot read {show(name)}: {error.strerror}") from None
        if entry.is_symlink() and not any((path + os.sep).startswith(prefix) for prefix in allowed):
            findings.problem(
                "link-escape",
                name,
                f"{show(name)} links to {show(str(Path(entry.path).readlink()))}, outside the checkpoint; "
                "only links into the blobs/ of the same hub repository may leave it",
            )
            continue
        if stat.S_ISDIR(status.st_mode) and not name.endswith((WEIGHTS, *PICKLES, ".json")):
            if not name.startswith("."):
                checkpoint.directories.append(name)
            continue
        if not stat.S_ISREG(status.st_mode):
            findings.problem("not-a-regular-file", name, f"{show(name)} is not a regular file")
            continue
        checkpoint.files[name] = (path, status.st_size)
    for name in checkpoint.files:
        if name.lower().endswith(PICKLES):
            findings.problem("pickle-weights", name, f"{show(name)} is a pickle: loading it can run code")
    _nested(checkpoint, findings)


def _dangling(entry: os.DirEntry[str], blobs: Path | None, error: OSError, findings: Findings) -> None:
    target = str(Path(entry.path).readlink())
    advice = ""
    if "blobs" in Path(target).parts and (blobs is None or not blobs.is_dir()):
        advice = (
            ": the blob lies outside what is mounted here; mount the whole hub repository (models--*, with "
            "blobs/ and snapshots/), or copy the snapshot with links resolved"
        )
    elif error.strerror and "symbolic" in error.strerror:
        advice = ": the link leads to itself"
    findings.problem(
        "link-dangling", entry.name, f"{show(entry.name)} links to {show(target)}, which is absent{advice}"
    )


def _nested(checkpoint: Checkpoint, findings: Findings) -> None:
    """Weights in subdirectories (``original/``): no engine reads them, but they double the download."""
    for directory in checkpoint.directories:
        if (checkpoint.root / directory).is_symlink():
            continue
        try:
            names = sorted(entry.name for entry in os.scandir(checkpoint.root / directory))
        except OSError:
            continue
        for name in names:
            if name.lower().endswith((WEIGHTS, *PICKLES)):
                pickled = not name.lower().endswith(WEIGHTS)
                findings.problem(
                    "pickle-weights" if pickled else "shard-stray",
                    f"{directory}/{name}",
                    f"{show(directory)}/{show(name)} is a weight file beside the checkpoint's own"
                    + (", and a pickle" if pickled else ""),
                )


def _json(checkpoint: Checkpoint, name: str, code: str, findings: Findings):
    """(raw bytes, document) of a JSON object in the checkpoint; None for what is absent or unusable."""
    if name not in checkpoint.files:
        return None, None
    path, size = checkpoint.files[name]
    if size > strictjson.MAX_BYTES:
        findings.problem(code, name, f"{name} has {size:,} bytes; no real one comes near")
        return None, None
    try:
        with Path(path).open("rb") as file:
            raw = file.read(strictjson.MAX_BYTES + 1)
    except OSError as error:
        raise CannotRun(f"cannot read {name}: {error.strerror}") from None
    mistaken = headers.looks_like(raw[:256])
    if mistaken:
        what = "a Git LFS pointer" if mistaken == "lfs-pointer" else "a web page"
        findings.problem(mistaken, name, f"{name} is {what}, not JSON")
        return raw, None
    try:
        document, duplicates = strictjson.parse(raw)
    except strictjson.JsonDefect as defect:
        findings.problem(code, name, f"{name} is {defect}")
        return raw, None
    for key in duplicates:
        findings.problem(code, name, f"{name} has the key {show(key)!r} twice")
    if not isinstance(document, dict):
        findings.problem(code, name, f"{name} is not a JSON object")
        return raw, None
    return raw, document


def _weight_map(checkpoint: Checkpoint, index: dict[str, Any], findings: Findings) -> None:
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        findings.problem("index-malformed", INDEX, f"{INDEX} has no weight_map from tensor to shard")
        return
    bad: dict[str, str] = {}
    for tensor, shard in mapping.items():
        if type(shard) is not str or not shard:
            findings.problem("index-malformed", tensor[:200], f"{INDEX} puts {show(tensor)} into {show(shard)}")
            return
        if shard not in bad and (
            "/" in shard or "\\" in shard or "\0" in shard or shard.startswith(".") or not shard.endswith(WEIGHTS)
        ):
            bad[shard] = tensor
    for shard, tensor in bad.items():
        findings.problem(
            "index-path",
            shard[:200],
            f"{INDEX} puts {show(tensor)} into {show(shard)}, which is no *.safetensors of this directory",
        )
    if bad:
        return
    checkpoint.weight_map = mapping
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(total) is float and total.is_integer():
        total = int(total)
    if total is not None and type(total) is not int:
        findings.problem("index-malformed", INDEX, f"{INDEX} has the total_size {show(total)}")
    else:
        checkpoint.total_size = total


def _choose_shards(checkpoint: Checkpoint, findings: Findings) -> None:
    present = sorted(name for name in checkpoint.files if name.endswith(WEIGHTS))
    # A shard that is a broken or escaping link has its own problem already; it is not also absent.
    reported = {
        p.subject for p in findings.problems if p.code in ("link-dangling", "link-escape", "not-a-regular-file")
    }
    if checkpoint.weight_map is not None:
        named = sorted(set(checkpoint.weight_map.values()))
        checkpoint.shards = [name for name in named if name in checkpoint.files]
        checkpoint.absent = [name for name in named if name not in checkpoint.files]
        strays = [name for name in present if name not in named]
        if not checkpoint.shards and strays:
            # Every file the index names is gone: it belongs to another split. Inspect what is there.
            checkpoint.shards, strays = strays, []
    else:
        checkpoint.shards, strays = present, []
        checkpoint.absent = sorted(name for name in reported if name.endswith(WEIGHTS))
        if len(present) > 1 and INDEX not in reported:
            if INDEX not in checkpoint.files:
                findings.problem(
                    "index-missing",
                    INDEX,
                    f"{len(present)} shards and no {INDEX}: nothing says which tensors must be there",
                )
        elif len(present) == 1:
            match = _SPLIT.match(present[0])
            if match and int(match["count"]) > 1:
                findings.problem(
                    "index-missing",
                    INDEX,
                    f"{show(present[0])} is one of {int(match['count'])} shards and there is no {INDEX}",
                )
    splits = sorted({(match["stem"], int(match["count"][:9])) for name in present if (match := _SPLIT.match(name))})
    if len(splits) > 1 or (strays and checkpoint.shards):
        if len(splits) > 1:
            sets = ", ".join(f"{show(stem)}-*-of-{count}" for stem, count in splits[:5])
            findings.problem("shard-two-sets", sets[:200], f"shards of {len(splits)} splits lie side by side: {sets}")
        for name in strays:
            findings.problem("shard-stray", name, f"{show(name)} is in the directory and not in the index")
    if not present and not checkpoint.absent and not any(name.endswith(WEIGHTS) for name in reported):
        findings.problem("no-weights", str(checkpoint.root.name), "there is no *.safetensors file in the directory")


def compare_index(checkpoint: Checkpoint, found: list[headers.Header], findings: Findings) -> None:
    """Compare index and headers: every tensor in exactly the shard that the index says, sizes included."""
    owner = {tensor.name: header.shard for header in found for tensor in header.tensors}
    if len(owner) != sum(len(header.tensors) for header in found):
        owner.clear()
    for header in found if not owner else ():
        for tensor in header.tensors:
            other = owner.setdefault(tensor.name, header.shard)
            if other != header.shard:
                findings.problem(
                    "tensor-duplicate",
                    tensor.name,
                    f"{show(tensor.name)} is stored twice, in {show(other)} and in {show(header.shard)}",
                )
    mapping = checkpoint.weight_map
    unreadable = {header.shard for header in found if not header.readable}
    if mapping is None:
        return
    _report_absent(checkpoint, owner, findings)
    absent = set(checkpoint.absent)
    stale = any(problem.code == "index-stale" for problem in findings.problems)
    for name, shard in mapping.items() if owner != mapping else ():
        holder = owner.get(name)
        if holder is None:
            if shard not in unreadable and shard not in absent:
                findings.problem(
                    "index-tensor-missing",
                    name,
                    f"{INDEX} puts {show(name)} into {show(shard)}, whose header lacks it",
                )
        elif holder != shard and not (stale and shard in absent):
            findings.problem(
                "index-wrong-shard",
                name,
                f"{INDEX} puts {show(name)} into {show(shard)}; it is in {show(holder)}",
            )
    for name, shard in owner.items() if owner != mapping else ():
        if name not in mapping:
            findings.problem("index-tensor-unlisted", name, f"{show(name)} is in {show(shard)}, but not in {INDEX}")
    if checkpoint.total_size is not None and not absent and not unreadable:
        total = sum(tensor.end - tensor.start for header in found for tensor in header.tensors)
        if total != checkpoint.total_size:
            findings.problem(
                "index-total-size",
                INDEX,
                f"{INDEX} says total_size {checkpoint.total_size:,}; the tensors of its shards have {total:,} bytes",
            )


def _report_absent(checkpoint: Checkpoint, owner: dict[str, str], findings: Findings) -> None:
    """A shard that the index names and nobody has: stale index, or a missing download?"""
    if not checkpoint.absent:
        return
    linked = {p.subject for p in findings.problems if p.code in ("link-dangling", "link-escape", "not-a-regular-file")}
    uncovered = dict.fromkeys(checkpoint.absent, 0)
    for name, shard in (checkpoint.weight_map or {}).items():
        if shard in uncovered and name not in owner:
            uncovered[shard] += 1
    if not any(uncovered.values()):
        findings.problem(
            "index-stale",
            INDEX,
            f"{INDEX} is stale: it names {len(uncovered)} absent shards (first "
            f"{show(checkpoint.absent[0])}), but every "
            "tensor of theirs is in the shards at hand; nothing was repaired",
        )
        return
    for shard, count in uncovered.items():
        if shard not in linked:
            findings.problem(
                "shard-missing",
                shard,
                f"{show(shard)} is in the index and absent, with {count:,} tensors nobody else has",
            )


def role(name: str) -> str:
    """The role of a file in a checkpoint, by its name."""
    if name.endswith(WEIGHTS):
        return "weights"
    if name == INDEX:
        return "index"
    if name in (CONFIG, HF_QUANT):
        return "config" if name == CONFIG else "other"
    if name == "generation_config.json":
        return "generation"
    if name.startswith("chat_template"):
        return "template"
    if name in TOKENIZERS or name in ("special_tokens_map.json", "added_tokens.json", "merges.txt"):
        return "tokenizer"
    return "code" if name.endswith(".py") else "other"
