"""Where keys and passwords are, which places no configured address may name, and what `redact` finds in them.

Keys and passwords are outside of every checkout, because data, models and runs are inside one: in $XDG_CONFIG_HOME/dpo
or ~/.config/dpo, readable by their user alone. tasks/system/keyring.py writes there.

    signing.key            the user's
    checkouts/NAME-HASH/   of one checkout: passwords.json, tokens.json, and a signing.key if it had another one before

redact.py uses this module, so it imports nothing of ours that reports errors.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from tasks.checkout import main_checkout
from tasks.secrets.patterns import is_secret_name

# In a checkout every hidden name is private, except those below; and so are these places, also under other names.
OPEN = ((".scratch",), (".dvc", "cache"), (".cache",))  # the last where a home is the workspace (tasks/api.py)
ENVIRONMENTS = ("infra/.env", "infra/k8s/secrets.env")
OF_CHECKOUT = (".services", ".prefect", ".mlflow", ".git", "prefect.toml", *ENVIRONMENTS)
# Where other programs keep keys and logins, below the user's home, and in the environment.
OF_USER = (
    *(".aws", ".azure", ".config", ".docker", ".git-credentials", ".gnupg", ".kube", ".netrc", ".password-store"),
    *(".pypirc", ".prefect", ".ray", ".ssh", ".local/share/keyrings"),
)
OF_HUB = ("token", "stored_tokens")  # of Hugging Face's hub, in HF_HOME
# Processes' environments; secrets of containers; the environment of `dpo up` (docs/hosts.md).
OF_SYSTEM = ("/proc", "/run/secrets", "/etc/dpo/up.env")
NAMED = (
    *("DPO_SIGNING_KEY", "RAY_AUTH_TOKEN_PATH", "PREFECT_HOME", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN_PATH"),
    *("AWS_SHARED_CREDENTIALS_FILE", "KUBECONFIG", "NETRC"),
)
SERVICES = ".services"  # of a checkout, where an earlier version kept these files
FILES = ("signing*.key", "passwords*.json", "tokens*.json")
SHORTEST = 8  # characters of a text in a private file that is a secret

Identity = tuple[int, int]  # device and inode: the same under every spelling, link and mount


def user_folder() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    parent = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~"), ".config")
    return parent / "dpo"


def checkout_folder(checkout: Path) -> Path:
    """The folder of one checkout, by its path."""
    path = str(checkout_of(checkout.resolve()))
    name = re.sub(r"[^\w.-]+", "-", os.path.basename(path)) or "root"
    return user_folder() / "checkouts" / f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def checkout_of(root: Path) -> Path:
    """In a worktree, as `dpo open` makes one, .git names the folder .git/worktrees/NAME of the main checkout."""
    with suppress(OSError):
        folder = Path(os.path.normpath(root / (root / ".git").read_text().partition("gitdir:")[2].strip()))
        return folder.parents[2] if folder.parent.name == "worktrees" else root
    return root


class Private:
    """The private places as they are now."""

    def __init__(self, checkouts: Iterable[Path]) -> None:
        roots = {path.resolve() for path in checkouts}
        self.checkouts = roots | {checkout_of(root) for root in roots}
        self.places = {found: place for place in self._places() if (found := _identity(place))}

    def contains(self, path: Path) -> Path | None:
        """The private place that a path leads to, through links as well."""
        real = Path(os.path.realpath(path))  # `resolve` raises an error of its own for a loop of links
        for checkout in self.checkouts:
            if real.is_relative_to(checkout) and (hidden := _hidden(real.relative_to(checkout).parts)):
                return checkout.joinpath(*hidden)
        steps = filter(None, map(_identity, (real, *real.parents)))
        return next((self.places[step] for step in steps if step in self.places), None)

    def same_as(self, state: os.stat_result) -> Path | None:
        """The private file or folder of which this is another name: a hard link, a mount."""
        return self.places.get((state.st_dev, state.st_ino))

    def _places(self) -> Iterator[Path]:
        home, named = Path(os.path.expanduser("~")), [os.environ.get(name, "") for name in NAMED]
        yield from (*map(Path, OF_SYSTEM), user_folder(), *(home / name for name in OF_USER))
        yield from (folder / name for folder in _hub_folders() for name in OF_HUB)
        several = {path for value in named for path in (value, *value.split(os.pathsep))}  # KUBECONFIG=one:two
        yield from (Path(path).expanduser() for path in several if path)
        for checkout in self.checkouts:
            yield from (checkout / name for name in OF_CHECKOUT)
        yield from private_files(*self.checkouts)


def _hub_folders() -> Iterator[Path]:
    """Where the hub's library keeps its tokens."""
    for name, below in (("HF_HOME", ""), ("XDG_CACHE_HOME", "huggingface")):
        if value := os.environ.get(name):
            yield Path(os.path.expandvars(value), below).expanduser()
    yield Path(os.path.expanduser("~"), ".cache", "huggingface")


def _hidden(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """The parts up to a hidden one."""
    start = next((len(names) for names in OPEN if parts[: len(names)] == names), 0)
    return next((parts[: place + 1] for place in range(start, len(parts)) if parts[place].startswith(".")), None)


def _identity(path: Path) -> Identity | None:
    try:
        state = path.stat()
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino


def private_files(*checkouts: Path) -> Iterator[Path]:
    """The files with keys and passwords that exist."""
    folders = [user_folder(), *(user_folder() / "checkouts").glob("*"), *(root / SERVICES for root in checkouts)]
    yield from (path for folder in folders for pattern in FILES for path in folder.glob(pattern))


def secret_values() -> frozenset[str]:
    """The keys, passwords and tokens in the files of this user and checkout, read once per process."""
    return _read(os.environ.get("XDG_CONFIG_HOME"), str(main_checkout()), os.environ.get("DPO_SIGNING_KEY"))


def forget_values() -> None:
    """After a new key or password was written."""
    _read.cache_clear()


@cache
def _read(config: str | None, checkout: str, key: str | None) -> frozenset[str]:
    named = [Path(key).expanduser()] if key and os.sep in key else []
    values = {value for path in (*named, *private_files(Path(checkout))) for value in _values(path)}
    for name in ENVIRONMENTS:
        with suppress(OSError, ValueError):
            lines = [line.partition("=") for line in (Path(checkout) / name).read_text().splitlines()]
            values |= {value.strip().strip("'\"") for variable, _, value in lines if is_secret_name(variable.strip())}
    return frozenset(value for value in values if len(value) >= SHORTEST)


def _values(path: Path) -> Iterator[str]:
    """A key, or the texts of a JSON object; nothing of a file that cannot be read."""
    with suppress(OSError, ValueError):
        text = path.read_text().strip()
        content = json.loads(text) if path.suffix == ".json" else {"key": text}
        yield from (value for value in content.values() if isinstance(value, str))
