"""The cache of downloads, bases and staged contexts: one user at a time."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from qualify.errors import CannotRun


@contextlib.contextmanager
def exclusive(cache: Path) -> Iterator[None]:
    """One build at a time in one cache: the stage and partial downloads are shared."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / "lock").open("w")
    except OSError as error:
        raise CannotRun(f"the cache {cache} cannot be used: {error.strerror}; set HORIZON_CACHE") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build that uses {cache}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        # What a killed build left behind; nobody else holds the lock.
        for leavings in [*cache.glob("*/new.*"), *cache.glob("reproduce.*")]:
            shutil.rmtree(leavings, ignore_errors=True)
        yield
