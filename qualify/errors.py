"""The two ways in which a command refuses, each with one sentence for the user.

Exit codes of every command of this project: 0 ok, 1 rejected, 2 cannot run.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable


class Rejected(Exception):
    """The input is wrong: a checkpoint, a flag, a file. Exit code 1."""


class CannotRun(Exception):
    """The environment is wrong: a missing tool, no GPU, a full disk. Exit code 2."""


def exit_code(command: Callable[[], int]) -> int:
    """Run a command; turn its refusal into one sentence on stderr and the exit code that goes with it."""
    try:
        return command()
    except Rejected as error:
        print(f"rejected: {error}", file=sys.stderr)
        return 1
    except CannotRun as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"cannot run: disk full: {error.filename or error}; free some space and run again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
