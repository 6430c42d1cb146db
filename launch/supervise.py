"""Runs the engine as a child and answers for it: signals, readiness, comparison with the plan, death, cleanup.

The engine is one session of processes. While it serves, a vanished scheduler or detokenizer is the end of all; when
this returns, none of them is left.
"""

from __future__ import annotations

import contextlib
import http.client
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

from launch import effective, proc, refused, status
from launch.direct import OPENER
from launch.plan import Plan
from qualify.errors import CannotRun, Rejected

ROOT = Path(__file__).resolve().parent.parent
ENGINE = [sys.executable, "-P", "-m", "launch.engine"]
#: titles that the engine gives to the processes without which it cannot serve
WORKERS = ("sglang::scheduler", "sglang::detokenizer")
POLL = 0.5
REAP_SECONDS = 30
HIDDEN = b"<api key>"
#: a configuration of the engine is some 20 kB
LARGEST_ANSWER = 1 << 24
UNANSWERED = (OSError, ValueError, http.client.HTTPException)
#: What the image's environment says, said again for an unpacked root: nothing is fetched.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class Stop:
    """SIGTERM, SIGINT and SIGHUP as an event; a second one means at once."""

    def __init__(self) -> None:
        self.event, self.count = threading.Event(), 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
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
    began, clock = time.time(), time.monotonic()
    url = f"http://{local(plan.value('--host'))}:{plan.value('--port')}"

    def tell(state: str, detail: str) -> None:
        # A log that nobody reads any more, or a full disk, must not end a server that serves.
        with contextlib.suppress(OSError):
            status.write(state, detail, url=url, began=began, **record)
        with contextlib.suppress(OSError):
            print(f"launch: {state}: {detail}", flush=True)

    status.claim()
    process = None
    try:
        process = _start(plan, engine)
        record = record | {"engine": process.pid}
        tell("loading", f"{plan.artifact} from {plan.value('--model-path')}")
        watched = _until_ready(process, plan, url, stop, clock + start_seconds)
        if not stop.count:
            seconds = time.monotonic() - clock
            tell("ready", f"on {url} after {seconds:.0f} s; {len(watched)} workers, every planned flag is in effect")
            _while_serving(process, watched, stop)
        tell("draining", f"stopping; at most {drain_seconds:.0f} s for requests in flight")
        _drain(process, stop, time.monotonic() + drain_seconds)
    except BaseException as error:
        tell("broken", str(error) or type(error).__name__)
        raise
    finally:
        if process is not None:
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
    # The engine asks itself over HTTP, with its key, when it warms up.
    ours = ["127.0.0.1", "::1", "localhost", local(plan.value("--host")).strip("[]")]
    direct = ",".join(filter(None, [os.environ.get("no_proxy"), os.environ.get("NO_PROXY"), *ours]))
    environment = (
        refused.inherited(os.environ) | OFFLINE | {"PYTHONPATH": str(ROOT), "no_proxy": direct, "NO_PROXY": direct}
    )
    # The output goes through us where there is a key in it to hide; otherwise the engine writes by itself.
    process = subprocess.Popen(
        engine, stdin=subprocess.PIPE, start_new_session=True, env=environment,
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
    with contextlib.suppress(OSError, ValueError):  # where nobody takes our log, the engine must not block
        target.write(data)
        target.flush()


def get(url: str, key: str | None, seconds: float = 5) -> Any:
    """The JSON of a GET, or None for an empty body. Raises one of UNANSWERED."""
    deadline = time.monotonic() + seconds
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    body = b""
    with OPENER.open(request, timeout=5) as answer:
        while chunk := answer.read1(1 << 16):
            body += chunk
            if time.monotonic() > deadline or len(body) > LARGEST_ANSWER:
                raise TimeoutError(f"no end of the answer after {len(body):,} bytes")
    return json.loads(body) if body else None


def _until_ready(process: subprocess.Popen, plan: Plan, url: str, stop: Stop, deadline: float) -> dict[int, str]:
    """Wait for the engine, compare it with the plan, and return its workers."""
    while not stop.event.wait(POLL):
        if process.poll() is not None:
            raise CannotRun(f"the engine ended while loading ({_how(process.returncode)}): its reason is above")
        if time.monotonic() > deadline:
            raise CannotRun("the engine was not ready in time: raise START_SECONDS, or read its output above")
        try:
            get(f"{url}/ready", None)
        except UNANSWERED:
            continue
        try:
            info = get(f"{url}/server_info", plan.key, seconds=30)
        except UNANSWERED as error:
            raise CannotRun(f"/server_info does not answer: {error}") from None
        if not isinstance(info, dict):
            raise CannotRun("/server_info answers no JSON object: is another server on this port?")
        if found := effective.differences(plan, info):
            raise Rejected("not served, because the plan did not take effect: " + "; ".join(found))
        watched = workers(process.pid)
        for kind, wanted in zip(WORKERS, (plan.tp, 1), strict=True):
            count = sum(title.startswith(kind) for title in watched.values())
            if count < wanted:
                raise CannotRun(f"the engine has {count} {kind} processes, and {wanted} are needed")
        return watched
    return {}


def _while_serving(process: subprocess.Popen, watched: dict[int, str], stop: Stop) -> None:
    while not stop.event.wait(POLL):
        if process.poll() is not None:
            raise CannotRun(f"the engine ended ({_how(process.returncode)})")
        if gone := sorted(set(watched) - set(workers(process.pid))):
            raise CannotRun(f"{watched[gone[0]]} (pid {gone[0]}) ended: the engine cannot serve without it")


def _drain(process: subprocess.Popen, stop: Stop, deadline: float) -> None:
    if process.poll() is None:
        process.terminate()
    while process.poll() is None:
        if stop.count > 1:
            raise CannotRun("told to stop twice: requests in flight were cut off")
        if time.monotonic() > deadline:
            raise CannotRun("requests were still in flight when DRAIN_SECONDS had passed: they were cut off")
        time.sleep(POLL)
    if process.returncode not in (0, -signal.SIGTERM):
        raise CannotRun(f"the engine ended in disorder ({_how(process.returncode)})")


def _how(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"


def session(leader: int) -> list[int]:
    """Living processes of a session."""
    return [pid for pid, (state, _, _, owner, *_) in proc.processes() if int(owner) == leader and state not in "ZX"]


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
    deadline = time.monotonic() + REAP_SECONDS
    while left := session(leader):
        if time.monotonic() > deadline:
            raise CannotRun(
                f"processes {left} of the engine do not end: the GPU's driver may hang, see `dmesg` on the host"
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
