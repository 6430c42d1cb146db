"""``tag ARTIFACT``: the release tag of a candidate image, for which receipts must vouch.

Every pinned checkpoint of the catalogue needs a passed receipt for exactly this image on every target that the recipe
claims (``status = "verified"``). An existing tag is never moved to another image.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from launch import recipe as recipes
from qualify import catalogue
from qualify import policy as policies
from qualify.errors import CannotRun, Rejected
from qualify.receipt import EXTENSION, canonical, verify
from qualify.receipt import image as images

REPOSITORY = "horizon-images"
EVIDENCE = Path(__file__).resolve().parent.parent / "evidence"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_NOT_QUANTISED = {
    "bf16": "the weights that ran were BF16",
    "dequantised": "the weights were dequantised before they ran",
    "kv-only": "only the KV cache was quantised",
    "synthetic": "a synthetic checkpoint stands for no published one",
    "uncatalogued": "nobody vouches for the checkpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact: a file name in recipes/ without .toml")
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="folder of receipts (default: evidence/)")


def run(args: argparse.Namespace) -> int:
    """Tag the candidate; 0 tagged (or tagged so before), 1 rejected, 2 cannot run."""
    print(tag(args.artifact, args.evidence))
    return 0


def tag(artifact: str, evidence: Path | None = None, folder: Path | None = None, fixtures: bool = False) -> str:
    """Tag ``horizon-images/ARTIFACT:candidate`` and return what was done.

    ``folder``: artifact files; ``fixtures``: accept made-up catalogue entries, for tests only (no command sets it).
    Raises ``Rejected`` with what is missing, ``CannotRun`` where the engine fails.
    """
    entries, claimed, variables, formats = _claims(artifact, folder, fixtures)
    found, unusable = receipts(evidence or EVIDENCE)
    docker = _docker()
    candidate = f"{REPOSITORY}/{artifact}:candidate"
    if not docker.output("image", "ls", "--quiet", "--no-trunc", candidate):
        raise Rejected(f"there is no {candidate}: build it with make image ARTIFACT={artifact}")
    image = images.from_inspect(docker.inspect(candidate), candidate)
    _same_recipe(docker, image, artifact, folder or catalogue.RECIPES)
    vouchers = []
    for entry in entries:
        for target in claimed:
            mine = {name: receipt for name, receipt in found.items() if _of(receipt) == (artifact, target)}
            lacks = {name: shortfall(mine[name], image, entry, variables, formats) for name in mine}
            if "" not in lacks.values():
                raise Rejected(_missing(artifact, target, entry, lacks, unusable))
            vouchers += [name for name, lack in lacks.items() if not lack][:1]
    version = image.labels.get(images.VERSION, "")
    if not _TAG.match(version) or version == "candidate":
        raise Rejected(f"{candidate} has no usable version in its label {images.VERSION}: build it with make image")
    release = f"{REPOSITORY}/{artifact}:{version}"
    before = docker.output("image", "ls", "--quiet", "--no-trunc", release)
    if before == image.config_digest:
        return f"{release} is {image.config_digest} already, by {', '.join(dict.fromkeys(vouchers))}"
    if before:
        raise Rejected(f"{release} is another image ({before[:19]}): a release tag is never moved")
    docker.output("tag", image.config_digest, release)
    return f"{release} is {image.config_digest}, by {', '.join(dict.fromkeys(vouchers))}"


def receipts(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Consistent receipts of a folder by file name, and why the other files are none."""
    policy = policies.load()
    found, unusable = {}, {}
    for path in sorted(folder.glob("*.json")):
        try:
            statement, _ = verify.load(path)
            verify.check(statement, policy)
            found[path.name] = statement
        except Rejected as error:
            unusable[path.name] = str(error)
    return found, unusable


def shortfall(
    receipt: dict[str, Any],
    image: images.Image,
    entry: catalogue.Entry,
    variables: dict[str, tuple],
    formats: tuple[str, ...],
) -> str:
    """Why a consistent receipt does not vouch for an image and a catalogue entry; empty: it does.

    ``variables``: what the operator must have declared, with the values there are.
    """
    predicate = receipt["predicate"]
    extension = predicate[EXTENSION]
    checkpoint, scope = extension["checkpoint"], extension["scope"]
    subjects = {item["name"]: item for item in receipt["subject"]}
    if f"sha256:{subjects['image-config']['digest']['sha256']}" != image.config_digest:
        return "it is of another image (configuration digest)"
    if tuple(subjects["image-config"]["annotations"]["diffIds"]) != image.diff_ids:
        return "it is of another image (layer diff IDs)"
    if scope != "published":
        return f"its scope is {scope}: {_NOT_QUANTISED[scope]}"
    if checkpoint["format"] not in formats:
        return f"the checkpoint that ran is {checkpoint['format']}, which this artifact does not serve"
    source = (checkpoint["repository"], checkpoint["revision"], checkpoint["source_epoch"])
    if source != (entry.repository, entry.revision, entry.source_epoch):
        return f"it is of another checkpoint than {entry.repository} at {entry.revision[:12]}, {entry.source_epoch}"
    wanted = {"config": entry.digest("config"), "index": entry.digest("index"), "headers": entry.headers_sha256}
    for part, digest in wanted.items():
        if digest and checkpoint["identity"][part] != digest:
            return f"the {part} that ran is not the catalogue's"
    files = {file.name: (file.bytes, file.sha256) for file in entry.files}
    if subjects["checkpoint-manifest"]["digest"]["sha256"] != canonical.manifest_sha256(files):
        return "the files that ran are not the catalogue's (checkpoint manifest)"
    topology = extension["topology"]
    if (topology["tp"], topology["ep"]) not in entry.topologies or topology["pp"] * topology["dp"] != 1:
        told = " ".join(f"{key.upper()} {topology[key]}" for key in ("tp", "ep", "pp", "dp"))
        return f"{told} is none of the catalogue's topologies"
    for variable, values in variables.items():
        if extension["declared"].get(variable, {}).get("value") not in values:
            return f"nobody declared {variable}"
    if predicate["result"] != "PASSED":
        return f"its result is {predicate['result']}: {'; '.join(extension['release_blockers'])}"
    return ""


def _claims(artifact: str, folder: Path | None, fixtures: bool):
    """Pinned entries, claimed targets, declarations and formats of an artifact. Raises ``Rejected`` without any."""
    artifacts = catalogue.load(folder, fixtures)
    if artifact not in artifacts:
        raise Rejected(f"ARTIFACT={artifact}: unknown; recipes/ has {', '.join(sorted(artifacts))}")
    known = artifacts[artifact]
    claimed = [target for target, status in known.targets.items() if status == "verified"]
    if not claimed:
        raise Rejected(f'recipes/{artifact}.toml claims no target (status = "verified"): there is nothing to release')
    entries = [entry for entry in known.checkpoints if entry.pinned]
    if not entries:
        why = "; ".join(f"{entry.name}: {entry.unpinned}" for entry in known.checkpoints) or "there is none"
        raise Rejected(f"no checkpoint of {artifact} is pinned in the catalogue ({why})")
    if bare := [file.name for entry in entries for file in entry.files if file.bytes is None]:
        raise Rejected(f"the catalogue has no size for {bare[0]}: pin the checkpoint again")
    declarations = recipes.load(artifact, folder).declarations
    return entries, claimed, {item.variable: item.values for item in declarations}, known.formats


def _same_recipe(docker, image: images.Image, artifact: str, folder: Path) -> None:
    """The image must claim what this checkout claims: its recipe is a part of it. Raises ``Rejected``."""
    words = ("--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--entrypoint=cat", image.config_digest)
    inside = docker.output("run", *words, f"/opt/horizon/recipes/{artifact}.toml")
    if inside.strip() != (folder / f"{artifact}.toml").read_text().strip():
        raise Rejected(f"the candidate was built from another recipes/{artifact}.toml than this one: build it again")


def _of(receipt: dict[str, Any]) -> tuple[str, str]:
    extension = receipt["predicate"][EXTENSION]
    return extension["artifact"], extension["target"]


def _missing(
    artifact: str, target: str, entry: catalogue.Entry, lacks: dict[str, str], unusable: dict[str, str]
) -> str:
    told = [f"{name}: {why}" for name, why in (lacks | unusable).items()] or ["there is none"]
    return f"no receipt lets {artifact} be released for {entry.repository} on {target} ({' | '.join(told)})"


def _docker():
    try:
        from images.docker import find
    except ImportError:
        raise CannotRun("tags are given in a checkout of this project, not inside its image") from None
    return find()
