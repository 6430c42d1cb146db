"""``inspect DIR``: what is in this checkpoint? Seconds; headers, config and small scales only."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from qualify import catalogue
from qualify.checkpoint import inspection, report
from qualify.errors import CannotRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="directory with config.json and *.safetensors")
    parser.add_argument("--json", action="store_true", help="the same facts for a machine")
    parser.add_argument("--headers-only", action="store_true", help="do not read the values of scales")
    parser.add_argument("--scan-weights", action="store_true", help="also look for NaN codes in FP8 weights (slow)")
    parser.add_argument("--revision", metavar="SHA", help="the snapshot that must be on disk (40 hex digits)")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 accepted, 1 rejected, 2 cannot run."""
    try:
        result = inspection.inspect(args.directory, args.headers_only, args.revision, args.scan_weights)
        facts = describe(result, catalogue.load())
    except CannotRun as error:
        if args.json:
            print(json.dumps(cannot_run(str(error)), indent=1))
        raise
    emit(json.dumps(facts, indent=1) if args.json else report.render(facts, *both(result)))
    return 0 if result.verdict == "accepted" else 1


def both(result: inspection.Inspection):
    """Problems and notes, as the human report takes them."""
    return result.findings.problems, result.findings.notes


def emit(text: str) -> None:
    """Print ``text``; a reader that has seen enough (``| head``) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(result: inspection.Inspection, artifacts: dict[str, catalogue.Artifact]) -> dict[str, Any]:
    """The report with the catalogue's word, which never changes the verdict."""
    facts = result.as_dict()
    facts["catalogue"] = catalogue.lookup(artifacts, facts["identity"], result.synthetic)
    return facts


def cannot_run(reason: str) -> dict[str, Any]:
    """The JSON report when there is no verdict on the checkpoint: every key, and the reason."""
    return {
        "verdict": "cannot-run",
        "reason": reason,
        "format": "unknown",
        "scope": {},
        "tensors": 0,
        "bytes": 0,
        "shards": 0,
        "identity": {},
        "catalogue": {"status": "unknown", "reason": reason},
        "problems": [],
        "notes": [],
        "topologies": [],
    }
