"""Exit with 0 if the installed torch needs the packages of infra/cuda.lock, as PyPI's Linux build does."""

import sys
from importlib.metadata import requires

sys.exit(not (sys.platform == "linux" and any("nvidia" in name for name in requires("torch") or [])))
