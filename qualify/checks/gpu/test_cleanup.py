"""Stage "cleanup": stopped by a signal, and the machine and the checkpoint are as they were before.

It runs whatever became of the server. After a crash the first test fails, and the others say whether the host is clean.
"""

import contextlib
import json
import os
import signal
import time

from launch import cli, machine
from qualify import policy
from qualify.checkpoint import inspection, mounts
from qualify.checkpoint.hashing import Journal
from qualify.suite import facts, processes

#: seconds beyond the drain for the launcher to end, and for the driver to give memory back
STOP, BACK = 60, 30


def test_a_signal_stops_it_in_order(directory, launched, measure):
    drain = cli.seconds(dict(os.environ), "DRAIN_SECONDS", cli.DRAIN_SECONDS)
    began = time.monotonic()
    # Not where it has ended already: its number may be another process's by now.
    if not directory.exit.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(launched["pid"], signal.SIGTERM)
    while not directory.exit.exists() and time.monotonic() - began < drain + STOP:
        time.sleep(0.1)
    if not directory.exit.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(launched["pid"], signal.SIGKILL)
    code = json.loads(directory.exit.read_text())["code"] if directory.exit.exists() else None
    measure(exit_code=code, seconds_to_stop=round(time.monotonic() - began, 1))
    assert code == 0, f"the launcher's exit code is {code}"


def test_no_process_is_left(launched, measure):
    """Orphans of the server are the sitting's, which is our parent. What is found is killed: the host must be clean."""
    left = processes.descendants(os.getppid(), without=os.getpid())
    stay = processes.kill(os.getppid(), without=os.getpid())
    measure(processes_left=len(left), processes_that_cannot_be_killed=len(stay))
    assert left == [], f"{len(left)} processes of the server were left, and killed"


def test_gpu_memory_came_back(launched, planned, measure):
    tolerance = policy.load().section(planned.artifact, planned.target).threshold("cleanup-gpu-memory").value
    deadline = time.monotonic() + BACK
    while True:
        before = launched["gpu_bytes_before"]
        seen = [gpu.total - gpu.free for gpu in machine.query().gpus[: len(before)]]
        over = max(now - then for now, then in zip(seen, before, strict=True))
        if over <= tolerance or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    measure(gpu_bytes_over=over, gpu_bytes_tolerance=tolerance)
    assert over <= tolerance, f"{over:,} bytes of GPU memory have not come back"


def test_checkpoint_is_unchanged(directory, run, model, measure):
    """Every byte is read again."""
    files = facts.manifest(inspection.inspect(model, headers_only=True), Journal(None))
    before = json.loads(directory.manifest.read_text())
    changed = {file["name"] for old, new in ((before, files), (files, before)) for file in old if file not in new}
    mount = mounts.effective(facts.MOUNTINFO.read_text(), str(model.resolve()))
    measure(manifest_sha256=facts.manifest_sha256(files), files_changed=len(changed))
    measure(mount="unknown" if mount is None else "read-only" if mount.read_only else "writable")
    assert facts.manifest_sha256(files) == run["checkpoint"]["manifest_sha256"], f"changed: {sorted(changed)}"
