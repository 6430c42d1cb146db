"""``verify-receipt FILE``: is this receipt well-formed, and do its digests, verdicts and policy agree?

Exit 0 whatever the result or scope: a failed qualification has a good receipt too. What it cannot know without the run,
the image and the checkpoint stands in docs/receipts.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qualify import policy as policies
from qualify.errors import CannotRun, Rejected
from qualify.policy import STAGES, Policy
from qualify.receipt import EXTENSION, build, canonical, sanitise, schema, signing, verdicts
from qualify.suite import targets

#: part of the topology -> the flag that says the same
_FLAGS = {"tp": "--tp-size", "ep": "--ep-size", "pp": "--pp-size", "dp": "--dp-size", "a2a": "--moe-a2a-backend"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a receipt, bare or in a DSSE envelope")
    parser.add_argument("--public-key", type=Path, metavar="K", help="PEM public key that must have signed it")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="the policy file (default: this checkout's)")
    parser.add_argument("--json", action="store_true", help="the same facts for a machine")


def run(args: argparse.Namespace) -> int:
    """Print what the receipt says; 0 it is consistent, 1 it is not, 2 cannot run."""
    try:
        statement, envelope = load(args.file)
        check(statement, policies.load(args.policy))
        signed_by = None
        if args.public_key is not None:
            if envelope is None:
                raise Rejected("the receipt is not signed: it is no DSSE envelope")
            signed_by = signing.verify(envelope, args.public_key)
    except (CannotRun, Rejected) as error:
        if args.json:
            verdict = "cannot-run" if isinstance(error, CannotRun) else "rejected"
            print(json.dumps({"verdict": verdict, "reason": str(error)}, indent=1))
        raise
    facts = describe(statement) | {"signed_by": signed_by}
    if args.json:
        print(json.dumps({"verdict": "consistent", "reason": ""} | facts, indent=1))
    else:
        print(f"CONSISTENT  {facts['result']}  scope {facts['scope']}  {facts['artifact']} on {facts['target']}")
        for name, result in facts["stages"].items():
            print(f"  {name:<12} {result}")
        for reason in facts["release_blockers"]:
            print(f"  no release: {reason}")
        if signed_by is None:
            print("  signature: none checked" if envelope is None else "  signature: not checked (--public-key)")
        else:
            print(f"  signature: by {signed_by}")
    return 0


def load(path: Path) -> tuple[Any, dict[str, Any] | None]:
    """(statement, envelope or None) of a file. Raises ``Rejected``."""
    document = canonical.parse(canonical.read(path, "the receipt"), "the receipt")
    if isinstance(document, dict) and "payloadType" in document:
        return canonical.parse(signing.payload(document), "the receipt in the envelope"), document
    return document, None


def describe(statement: dict[str, Any]) -> dict[str, Any]:
    """What a consistent receipt says, in short."""
    extension = statement["predicate"][EXTENSION]
    return {
        "result": statement["predicate"]["result"],
        **{key: extension[key] for key in ("scope", "artifact", "target", "release_blockers")},
        "stages": {name: extension["stages"][name]["result"] for name in STAGES},
    }


def check(statement: Any, policy: Policy) -> None:
    """Everything that a receipt can be asked by itself. Raises ``Rejected`` with the first thing that is wrong."""
    if found := schema.defect(statement):
        raise Rejected(f"the receipt does not have the form of schema-v1.json: {found}")
    predicate = statement["predicate"]
    extension = predicate[EXTENSION]
    if canonical.content_sha256(statement) != extension["content_sha256"]:
        raise Rejected("the receipt was changed after it was sealed: content_sha256 is that of other content")
    if found := sanitise.find(statement):
        raise Rejected(f"the receipt is not public: {found}")
    section = policy.section(extension["artifact"], extension["target"])
    if predicate["configuration"][0]["digest"]["sha256"] != policy.sha256:
        raise Rejected("the receipt was sealed under another policy than this one (--policy names a file)")
    if not _equal(extension["policy"], section.as_dict()):
        raise Rejected("the receipt quotes the policy wrongly")
    build.published(extension["scope"], extension["checkpoint"])
    _stages(extension, section)
    _served(extension)
    manifest = statement["subject"][-1]["digest"]["sha256"]
    cleanup = extension["stages"]["cleanup"]
    if cleanup["result"] == verdicts.PASSED and cleanup["numbers"].get("manifest_sha256", manifest) != manifest:
        raise Rejected("stage cleanup found another checkpoint than the one that the receipt names")
    if not _equal(extension["release_blockers"], verdicts.blockers(extension, section)):
        raise Rejected("release_blockers does not follow from scope, image and stages")
    for key, value in verdicts.summary(extension, section).items():
        if predicate[key] != value:
            raise Rejected(f"{key} does not follow from the stages")


def _stages(extension: dict[str, Any], section: policies.Section) -> None:
    for name in STAGES:
        stage = extension["stages"][name]
        verdict = verdicts.judge(name, stage, section, extension["topology"])
        if verdict != (stage["result"], stage["reason"]):
            raise Rejected(f"stage {name} says {stage['result']}; tests, numbers and policy say {verdict[0]}")
        if stage["unmeasured"] != verdicts.unmeasured(name, stage, section):
            raise Rejected(f"stage {name} lists other unmeasured thresholds than the policy has")
        absent = [stage[key] is None for key in ("began", "seconds", "file_sha256")]
        if any(absent) and not (all(absent) and stage["reported"] == verdicts.NOT_RUN):
            raise Rejected(f"stage {name} lacks its time or the digest of its file")
    model, others = verdicts.gpu(extension["stages"])
    if others or not _equal(extension["gpu"], model):
        raise Rejected("gpu is not the one model on which the stages ran")


def _served(extension: dict[str, Any]) -> None:
    """What says twice where and how it was served must say the same."""
    name, gpu = extension["target_name"], extension["gpu"]
    target = targets.get(name)
    if target.arch != extension["target"] or (gpu is not None and target.gpu not in gpu["name"]):
        raise Rejected(f"target_name {name} is not {extension['target']}, or not the GPU on which the stages ran")
    for part, flag in _FLAGS.items():
        if extension["flags"].get(flag, extension["topology"][part]) != extension["topology"][part]:
            raise Rejected(f"topology.{part} is not what the flag {flag} says")


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON documents: in Python alone, true would equal 1."""
    return canonical.canonical(a) == canonical.canonical(b)
