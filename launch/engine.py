"""The engine's process: reads its arguments and API key from standard input, so that the key is in no argument.

Started by launch.supervise alone. Importable without side effects, because the engine's own child processes import
the main module again.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    # Without its supervisor nobody watches the engine or tells its health.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = prepare_server_args(request["arguments"])
    arguments.api_key = request["api_key"]
    run_server(arguments)  # what it leaves behind, the supervisor ends


if __name__ == "__main__":
    main()
