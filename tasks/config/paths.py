"""The checkout's root, and the artifact paths of the stages relative to a workspace (DVC's outs)."""

import tomllib
from pathlib import Path

from tasks.checkout import main_checkout as main_checkout  # with the other places

ROOT = Path(__file__).resolve().parents[2]  # of the checkout whose code runs

FINGERPRINT = Path("data/fingerprint.json")
RAW = Path("data/raw")
BASE = Path("data/base")
SAMPLE = Path("data/sample")
PAIRS = Path("data/pairs")
CARD = Path("data/card")
SFT = Path("data/sft")
REFERENCE = Path("data/reference")
POLICY = Path("data/policy")
METRICS = Path("data/metrics")
MODEL = Path("data/model")


def version() -> str:
    """Of this project, from its file: the image and a run's worktree have the code without an installed package."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
