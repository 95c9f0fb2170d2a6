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
SUBSTRING_LENGTH = 8  # characters from which a secret is redacted inside words too; a shorter one only as a whole word
MINIMUM_LENGTH = 3  # shorter values are switches or numbers; redacting them would redact every figure
SWITCHES = {"true", "false", "yes", "none", "null", "off", "auto"}
REFUSED_LENGTH = 16  # characters from which a secret is a reason to refuse a configuration that contains it
NAMES = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|CONNECTION_STRING|CONNECTION_URL|WEBHOOK_URL|AUTH_STRING"
    r"|(^|_)KEY|KEY_ID|_AUTH)$",
    re.IGNORECASE,
)
URL_LOGIN = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)[^\s/?#@'\"]+@")
# Tokens of known services: too long and too mixed to be words.
TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
ASSIGNMENT = re.compile(
    r"(?P<name>\b(?:password|passwd|secret|secret_key|access_key|api_key|apikey|access_token|auth_token|token|signature"
    r"|x-amz-signature|x-amz-credential|x-amz-security-token)[\"']?\s*[=:]\s*[\"']?|\bbearer\s+|\bbasic\s+)"
    r"(?P<value>[^\s\"'&,;}]{8,})",
    re.IGNORECASE,
)
_names: set[str] = set()  # variables that `protect` declared secret


def protect(variable: str) -> None:
    """Treat the value of this environment variable as a secret, whatever the variable is called."""
    _names.add(variable)


def redact(text: str) -> str:
    for value in _values():
        short = len(value) < SUBSTRING_LENGTH
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text) if short else text.replace(value, HIDDEN)
    text = URL_LOGIN.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = TOKENS.sub(HIDDEN, text)
    return ASSIGNMENT.sub(_redact_value, text)


def redacted(content: Any) -> Any:
    """`redact` every string in nested lists and mappings."""
    if isinstance(content, str):
        return redact(content)
    if isinstance(content, dict):
        return {name: redacted(value) for name, value in content.items()}
    return [redacted(value) for value in content] if isinstance(content, list | tuple) else content


def is_secret(text: str) -> bool:
    """Whether a configured value belongs in an environment variable."""
    url_password = URL_LOGIN.search(text) and re.search(r"://[^/@\s]*:[^/@\s]+@", text)
    variable = any(len(value) >= REFUSED_LENGTH and value in text for value in _values())
    return bool(url_password or TOKENS.search(text) or variable)


def hook(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """For sys.excepthook."""
    print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="", flush=True)


def _redact_value(match: re.Match[str]) -> str:
    """The assignment without its value, unless that is clearly no secret: a number, a word as in `token: required`."""
    value = match["value"]
    mixed = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    return match["name"] + (HIDDEN if mixed or len(value) >= 20 else value)


def _values() -> list[str]:
    """Longest first: one secret may be a prefix of another."""
    named = [value for name, value in os.environ.items() if name in _names or _is_secret_name(name)]
    parts = {part for value in named for part in _parts(value)}
    return sorted(filter(_worth_hiding, parts), key=len, reverse=True)


_is_secret_name = cache(NAMES.search)  # cached: the pages of all settings redact hundreds of short texts


def _parts(value: str) -> list[str]:
    """The value, and its parts that are secrets by themselves: the password of a login, the path of a webhook."""
    if "://" not in value:
        return [value, value.partition(":")[2]]
    host, slash, path = value.partition("://")[2].partition("/")
    login, at, _ = host.rpartition("@")
    hook = slash + path if at == "" and len(path) >= SUBSTRING_LENGTH else ""
    return [value, login.partition(":")[2], hook]


def _worth_hiding(value: str) -> bool:
    is_path = os.sep in value and os.path.exists(value)  # a variable may name the file that holds the secret
    return len(value) >= MINIMUM_LENGTH and value.lower() not in SWITCHES and not is_path
