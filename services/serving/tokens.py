"""Bearer tokens of the gateway: who asks, and how often they may.

tokens.json in the checkout's private folder (tasks/secrets/private.py) holds {"NAME": "TOKEN"}; the first start makes a
token. Edit it to add or remove people while the gateway runs. DPO_SERVE_TOKENS (NAME:TOKEN, separated by commas)
replaces the file, for containers.
"""

import getpass
import hashlib
import hmac
import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from tasks.config.paths import main_checkout
from tasks.errors import UserError
from tasks.feedback.events import person
from tasks.secrets.private import forget_values
from tasks.system.keyring import create, private_file

VARIABLE = "DPO_SERVE_TOKENS"
SHORTEST = 16  # characters


class Tokens:
    def __init__(self) -> None:
        self.file: Path | None = None if VARIABLE in os.environ else private_file("tokens.json", main_checkout())
        self.origin = str(self.file or VARIABLE)  # for messages
        if self.file and not self.file.exists():
            create(self.file, json.dumps({getpass.getuser(): secrets.token_urlsafe(24)}, indent=2) + "\n")
        self.names = self._read()

    def owner(self, authorization: str) -> str | None:
        """The name behind an Authorization header; every token is compared, so that timing tells nothing."""
        scheme, _, token = authorization.partition(" ")
        with suppress(UserError):  # a mistake in the file locks nobody out
            before, self.names = self.names, self._read()
            if self.names != before:
                forget_values()  # logs must not show the new tokens, either
        owners = [name for name, known in self.names.items() if hmac.compare_digest(known.encode(), token.encode())]
        return owners[0] if owners and scheme.lower() == "bearer" else None

    def _read(self) -> dict[str, str]:
        try:
            if self.file:
                names = {str(name): str(token) for name, token in json.loads(self.file.read_text()).items()}
            else:
                pairs = [pair.strip().partition(":") for pair in os.environ[VARIABLE].split(",")]
                names = {name: token for name, _, token in pairs}
        except (OSError, ValueError, AttributeError):
            names = {}
        if not names or any(not _is_person(name) or len(token) < SHORTEST for name, token in names.items()):
            form = '{"NAME": "TOKEN"}' if self.file else "NAME:TOKEN,NAME:TOKEN"
            raise UserError(
                f"{self.origin} must have the form {form}, with tokens of at least {SHORTEST} characters "
                "(`openssl rand -hex 32` makes one). Correct it"
                + (", or delete it: the next start makes a new one." if self.file else ", or unset it.")
            )
        return names


def _is_person(name: str) -> bool:
    try:
        return bool(name) and person(name) == name
    except ValueError:
        return False


def through(name: str) -> str:
    """What feedback keeps of its token, since votes count once for each: a hash, because the name is a person's."""
    return hashlib.sha256(f"token of {name}".encode()).hexdigest()[:16]


class RateLimit:
    """A token bucket for each name: `per_minute` requests at once, refilled over a minute."""

    def __init__(self, per_minute: int) -> None:
        self.capacity, self.buckets = float(per_minute), dict[str, tuple[float, float]]()

    def wait(self, name: str) -> float:
        """Seconds until the next request is allowed; 0 counts one now."""
        now = time.monotonic()
        requests, since = self.buckets.get(name, (self.capacity, now))
        requests = min(self.capacity, requests + (now - since) * self.capacity / 60)
        self.buckets[name] = (requests - 1 if requests >= 1 else requests, now)
        return 0.0 if requests >= 1 else (1 - requests) * 60 / self.capacity
