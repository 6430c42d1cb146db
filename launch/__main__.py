import os
import sys

from launch.cli import main

if sys.stdout is None:  # closed by the caller
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
code = main()
try:
    sys.stdout.flush()
except OSError:  # nobody reads our log any more, which is not our exit code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
sys.exit(code)
