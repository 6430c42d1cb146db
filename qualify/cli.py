"""Command line of the qualification package.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; it is imported only
when it is asked for, so that the commands which need nothing but the standard library never import torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from qualify.errors import Rejected, exit_code

#: subcommand -> (module, one line of help)
COMMANDS = {
    "run": ("qualify.run", "run the qualification stages of one tier, in the image"),
    "synth": ("qualify.synth.command", "write a synthetic checkpoint in a published format"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser for which a wrong flag is a wrong input: exit code 1, one sentence."""

    def error(self, message: str):
        raise Rejected(f"{message} (see `{self.prog} --help`)")


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
