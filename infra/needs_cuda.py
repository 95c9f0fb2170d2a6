"""Does the installed torch need the packages of infra/cuda.lock? PyPI's build does on Linux, the CPU build does not."""

import sys
from importlib.metadata import requires

sys.exit(not (sys.platform == "linux" and any("nvidia" in one for one in requires("torch") or [])))
