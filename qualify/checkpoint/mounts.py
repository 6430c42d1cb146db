"""Which mount a path is on, from the text of ``/proc/self/mountinfo`` (see proc(5))."""

from __future__ import annotations

import re
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount: where it is, and whether writes through it fail."""

    point: str
    read_only: bool


def effective(mountinfo: str, path: str) -> Mount | None:
    """The mount that serves the absolute ``path``, or None when the text names none.

    The deepest mount point wins; of several mounts on one point, the last (it hides the others). A bind mount
    may be read-only over a writable file system: the per-mount options and the super block's both count.
    """
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 6:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if not inside or (best is not None and len(point) < len(best.point)):
            continue
        super_options = right.split()[2:3]
        options = set(fields[5].split(",")) | set(super_options[0].split(",") if super_options else ())
        best = Mount(point, "ro" in options)
    return best
