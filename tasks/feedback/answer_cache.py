"""The cache of the arena's answers: a person's are erased with their feedback."""

from pathlib import Path

from tasks.config.paths import main_checkout
from tasks.system.files import read_json_or_empty


def cache_folder() -> Path:
    return main_checkout() / ".scratch" / "arena"


def erase(user: str) -> int:
    """Delete the cached answers to a person's prompts; returns how many."""
    theirs = [path for path in cache_folder().glob("*/*.json") if read_json_or_empty(path).get("user") == user]
    for path in theirs:
        path.unlink()
    return len(theirs)
