"""Every process that a server leaves behind, whatever it did to its session or parents: Linux's child subreaper."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from launch import proc

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def become_subreaper() -> None:
    """From now on orphans below this process become its children, so that :func:`descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child before its program starts: it gets this signal when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def descendants(ancestor: int, without: int | None = None) -> list[int]:
    """Living processes below ``ancestor``, but ``without`` and what is below that."""
    children: dict[int, list[int]] = {}
    for pid, (state, parent, *_) in proc.processes():
        children.setdefault(int(parent), []).append(pid if state not in "ZX" else -pid)
    found, left = [], [ancestor]
    while left:
        for child in children.get(left.pop(), []):
            if abs(child) != without:
                left.append(abs(child))
                found += [child] if child > 0 else []  # a dead one may have living children
    return sorted(found)


def kill(ancestor: int, seconds: float = 30, without: int | None = None) -> list[int]:
    """Kill all descendants and wait until they are gone; returns those that do not go."""
    deadline = time.monotonic() + seconds
    while (left := descendants(ancestor, without)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return left


def memory(pids: list[int]) -> tuple[int, int]:
    """Bytes that processes hold: anonymous and shared memory, and all that is resident, mapped files included.

    Shared pages are counted once a process: upper bounds.
    """
    own = resident = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in ("RssAnon", "RssShmem", "VmRSS"):
                    size = int(value.split()[0]) * 1024
                    own, resident = (own, resident + size) if key == "VmRSS" else (own + size, resident)
    return own, resident
