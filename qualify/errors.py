"""The two ways in which a command refuses, each with one sentence for the user.

Exit codes of every command of this project: 0 ok, 1 rejected, 2 cannot run.
"""


class Rejected(Exception):
    """The input is wrong: a checkpoint, a flag, a file. Exit code 1."""


class CannotRun(Exception):
    """The environment is wrong: a missing tool, no GPU, a full disk. Exit code 2."""
