"""The manifest of an export, without the hashes of its files: data, base model, params, metrics, code, environment."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.artifacts.models import sft_manifest
from tasks.config.params import Params
from tasks.config.paths import BASE, METRICS, PAIRS, POLICY, RAW, REFERENCE, ROOT, SAMPLE
from tasks.config.paths import version as project_version
from tasks.system.files import hash_files, read_json, read_json_or_empty, sha256
from tasks.tracking.results import git_output

CODE = ("cli", "flows", "services", "tasks", "training", "dvc.yaml", "requirements.lock")
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "ray", "datasets", "gguf")
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*")


def build_manifest(params: Params, checks: dict[str, Any], base: Path) -> dict[str, Any]:
    raw, origin = read_json(RAW / "manifest.json"), read_json(BASE / "manifest.json")
    return {
        "model": params.promote.model_name,
        "data": {"source": raw["source"], "sha256": raw["sha256"], "rows": raw["rows"], "pairs": hash_files(PAIRS)},
        "base": {"model": origin["model"], "revision": origin["revision"], "sha256": origin["sha256"]},
        **({"sample": sampled} if (sampled := read_json_or_empty(SAMPLE / "manifest.json")) else {}),
        **({"sft": tuned} if (tuned := sft_manifest()) else {}),
        "licences": {"base": licence(base), "data": licence(RAW)},
        "reference": read_json(REFERENCE / "manifest.json"),
        "policy": hash_files(POLICY),
        "params": params.model_dump(exclude={"promote"}),
        "metrics": read_json(METRICS / "evaluate.json"),
        "checks": checks,
        "made": _environment(),
    }


def _environment() -> dict[str, Any]:
    """Code, packages and hardware: the only part of a manifest that depends on the machine."""
    from training.evaluation.hardware import hardware  # imports torch

    lock = ROOT / "requirements.lock"
    return {
        "version": project_version(),
        "commit": git_output(ROOT, "rev-parse", "HEAD") or "unknown",
        "clean": git_output(ROOT, "status", "--porcelain", "--untracked-files=no", "--", *CODE) == "",
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: version(name) for name in PACKAGES},
        "requirements_lock_sha256": sha256(lock) if lock.exists() else None,
        "hardware": hardware(),
    }


def licence(folder: Path) -> str | None:
    """From the header of the model card, or else the first line of a licence file; None where neither states one."""
    card = folder / "README.md"
    text = card.read_text(errors="replace") if card.exists() else ""
    for line in text.split("---")[1].splitlines() if text.startswith("---") else ():
        if line.startswith("license:"):
            return line.partition(":")[2].strip()
    files = sorted(path for pattern in LICENCES for path in folder.glob(pattern) if path.is_file())
    lines = files[0].read_text(errors="replace").split("\n") if files else []
    return next((line.strip()[:80] for line in lines if line.strip()), None)
