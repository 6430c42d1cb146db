"""Health probe of the container: exit 0 where the launched server is ready and answers /health, else 1.

Its one line says which: loading, ready, draining, broken. The engine's /health runs one token through scheduler and
detokenizer when nothing else does.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from launch import status
from launch.direct import OPENER

#: the engine itself gives up after 20 s
SECONDS = 22


def main() -> int:
    """Print the state and return the exit code."""
    found = status.read()
    state, detail = found["state"], found["detail"]
    if state == "ready":
        try:
            with OPENER.open(f"{found.get('url')}/health", timeout=SECONDS) as answer:
                if answer.status == 200:
                    print(f"ready: {detail}")
                    return 0
                state, detail = "broken", f"/health answers {answer.status}"
        except urllib.error.HTTPError as error:
            state, detail = "broken", f"/health answers {error.code}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            state, detail = "broken", f"/health does not answer: {error}"
    print(f"{state}: {detail}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
