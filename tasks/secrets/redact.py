"""Removes secrets from text: params, logs, tracking, tracebacks and pages pass through here.

A secret is the password in an address, a token with a known format, the value after `password=` and similar names, the
value of any environment variable with such a name, the password alone of an address in any other variable, and what
this user's files of keys and passwords hold.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from tasks.secrets.patterns import PRIVATE_KEY, RUN, TOKEN, WEBHOOK, is_secret_name
from tasks.secrets.private import secret_values

HIDDEN = "***"
SUBSTRING_LENGTH = 8  # characters from which a secret is redacted inside words too; a shorter one only as a whole word
PART_LENGTH = 5  # characters from which one of several values in a variable is a secret
MINIMUM_LENGTH = 3  # shorter values are switches or numbers; redacting them would redact every figure
SWITCHES = {"true", "false", "yes", "none", "null", "off", "auto"}
REFUSED_LENGTH = 16  # characters from which a secret is a reason to refuse a configuration that contains it
PAIR = re.compile(r"[:=]")  # between a user and a password, or a name and a token
URL_LOGIN = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)[^\s/?#@'\"]+@")
VALUE = r"(?P<value>[^\s\"'&,;}]{8,})"
ASSIGNMENT = re.compile(rf"(?<![\w.-])(?P<name>[A-Za-z][\w.-]*+[\"']?\s*+[=:]\s*+[\"']?){VALUE}")
AUTHORIZATION = re.compile(rf"(?P<name>\b(?:bearer|basic)\s+){VALUE}", re.IGNORECASE)
QUERY = re.compile(rf"(?P<name>[?&](?:sig|x-amz-signature|x-goog-signature)=){VALUE}", re.IGNORECASE)
# Keys in a text, besides a shell's variables: fewer, because `cache_key: 8a0c...` is none.
KEYS = re.compile(
    r"(?:password|passwd|passphrase|secret|token|credential|pwd|(?:api|access|secret|private|account)[_.-]?key)s?$",
    re.IGNORECASE,
)
HEADERS = {"authorization", "proxy-authorization", "cookie", "set-cookie", "signature", "x-amz-signature"}
_names: set[str] = set()  # variables that `protect` declared secret


def protect(variable: str) -> None:
    """Treat the value of this environment variable as a secret, whatever the variable is called."""
    _names.add(variable)


def redact(text: str) -> str:
    for pattern in _patterns(_values()):
        text = pattern.sub(HIDDEN, text)
    if "://" in text:
        text = WEBHOOK.sub(rf"\g<host>{HIDDEN}", URL_LOGIN.sub(rf"\g<scheme>{HIDDEN}@", text))
    if "-----BEGIN " in text:
        text = PRIVATE_KEY.sub(HIDDEN, text)
    text = RUN.sub(_redact_run, text)
    if "=" in text or ":" in text:
        text = QUERY.sub(_redact_value, ASSIGNMENT.sub(_redact_named, text))
    lower = text.lower()
    return AUTHORIZATION.sub(_redact_value, text) if "bearer" in lower or "basic" in lower else text


def redacted(content: Any) -> Any:
    """`redact` every string in nested lists and mappings, and what has the name of a secret in a mapping."""
    if isinstance(content, str):
        return redact(content)
    if isinstance(content, dict):
        return {name: _redact_field(name, value) for name, value in content.items()}
    return [redacted(value) for value in content] if isinstance(content, list | tuple) else content


def is_secret(text: str) -> bool:
    """Whether a configured value belongs in an environment variable."""
    url_password = URL_LOGIN.search(text) and re.search(r"://[^/@\s]*:[^/@\s]+@", text)
    variable = any(len(value) >= REFUSED_LENGTH and value in text for value in _values())
    token = TOKEN.search(text) or PRIVATE_KEY.search(text) or WEBHOOK.search(text)
    return bool(url_password or token or variable)


def hook(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """For sys.excepthook."""
    print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="", flush=True)


def _redact_field(name: Any, value: Any) -> Any:
    if isinstance(value, str) and isinstance(name, str) and _names_secret(name):
        return HIDDEN if _looks_secret(value) or (name.isupper() and len(value) >= SUBSTRING_LENGTH) else redact(value)
    return redacted(value)


def _redact_run(match: re.Match[str]) -> str:
    return TOKEN.sub(HIDDEN, match[0])


def _redact_named(match: re.Match[str]) -> str:
    key = match["name"].rstrip("=: \t\r\n\"'")
    return _redact_value(match) if _names_secret(key) or key.lower() in HEADERS else match[0]


def _names_secret(key: str) -> bool:
    return bool(key.isupper() or KEYS.search(key)) and is_secret_name(key)


def _redact_value(match: re.Match[str]) -> str:
    return match["name"] + (HIDDEN if _looks_secret(match["value"]) else match["value"])


def _looks_secret(value: str) -> bool:
    """Not what is clearly none: a number, a word as in `token: required`, a token of a tokenizer."""
    mixed = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    return ((mixed and len(value) >= SUBSTRING_LENGTH) or len(value) >= 20) and value[:2] != "<|"


def _values() -> frozenset[str]:
    named, addresses = list[str](), list[str]()
    for name, value in os.environ.items():
        if name in _names or is_secret_name(name):
            named.append(value)
        elif "://" in value and "@" in value:
            addresses.append(value)
    return _worth_hiding(tuple(named), tuple(addresses), secret_values())


@lru_cache(maxsize=64)
def _worth_hiding(
    of_variables: tuple[str, ...], addresses: tuple[str, ...], of_files: frozenset[str]
) -> frozenset[str]:
    """A variable may name the file that holds the secret: that name is none."""
    whole = [value for value in of_variables if not (os.sep in value and os.path.exists(value))]
    parts = (part.strip() for value in whole for part in _parts(value))
    found = [*whole, *(part for part in parts if not part.isdigit()), *of_files]
    found += [password for address in addresses for password in _url_passwords(address)]
    return frozenset(value for value in found if len(value) >= MINIMUM_LENGTH and value.lower() not in SWITCHES)


@lru_cache(maxsize=64)
def _patterns(values: frozenset[str]) -> list[re.Pattern[str]]:
    """For secrets that are hidden inside words, too, and for short ones, which are hidden as whole words."""
    ordered = sorted(values, key=len, reverse=True)  # longest first: one secret may be a prefix of another
    long = "|".join(re.escape(value) for value in ordered if len(value) >= SUBSTRING_LENGTH)
    short = "|".join(re.escape(value) for value in ordered if len(value) < SUBSTRING_LENGTH)
    return [re.compile(pattern) for pattern in (long, rf"(?<!\w)(?:{short})(?!\w)" if short else "") if pattern]


def _parts(value: str) -> Iterator[str]:
    """The parts of a value that are secrets by themselves: the password of a login, the path of a webhook, each of
    several tokens, the secret fields of a connection string or of JSON."""
    if value[:1] in ("{", "["):
        with suppress(ValueError):
            yield from _fields(json.loads(value))
            return
    items = [item.strip() for item in re.split(r"[,;\n]", value) if item.strip()]
    if "://" in value:
        yield from (part for url in {value, *items} if "://" in url for part in _url_parts(url))
        return
    pairs = {item: PAIR.split(item, 1) for item in items}
    chosen = [item for item in items if is_secret_name(pairs[item][0])] or items
    yield from (pairs[item][-1] for item in chosen if len(items) == 1 or len(pairs[item][-1]) >= PART_LENGTH)


def _url_passwords(text: str) -> Iterator[str]:
    """The passwords of the logins in addresses, as they stand there and decoded; a common word is none."""
    for login in URL_LOGIN.finditer(text):
        user, _, password = login[0].partition("://")[2].removesuffix("@").partition(":")
        if password != user and len(password) >= PART_LENGTH and not password.isdigit():
            yield from {password, unquote(password)}


def _url_parts(url: str) -> Iterator[str]:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    login, at, _ = host.rpartition("@")
    yield login.partition(":")[2]
    if scheme.startswith("http") and not at and len(path) >= SUBSTRING_LENGTH:
        yield from (url, slash + path)


def _fields(content: Any) -> Iterator[str]:
    """The texts with the names of secrets in nested JSON; all of them where no name is one."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (text for value in content for text in _fields(value))
    elif isinstance(content, dict):
        named = [value for name, value in content.items() if is_secret_name(name)]
        yield from (text for value in named or content.values() for text in _fields(value))
