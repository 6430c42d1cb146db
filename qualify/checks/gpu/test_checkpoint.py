"""Stage "checkpoint": the inspection and the preflight accept it for this plan, and every file is the run's."""

import json

from launch import cli
from qualify.checkpoint import inspection, mounts
from qualify.checkpoint.hashing import Journal
from qualify.suite import facts


def test_inspection_and_preflight_accept_it(planned, measure):
    result, told = cli.checkpoint(planned)
    measure(format=told["format"], scope=told["scope"], tensors=told["tensors"], bytes=told["bytes"])
    measure(shards=told["shards"], scale_bytes_read=result.scales_read, catalogue=told["catalogue"]["status"])


def test_every_file_is_that_of_the_run(directory, run, model, measure):
    """By full SHA-256; what this run directory has hashed already, and nobody has touched since, is not read again."""
    files = facts.manifest(inspection.inspect(model, headers_only=True), Journal(directory.journal))
    assert files == json.loads(directory.manifest.read_text())
    assert facts.manifest_sha256(files) == run["checkpoint"]["manifest_sha256"]
    mount = mounts.effective(facts.MOUNTINFO.read_text(), str(model.resolve()))
    measure(files=len(files), file_bytes=sum(file["size"] for file in files))
    measure(mount="unknown" if mount is None else "read-only" if mount.read_only else "writable")
