"""The cache of the arena's answers: a person's are erased with their feedback."""

from pathlib import Path

from tasks.config.paths import home
from tasks.system.files import recall


def cache_folder() -> Path:
    return home() / ".scratch" / "arena"


def erase(user: str) -> int:
    """Delete the cached answers to a person's prompts; returns how many."""
    theirs = [path for path in cache_folder().glob("*/*.json") if recall(path).get("user") == user]
    for path in theirs:
        path.unlink()
    return len(theirs)
