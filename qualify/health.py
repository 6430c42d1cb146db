"""Health probe of the container: exit 0 where the server on the loopback interface answers /health with 200.

Standard library alone and no import of the package, so that it starts in milliseconds.
"""

import os
import sys
import urllib.request

PORT = os.environ.get("HORIZON_PORT", "30000")

try:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=4) as response:
        sys.exit(0 if response.status == 200 else 1)
except OSError as error:
    print(f"http://127.0.0.1:{PORT}/health: {error}")
    sys.exit(1)
