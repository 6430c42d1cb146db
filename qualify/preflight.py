"""``preflight``: can this artifact serve this checkpoint, on this topology and GPU?

The inspection's verdict, then what only the operator's plan can decide: the artifact, TP and EP, the
architecture, who vouches for the checkpoint, and the declarations that no file makes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from qualify import catalogue, inspect
from qualify.checkpoint import formats, inspection, mounts, report, topology
from qualify.checkpoint.problems import Findings, show
from qualify.errors import CannotRun, Rejected

MOUNTINFO = Path("/proc/self/mountinfo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--artifact", required=True, metavar="A", help="artifact: a file name in recipes/ without .toml"
    )
    parser.add_argument("--model-dir", required=True, metavar="DIR", help="directory with config.json and shards")
    parser.add_argument("--tp", required=True, type=int, metavar="N", help="tensor parallelism")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert parallelism (default 1)")
    parser.add_argument("--arch", metavar="ARCH", help="GPU architecture: sm90, 9.0, sm120, ...")
    parser.add_argument("--uncatalogued", action="store_true", help="accept a checkpoint that nobody vouches for")
    parser.add_argument("--revision", metavar="SHA", help="the snapshot that must be on disk (40 hex digits)")
    parser.add_argument(
        "--router-partitions",
        type=int,
        metavar="N",
        help="GEMM partitions of the training router, 1 or 2, as the operator declares them (also ROUTER_PARTITIONS)",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="cache to check: writable, outside the checkpoint")
    parser.add_argument("--mountinfo", default=str(MOUNTINFO), metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="the same facts for a machine")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 it can serve, 1 it cannot, 2 cannot run."""
    try:
        artifacts = catalogue.load()
        if args.artifact not in artifacts:
            raise Rejected(f"artifact {show(args.artifact)} is unknown; recipes/ has {', '.join(sorted(artifacts))}")
        result = inspection.inspect(args.model_dir, revision=args.revision)
        facts = check(result, artifacts, args)
    except (CannotRun, Rejected) as error:
        if args.json:
            verdict = "cannot-run" if isinstance(error, CannotRun) else "rejected"
            facts = inspect.cannot_run(str(error)) | {"verdict": verdict}
            if verdict == "rejected":
                facts["problems"] = [{"code": "artifact-unknown", "subject": args.artifact, "message": str(error)}]
            print(json.dumps(facts, indent=1))
        raise
    inspect.emit(json.dumps(facts, indent=1) if args.json else report.render(facts, *inspect.both(result)))
    return 0 if result.verdict == "accepted" else 1


def check(
    result: inspection.Inspection, artifacts: dict[str, catalogue.Artifact], args: argparse.Namespace
) -> dict[str, Any]:
    """Add the findings of the plan to those of the inspection; return the whole report."""
    findings, artifact = result.findings, artifacts[args.artifact]
    _format(result, artifact, findings)
    _topology(result, args.tp, args.ep, findings)
    _arch(result, artifact, args.arch, findings)
    _provenance(result, args.router_partitions, findings)
    _mount(result, args.mountinfo, findings)
    if args.cache_dir is not None:
        _cache(result, args.cache_dir, findings)
    identity = result.identity()
    known = catalogue.lookup(artifacts, identity, result.synthetic)
    _catalogue(known, artifact, args.uncatalogued, findings)
    listed = known.get("topologies")
    if listed and [args.tp, args.ep] not in listed and not any(p.code == "topology" for p in findings.problems):
        pairs = ", ".join(f"TP{tp}+EP{ep}" for tp, ep in listed)
        findings.problem(
            "topology",
            f"TP{args.tp}+EP{args.ep}",
            f"TP {args.tp} with EP {args.ep} is none of the pairs that {artifact.name} lists for "
            f"{known['repository']}: {pairs}",
        )
    facts = result.as_dict()
    facts["catalogue"] = known
    facts["plan"] = {"artifact": args.artifact, "tp": args.tp, "ep": args.ep, "arch": args.arch}
    return facts


def _format(result: inspection.Inspection, artifact: catalogue.Artifact, findings: Findings) -> None:
    """The weight gate: an artifact serves its formats, and BF16 weights are none of them."""
    found = result.contents.format
    if not result.contents.modules:
        return  # nothing is stored: the inspection says so
    if found in artifact.formats:
        if result.artifact not in (None, artifact.name):
            findings.problem(
                "artifact-format",
                artifact.name,
                f"{artifact.name} does not serve this model; {result.artifact} does",
            )
        return
    serves = " or ".join(artifact.formats)
    if found in formats.PLAIN_FORMATS:
        if result.declared.kv_cache:
            findings.problem(
                "fp8-kv-only",
                found,
                f"only the KV cache is FP8 in this checkpoint: its weights are {found}; {artifact.name} "
                f"serves {serves}",
            )
        elif any(problem.code == "declared-not-stored" for problem in findings.problems):
            findings.problem("bf16-only", found, f"the weights are {found}, whatever the config declares")
        else:
            findings.problem("bf16-only", found, f"the weights are {found}, not FP8: {artifact.name} serves {serves}")
        return
    findings.problem("artifact-format", found, f"the format is {found}; {artifact.name} serves {serves}")


def _topology(result: inspection.Inspection, tp: int, ep: int, findings: Findings) -> None:
    chosen = topology.check(result.contents, result.config, tp, ep)
    works = [
        f"TP{item.tp}" + (f"+EP{item.ep}" if item.ep > 1 else "") for item in result.topologies if not item.reasons
    ]
    for reason in chosen.reasons:
        findings.problem(
            "topology",
            f"TP{tp}+EP{ep}",
            f"TP {tp} with EP {ep}: {reason}; working: {', '.join(works) or 'none'}",
        )


def _arch(result: inspection.Inspection, artifact: catalogue.Artifact, arch: str | None, findings: Findings) -> None:
    if arch is None:
        return
    match = re.fullmatch(r"(?:sm_?)?(\d{1,3})(?:\.(\d))?[af]?", arch.strip().lower())
    if match is None:
        findings.problem("arch-unsupported", arch[:60], f"{show(arch)} is no GPU architecture like sm90 or 9.0")
        return
    name = f"sm{match[1]}{match[2] or ''}"
    status = artifact.targets.get(name)
    if status is None or status == "unsupported":
        near = [other for other in artifact.targets if other[:-1] == name[:-1]]
        findings.problem(
            "arch-unsupported",
            name,
            f"{artifact.name} lists {', '.join(artifact.targets)}, not {name}"
            + (f"; {near[0]} is a different architecture: kernels built for it need not run on {name}" if near else ""),
        )
        return
    if status == "not-run":
        findings.note("arch-not-run", name, f"nobody has qualified {artifact.name} on {name} yet")
    if name == "sm90" and any(
        scope.schemes and any(s.kind == "fp4" for s in scope.schemes) for scope in _scopes(result)
    ):
        findings.note("no-native-fp4", name, "sm90 has no FP4 arithmetic: FP4 weights are expanded to 16 bits (W4A16)")


def _scopes(result: inspection.Inspection):
    return result.contents.scope.values()


def _provenance(result: inspection.Inspection, declared: int | None, findings: Findings) -> None:
    """Router provenance of a MoVA model: in the config, or declared; never derived from TP."""
    config = result.config
    if config.get("model_type") != "k2_horizon" or not config.get("mova_num_experts"):
        return
    spelled = os.environ.get("ROUTER_PARTITIONS", "").strip()
    value: Any = declared
    if value is None and spelled:
        value = int(spelled) if spelled.isascii() and spelled.isdigit() else spelled
    stated = config.get(inspection.PROVENANCE)
    if value is None and stated is None:
        findings.problem(
            "router-provenance",
            inspection.PROVENANCE,
            "nobody says how many GEMM partitions the training router used: the checkpoint does not, and it changes "
            "results; declare it with --router-partitions N or ROUTER_PARTITIONS=N",
        )
    elif value is not None and value not in (1, 2):
        findings.problem("router-provenance", inspection.PROVENANCE, f"router partitions {show(value)}: it is 1 or 2")
    elif value is not None and stated is not None and value != stated:
        findings.problem(
            "router-provenance",
            inspection.PROVENANCE,
            f"router partitions {value} are declared; config.json says {show(stated)}",
        )


def _mount(result: inspection.Inspection, mountinfo: str, findings: Findings) -> None:
    try:
        mount = mounts.effective(Path(mountinfo).read_text(errors="replace"), str(result.checkpoint.root))
    except OSError:
        return  # not Linux; the container is
    if mount is not None and not mount.read_only:
        findings.note(
            "mount-writable",
            mount.point,
            "the checkpoint is on a writable mount; mount it read-only in the container",
        )


def _cache(result: inspection.Inspection, directory: str, findings: Findings) -> None:
    path = Path(directory)
    root = result.checkpoint.root
    resolved = Path(os.path.realpath(path))
    if resolved == root or root in resolved.parents:
        findings.problem("cache-dir", directory[:200], f"the cache {show(directory)} lies inside the checkpoint")
    elif not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        findings.problem("cache-dir", directory[:200], f"the cache {show(directory)} is no writable directory")


def _catalogue(known: dict[str, Any], artifact: catalogue.Artifact, waived: bool, findings: Findings) -> None:
    if known["status"] == "catalogued" and known["artifact"] == artifact.name:
        return
    if known["status"] == "catalogued":
        reason = f"the catalogue lists it under {known['artifact']}"
    else:
        reason = known["reason"]
        missing = [entry.repository for entry in catalogue.unpinned(artifact) if not entry.digest("config")]
        if known["status"] == "unknown" and missing:
            reason += f" ({', '.join(filter(None, missing)) or 'its checkpoint'}: not pinned yet)"
    if waived:
        findings.note("catalogue", artifact.name, f"{reason}; --uncatalogued: nobody vouches for it")
    else:
        reason += "; pass --uncatalogued (UNCATALOGUED=1) to go on at your own risk"
        findings.problem("not-catalogued", artifact.name, reason)
