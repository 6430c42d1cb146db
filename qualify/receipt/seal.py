"""``seal``: write the receipt of a run directory, whatever the result; only ``--release`` insists on a passed one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from qualify import policy as policies
from qualify.errors import Rejected
from qualify.receipt import EXTENSION, build, canonical, image, rundir, sanitise, signing, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--run", required=True, type=Path, metavar="OUT", help="run directory: run.json and stages/")
    parser.add_argument(
        "--image-inspect", type=Path, metavar="FILE", help="output of `docker image inspect` for the image that ran"
    )
    parser.add_argument("--config-digest", metavar="sha256:...", help="in its place: the configuration digest ...")
    parser.add_argument(
        "--diff-id",
        action="append",
        default=[],
        metavar="sha256:...",
        help="... and the diff ID of each layer, in order",
    )
    parser.add_argument("--pushed", metavar="NAME@sha256:...", help="add the manifest digest of a pushed image")
    parser.add_argument("--out", required=True, type=Path, metavar="RECEIPT", help="the receipt, evidence/NAME.json")
    parser.add_argument("--release", action="store_true", help="refuse anything that a release tag would refuse")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="PEM private key: RECEIPT is then a DSSE envelope")
    parser.add_argument(
        "--private", action="append", default=[], metavar="WORD",
        help="a host or user name, such as the GPU host's, that must not be in the receipt",
    )  # fmt: skip
    parser.add_argument("--policy", type=Path, metavar="FILE", help="the policy file (default: this checkout's)")


def run(args: argparse.Namespace) -> int:
    """Build, check and write; 0 sealed, 1 rejected, 2 cannot run."""
    policy = policies.load(args.policy)
    which = _image(args)
    statement = build.statement(rundir.load(args.run), which, policy)
    if found := sanitise.find(statement, [*sanitise.names_here(), *args.private]):
        raise Rejected(f"{found}: nothing was sealed; remove it from the run and seal again")
    verify.check(statement, policy)  # what is written is what verify-receipt accepts
    facts = verify.describe(statement)
    if args.release and facts["result"] != "PASSED":
        raise Rejected(f"not sealed for a release: {'; '.join(facts['release_blockers'])}")
    content = canonical.render(statement)
    _not_over_another(args.out, statement, signed=args.sign is not None)
    if args.sign is not None:
        content = canonical.render(signing.sign(content, args.sign))
    canonical.write(args.out, content)
    print(
        f"sealed {args.out.name}: {facts['result']}, scope {facts['scope']}, {facts['artifact']} on {facts['target']}"
    )
    for reason in facts["release_blockers"]:
        print(f"  no release: {reason}")
    return 0


def _image(args: argparse.Namespace) -> image.Image:
    if (args.image_inspect is None) == (args.config_digest is None):
        raise Rejected("say which image: either --image-inspect, or --config-digest with --diff-id")
    if args.image_inspect is None:
        if args.pushed:
            raise Rejected("--pushed needs --image-inspect: the engine's record of the push is what is compared")
        return image.checked(image.Image(args.config_digest, tuple(args.diff_id)), "--config-digest with --diff-id")
    if args.diff_id:
        raise Rejected("--image-inspect has the diff IDs: leave --diff-id out")
    which = image.read_inspect(args.image_inspect)
    return image.pushed(which, args.pushed) if args.pushed else which


def _not_over_another(path: Path, statement: dict[str, Any], signed: bool) -> None:
    """A sealed receipt stays: only the same one, or the same one before its image was pushed, is replaced."""
    if not os.path.lexists(path):
        return
    sealed, envelope = verify.load(path)
    if envelope is not None and not signed:
        raise Rejected(f"{path.name} is signed: replace it with --sign, or name another file with --out")
    if not isinstance(sealed, dict) or _core(sealed) != _core(statement):
        raise Rejected(f"{path.name} is there already and is of another run or image: name another file with --out")
    if any(item not in statement["subject"] for item in sealed["subject"]):
        raise Rejected(f"{path.name} names a pushed manifest that this receipt lacks: name another file with --out")


def _core(statement: dict[str, Any]) -> Any:
    """Everything but the pushed manifest and the digest that depends on it."""
    try:
        extension = {**statement["predicate"][EXTENSION], "content_sha256": None}
        subjects = [item for item in statement["subject"] if item["name"] != "image-manifest"]
        return canonical.canonical([subjects, {**statement["predicate"], EXTENSION: extension}])
    except (KeyError, TypeError):
        return None
