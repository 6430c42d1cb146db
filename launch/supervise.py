"""Runs the engine as a child and answers for it: signals, readiness, comparison with the plan, death, cleanup.

The engine is one session of processes. While it serves, a vanished scheduler or detokenizer is the end of all; when
this returns, none of them is left.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from launch import effective, status
from launch.plan import Plan
from qualify.errors import CannotRun, Rejected

ROOT = Path(__file__).resolve().parent.parent
ENGINE = [sys.executable, "-P", "-m", "launch.engine"]
#: titles that the engine gives to the processes without which it cannot serve
WORKERS = ("sglang::scheduler", "sglang::detokenizer")
POLL = 0.5
REAP_SECONDS = 30
HIDDEN = b"<api key>"


class Stop:
    """SIGTERM and SIGINT as an event; a second one means at once."""

    def __init__(self) -> None:
        self.event, self.count = threading.Event(), 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1
        self.event.set()


def serve(plan: Plan, record: dict[str, Any], start_seconds: float, drain_seconds: float, engine=ENGINE) -> int:
    """Start the engine, and return 0 after an orderly stop.

    ``record`` (what was planned and checked) goes into the status file, with the engine's process id. Raises Rejected
    where a planned flag did not take effect, CannotRun where the engine or one of its workers ended, or was not ready
    after ``start_seconds`` or drained after ``drain_seconds``.
    """
    stop = Stop()
    began = time.time()
    url = f"http://{local(plan.value('--host'))}:{plan.value('--port')}"

    def tell(state: str, detail: str) -> None:
        status.write(state, detail, url=url, began=began, **record)
        print(f"launch: {state}: {detail}", flush=True)

    process = _start(plan, engine)
    record = record | {"engine": process.pid}
    try:
        tell("loading", f"{plan.artifact} from {plan.value('--model-path')}")
        _until_ready(process, plan, url, stop, began + start_seconds)
        if not stop.count:
            tell("ready", f"on {url} after {time.time() - began:.0f} s; every planned flag is in effect")
            _while_serving(process, stop)
        tell("draining", f"stopping; at most {drain_seconds:.0f} s for requests in flight")
        _drain(process, stop, time.time() + drain_seconds)
    except (CannotRun, Rejected) as error:
        status.write("broken", str(error), url=url, began=began, **record)
        raise
    finally:
        _end(process.pid)
        process.wait()
    tell("stopped", "no process of the engine is left")
    return 0


def local(host: str) -> str:
    """Where a server that listens on ``host`` answers on this machine, as it stands in a URL."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return str(address) if address.version == 4 else f"[{address}]"


def _start(plan: Plan, engine: list[str]) -> subprocess.Popen:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The output goes through us where there is a key in it to hide; otherwise the engine writes by itself.
    process = subprocess.Popen(
        engine, stdin=subprocess.PIPE, start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        **({"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if plan.key else {}),
    )  # fmt: skip
    if plan.key:
        threading.Thread(target=relay, args=(process.stdout, sys.stdout.buffer, plan.key.encode()), daemon=True).start()
    # Where it has ended already, the caller's first look says so.
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps({"arguments": plan.arguments, "api_key": plan.key}).encode())
    return process


def relay(source, target, secret: bytes) -> None:
    """Copy a stream to its end in whole lines or progress steps, without the secret (which has no line break)."""
    pending = b""
    while chunk := source.read1(1 << 16):
        pending += chunk
        cut = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
        _write(target, pending[:cut].replace(secret, HIDDEN))
        pending = pending[cut:]
    _write(target, pending.replace(secret, HIDDEN))


def _write(target, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):  # where nobody reads our log, the engine must not block
        target.write(data)
        target.flush()


def get(url: str, key: str | None, seconds: float = 5) -> Any:
    """The JSON of a GET, or None for an empty body. Raises OSError."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        body = answer.read()
        return json.loads(body) if body else None


def _until_ready(process: subprocess.Popen, plan: Plan, url: str, stop: Stop, deadline: float) -> None:
    while not stop.event.wait(POLL):
        if process.poll() is not None:
            raise CannotRun(f"the engine ended while loading ({_how(process.returncode)}): its reason is above")
        if time.time() > deadline:
            raise CannotRun("the engine was not ready in time: raise START_SECONDS, or read its output above")
        try:
            get(f"{url}/ready", None)
        except OSError:
            continue
        try:
            info = get(f"{url}/server_info", plan.key, seconds=60)
        except OSError as error:
            raise CannotRun(f"/server_info does not answer: {error}") from None
        if found := effective.differences(plan, info):
            raise Rejected("not served, because the plan did not take effect: " + "; ".join(found))
        return


def _while_serving(process: subprocess.Popen, stop: Stop) -> None:
    watched = workers(process.pid)
    for kind in WORKERS:
        if not any(title.startswith(kind) for title in watched.values()):
            raise CannotRun(f"the engine has no {kind} process to watch")
    while not stop.event.wait(POLL):
        if process.poll() is not None:
            raise CannotRun(f"the engine ended ({_how(process.returncode)})")
        if gone := sorted(set(watched) - set(workers(process.pid))):
            raise CannotRun(f"{watched[gone[0]]} (pid {gone[0]}) ended: the engine cannot serve without it")


def _drain(process: subprocess.Popen, stop: Stop, deadline: float) -> None:
    before = stop.count
    if process.poll() is None:
        process.terminate()
    while process.poll() is None:
        if stop.count > before:
            raise CannotRun("told to stop twice: requests in flight were cut off")
        if time.time() > deadline:
            raise CannotRun("requests were still in flight when DRAIN_SECONDS had passed: they were cut off")
        time.sleep(POLL)
    if process.returncode not in (0, -signal.SIGTERM):
        raise CannotRun(f"the engine ended in disorder ({_how(process.returncode)})")


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def session(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # pid (comm) state ppid pgrp session ...; comm may hold spaces and brackets
                state, _, _, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(owner) == leader and state not in "ZX":
                found.append(int(entry.name))
    return found


def workers(leader: int) -> dict[int, str]:
    """{pid: title} of the engine's living worker processes."""
    found = {}
    for pid in session(leader):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue
        if title.startswith(WORKERS):
            found[pid] = title.strip()
    return found


def _end(leader: int) -> None:
    """Kill what is left of a session and wait until it is gone. Raises CannotRun where it does not go."""
    deadline = time.time() + REAP_SECONDS
    while left := session(leader):
        if time.time() > deadline:
            raise CannotRun(
                f"processes {left} of the engine do not end: the GPU's driver may hang, see `dmesg` on the host"
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
