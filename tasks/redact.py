"""Removes secrets from text: params, logs, tracking, tracebacks and pages pass through here.

A secret is the password in an address, a token with a known format, the value after `password=` and similar names, and
the value of any environment variable with such a name.
"""

import os
import re
import sys
import traceback
from functools import cache
from types import TracebackType
from typing import Any

HIDDEN = "***"
SHORTEST = 8  # characters of a secret that is hidden inside words, too; a shorter one is hidden as a word of its own
FEWEST = 3  # below that a value is a switch or a number, and hiding it would hide every figure
SWITCHES = {"true", "false", "yes", "none", "null", "off", "auto"}
SURE = 16  # the same where it is a reason to refuse a configuration
NAMES = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|CONNECTION_STRING|CONNECTION_URL|WEBHOOK_URL|AUTH_STRING"
    r"|(^|_)KEY|KEY_ID|_AUTH)$",
    re.IGNORECASE,
)
ADDRESS = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)[^\s/?#@'\"]+@")
# Long enough and mixed enough that no word is meant.
SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
NAMED = re.compile(
    r"(?P<name>\b(?:password|passwd|secret|secret_key|access_key|api_key|apikey|access_token|auth_token|token|signature"
    r"|x-amz-signature|x-amz-credential|x-amz-security-token)[\"']?\s*[=:]\s*[\"']?|\bbearer\s+|\bbasic\s+)"
    r"(?P<value>[^\s\"'&,;}]{8,})",
    re.IGNORECASE,
)
_names: set[str] = set()  # variables that the configuration calls secret, whatever they are called


def protect(variable: str) -> None:
    """Treat this environment variable's value as a secret, too."""
    _names.add(variable)


def redact(text: str) -> str:
    for value in _values():
        short = len(value) < SHORTEST
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text) if short else text.replace(value, HIDDEN)
    text = ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = SHAPES.sub(HIDDEN, text)
    return NAMED.sub(_behind_its_name, text)


def redacted(content: Any) -> Any:
    """`redact` every string in nested lists and mappings."""
    if isinstance(content, str):
        return redact(content)
    if isinstance(content, dict):
        return {name: redacted(value) for name, value in content.items()}
    return [redacted(value) for value in content] if isinstance(content, list | tuple) else content


def is_secret(text: str) -> bool:
    """Whether a configured value belongs in an environment variable."""
    hidden = ADDRESS.search(text) and re.search(r"://[^/@\s]*:[^/@\s]+@", text)
    return bool(hidden or SHAPES.search(text) or any(value in text for value in _values() if len(value) >= SURE))


def hook(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
    """For sys.excepthook."""
    print(redact("".join(traceback.format_exception(kind, error, where))), file=sys.stderr, end="", flush=True)


def _behind_its_name(match: re.Match[str]) -> str:
    """Keep what is clearly no secret: a number, a word such as `token: required`."""
    value = match["value"]
    looks = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    return match["name"] + (HIDDEN if looks or len(value) >= 20 else value)


def _values() -> list[str]:
    """Longest first: one secret may be a prefix of another."""
    named = [value for name, value in os.environ.items() if name in _names or _is_secret_name(name)]
    parts = {part for value in named for part in _parts(value)}
    return sorted(filter(_worth_hiding, parts), key=len, reverse=True)


_is_secret_name = cache(NAMES.search)  # a schema of all settings redacts hundreds of short texts


def _parts(value: str) -> list[str]:
    """The value, and what is secret by itself: the password of `user:password` or of an address, a hook's path."""
    if "://" not in value:
        return [value, value.partition(":")[2]]
    host, slash, path = value.partition("://")[2].partition("/")
    login, at, _ = host.rpartition("@")
    hook = slash + path if at == "" and len(path) >= SHORTEST else ""
    return [value, login.partition(":")[2], hook]


def _worth_hiding(value: str) -> bool:
    is_path = os.sep in value and os.path.exists(value)  # a variable may name the file that holds the secret
    return len(value) >= FEWEST and value.lower() not in SWITCHES and not is_path
