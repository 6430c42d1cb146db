"""The launcher's state in a file: what the health probe reads, and the qualification after it.

Standard library alone and no import of other modules: the probe starts often.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = Path(os.environ.get("HORIZON_STATUS", "/tmp/horizon-status.json"))


def write(state: str, detail: str, **facts: Any) -> None:
    """Replace the file. ``state`` is loading, ready, draining, broken or stopped; ``detail`` one sentence."""
    new = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    new.write_text(json.dumps({"state": state, "detail": detail, **facts}) + "\n")
    new.replace(FILE)


def read() -> dict[str, Any]:
    """The last state; ``broken`` where there is none."""
    try:
        return json.loads(FILE.read_text())
    except FileNotFoundError:
        return {"state": "broken", "detail": "no server has been launched here"}
    except (OSError, ValueError) as error:
        return {"state": "broken", "detail": f"{FILE}: {error}"}
