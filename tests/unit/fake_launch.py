"""The real launcher with the stand-in engine: for ``qualify.suite.server.COMMAND``."""

import os
import sys
from functools import partial
from pathlib import Path

from launch import cli, machine, supervise

cli.CACHE = Path(os.environ["FAKE_CACHE"])
machine.image_cuda = lambda: (13, 0)
supervise.serve = partial(supervise.serve, engine=[sys.executable, str(Path(__file__).with_name("fake_engine.py"))])
sys.exit(cli.main())
