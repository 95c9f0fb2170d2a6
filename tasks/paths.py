"""Where the stages' artefacts are, relative to the root of the workspace: DVC's outs."""

from pathlib import Path

WATCH = Path("data/watch.json")
RAW = Path("data/raw")
BASE = Path("data/base")
PAIRS = Path("data/pairs")
CARD = Path("data/card")
REFERENCE = Path("data/reference")
POLICY = Path("data/policy")
METRICS = Path("data/metrics")
MODEL = Path("data/model")
