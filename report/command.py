"""``python3 -m qualify report``: see :mod:`report` and qualify/report.py, which declares the arguments."""

from __future__ import annotations

import argparse
import sys

from qualify.errors import Rejected
from qualify.receipt import canonical
from report import page, readme, sources


def run(args: argparse.Namespace) -> int:
    """Read everything, then write: an unusable file leaves page and README as they were. Raises ``Rejected``."""
    if args.out is None and args.readme is None:
        raise Rejected("say what to write: --out FILE, --readme, or both")
    found = sources.read(args.evidence, args.results)
    written = []
    if args.out is not None:
        written.append((args.out, page.render(found)))
    if args.readme is not None:
        text = canonical.read(args.readme, str(args.readme)).decode()
        written.append((args.readme, readme.rewrite(text, args.readme.name, found)))
    for path, text in written:
        canonical.write(path, text.encode())
        print(path)
    for receipt in found.refused:
        print(f"refused: {receipt.file}: {receipt.refused}", file=sys.stderr)
    return 0
