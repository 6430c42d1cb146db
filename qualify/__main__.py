"""``python3 -m qualify``: see :mod:`qualify.cli`."""

import sys

from qualify.cli import main

sys.exit(main())
