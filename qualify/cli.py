"""Command line of the qualification package.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; it is imported only
when it is asked for, so that the commands which need nothing but the standard library never import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from qualify.errors import Parser, exit_code

#: subcommand -> (module, one line of help)
COMMANDS = {
    "inspect": (
        "qualify.inspect",
        "what is in this checkpoint: format, scope, defects; seconds, no weights read",
    ),
    "preflight": ("qualify.preflight", "can this artifact serve this checkpoint on this topology"),
    "pin": ("qualify.pin", "write a catalogue proposal for a checkpoint"),
    "verify-checkpoint": ("qualify.verify", "full SHA-256 of a checkpoint against the catalogue"),
    "run": ("qualify.run", "run the qualification stages of one tier, in the image"),
    "seal": ("qualify.receipt.seal", "write the receipt of a run directory"),
    "verify-receipt": ("qualify.receipt.verify", "is a receipt well-formed, and do its digests and policy agree"),
    "report": ("qualify.report", "one HTML page of all receipts and benchmark files, and the README's table"),
    "tag": ("qualify.tag", "give an image its release tag, if receipts say so"),
    "synth": ("qualify.synth.command", "write a synthetic checkpoint in a published format"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 ok, 1 rejected, 2 cannot run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="python3 -m qualify", description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # The name of the subcommand is the first word: the top level takes no options of its own.
    wanted = next((word for word in argv if not word.startswith("-")), None)
    modules = {}
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == wanted:
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(subparser)

    def run() -> int:
        args = parser.parse_args(argv)
        return modules[args.command].run(args)

    return exit_code(run)
