"""A receipt from a run directory, an image and the policy. The same inputs give the same bytes: no time of building."""

from __future__ import annotations

from typing import Any

from qualify.errors import Rejected
from qualify.policy import STAGES, Policy, Section
from qualify.receipt import EXTENSION, PREDICATE, SCHEMA, STATEMENT, verdicts
from qualify.receipt.canonical import content_sha256
from qualify.receipt.image import Image, base_sha256, compare_labels
from qualify.receipt.rundir import Run

CONFIGURATION = ("policy.toml", "run.json", "identity.json", "engine-wheel", "base", "patch-series")


def statement(run: Run, image: Image, policy: Policy) -> dict[str, Any]:
    """The unsigned receipt. Raises ``Rejected`` where run, image and policy do not belong together."""
    facts = run.facts
    section = policy.section(facts["artifact"], facts["target"])
    if facts["policy_sha256"] != policy.sha256:
        raise Rejected("the run was measured under another policy than this qualify/policy.toml: qualify it again")
    identity, checkpoint = facts["image"]["identity"], dict(facts["checkpoint"])
    scope, manifest = checkpoint.pop("scope"), checkpoint.pop("manifest_sha256")
    published(scope, checkpoint)
    stages = {name: _stage(name, run.stages[name], section, facts["topology"]) for name in STAGES}
    model, others = verdicts.gpu(stages)
    if others:
        raise Rejected(
            f"stage {others[0]} ran on another GPU model, or number of GPUs, than the first: stages of several "
            "sittings are joined on one only"
        )
    extension = {
        "schema": SCHEMA,
        "artifact": facts["artifact"],
        "target": facts["target"],
        "target_name": facts["target_name"],
        "scope": scope,
        "topology": facts["topology"],
        "image": {
            "engine": {key: identity["engine"][key] for key in ("name", "version")},
            "source_sha256": identity["source_sha256"],
            "base_drift": len(identity["base"].get("drift", ())),
            "labels_compared": compare_labels(image, identity),
            "substituted_libraries": facts["image"]["substituted_libraries"],
        },
        "checkpoint": checkpoint,
        "declared": facts["declared"],
        "flags": facts.get("flags", {}),
        "policy": section.as_dict(),
        "gpu": model,
        "stages": stages,
    }
    extension["release_blockers"] = verdicts.blockers(extension, section)
    digests = (policy.sha256, run.sha256, facts["image"]["identity_sha256"], identity["engine"]["wheel_sha256"],
               base_sha256(identity["base"]), identity["series_sha256"])  # fmt: skip
    subjects = [
        _named("image-config", image.config_digest, annotations={"diffIds": list(image.diff_ids)}),
        *([_named("image-manifest", image.manifest_digest)] if image.manifest_digest else []),
        _named("checkpoint-manifest", manifest),
    ]
    result = {
        "_type": STATEMENT,
        "predicateType": PREDICATE,
        "subject": subjects,
        "predicate": {
            **verdicts.summary(extension, section),
            "configuration": [_named(name, digest) for name, digest in zip(CONFIGURATION, digests, strict=True)],
            EXTENSION: extension,
        },
    }
    extension["content_sha256"] = content_sha256(result)
    return result


def published(scope: str, checkpoint: dict[str, Any]) -> None:
    """A published checkpoint has a public source, a made-up one has none. Raises ``Rejected``."""
    source = [checkpoint[key] for key in ("repository", "revision", "source_epoch")]
    if scope == "published" and None in source:
        raise Rejected("the scope is published, and repository, revision or source epoch is missing")
    if scope == "synthetic" and source != [None] * 3:
        raise Rejected("the scope is synthetic, and a repository, revision or source epoch is named")


def _named(name: str, digest: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}, **more}


def _stage(name: str, found: dict | str, section: Section, topology: dict) -> dict[str, Any]:
    if isinstance(found, str):
        found = {"result": verdicts.NOT_RUN, "reason": found, "numbers": {}, "gpu": None, "began": None,
                 "seconds": None, "file_sha256": None,
                 "tests": {"passed": [], "failed": [], "skipped": []}}  # fmt: skip
    stage = {key: found[key] for key in ("reason", "tests", "numbers", "gpu", "began", "seconds", "file_sha256")}
    stage["reported"] = found["result"]
    stage["result"], stage["reason"] = verdicts.judge(name, stage, section, topology)
    stage["unmeasured"] = verdicts.unmeasured(name, stage, section)
    return stage
