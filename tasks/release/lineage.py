"""What an export was made from and by: the birth certificate, less the files' hashes."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.files import hash_files, read_json, sha256
from tasks.params import Params
from tasks.paths import BASE, METRICS, PAIRS, POLICY, RAW, REFERENCE

ROOT = Path(__file__).resolve().parents[2]
CODE = ("flows", "tasks", "training", "dvc.yaml", "requirements.lock")  # params are in the manifest, whole
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "ray", "datasets", "gguf")
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*")


def manifest(params: Params, checks: dict[str, Any], base: Path) -> dict[str, Any]:
    raw, origin = read_json(RAW / "manifest.json"), read_json(BASE / "manifest.json")
    return {
        "model": params.promote.model_name,
        "data": {"source": raw["source"], "sha256": raw["sha256"], "rows": raw["rows"], "pairs": hash_files(PAIRS)},
        "base": {"model": origin["model"], "revision": origin["revision"], "sha256": origin["sha256"]},
        "licences": {"base": licence(base), "data": licence(RAW)},
        "reference": read_json(REFERENCE / "manifest.json"),
        "policy": hash_files(POLICY),
        "params": params.model_dump(exclude={"promote"}),
        "metrics": read_json(METRICS / "evaluate.json"),
        "checks": checks,
        "made": made(),
    }


def made() -> dict[str, Any]:
    """By which code, in which environment, on what: the only part of a manifest that another machine may change."""
    from training.hardware import hardware

    lock = ROOT / "requirements.lock"
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "clean": _git("status", "--porcelain", "--untracked-files=no", "--", *CODE) == "",
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: version(name) for name in PACKAGES},
        "requirements_lock_sha256": sha256(lock) if lock.exists() else None,
        "hardware": hardware(),
    }


def licence(folder: Path) -> str | None:
    """As a model card's header names it, or as a licence file begins; None where nothing is said."""
    card = folder / "README.md"
    if card.exists() and card.read_text(errors="replace").startswith("---"):
        header = card.read_text(errors="replace").split("---")[1]
        for line in header.splitlines():
            if line.startswith("license:"):
                return line.partition(":")[2].strip()
    files = sorted(path for pattern in LICENCES for path in folder.glob(pattern) if path.is_file())
    lines = files[0].read_text(errors="replace").split("\n") if files else []
    return next((line.strip()[:80] for line in lines if line.strip()), None)


def _git(*arguments: str) -> str | None:
    """None where this is no git checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
