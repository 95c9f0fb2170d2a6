"""The operator's signing key. It signs exports (Ed25519) and checkpoints (HMAC-SHA256).

Anyone who can write a file and its manifest can make the two agree; a signature needs the key. The key is 32
random bytes as 64 hexadecimal digits: the value of DPO_SIGNING_KEY, a file that DPO_SIGNING_KEY names, or signing.key
in the user's folder (tasks/secrets/private.py), created at first use. A checkout that had another key keeps it, in a
folder of its own, and what a key of that folder signed is accepted by all checkouts of the user. The keys of exports
and of checkpoints are both derived from the key; workers get only the latter.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.config.paths import main_checkout
from tasks.errors import UserError
from tasks.secrets.private import checkout_folder, private_files, user_folder
from tasks.system import keyring

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VARIABLE = "DPO_SIGNING_KEY"
NAME = "signing.key"
TRUSTED = "DPO_TRUSTED_KEYS"  # public keys whose exports are accepted, too, separated by commas
PURPOSE = b"dpo export manifest\n"  # a signature of anything else is not valid for a manifest


def checkpoint_key() -> bytes:
    return hmac.digest(_secret(), b"dpo checkpoint", hashlib.sha256)


def public_key() -> str:
    return _public(_private())


def _public(private: "Ed25519PrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def sign(content: bytes) -> str:
    """A line with the public key and the signature; the same for the same content and key."""
    return f"ed25519 {public_key()} {_private().sign(PURPOSE + content).hex()}\n"


def signature_problem(content: bytes, line: str) -> str | None:
    """What is wrong with a signature, in words; None where a trusted key made it."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        kind, public, signature = line.split()
        assert kind == "ed25519"
        verifier, signed = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)), bytes.fromhex(signature)
    except (ValueError, AssertionError):
        return "its signature is not a line `ed25519 KEY SIGNATURE`"
    trusted = [key.strip().lower() for key in os.environ.get(TRUSTED, "").split(",")]
    if public not in (*trusted, public_key(), *_other_keys()):
        return (
            f"it is signed by key {public[:16]}, and this project's key is {public_key()[:16]} "
            f"({_key_file() or VARIABLE}). Use the same key ({VARIABLE}), or add the public key to {TRUSTED} if you "
            "trust its owner"
        )
    try:
        verifier.verify(signed, PURPOSE + content)
    except InvalidSignature:
        return f"it is not what key {public[:16]} signed"
    return None


def _private(secret: bytes | None = None) -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(hmac.digest(secret or _secret(), b"dpo export", hashlib.sha256))


def _other_keys() -> Iterator[str]:
    """The public keys of the user's other checkouts; none where the variable names the key."""
    files = [] if _named() else private_files()
    for text in (path.read_text().strip() for path in files if path.suffix == ".key"):
        if _is_key(text):
            yield _public(_private(bytes.fromhex(text)))


def _secret() -> bytes:
    path = _key_file()
    if path is None:
        return bytes.fromhex(os.environ[VARIABLE].strip())
    if not _named() and not path.exists():
        keyring.create(path, secrets.token_hex(32) + "\n")
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise UserError(
            f"The signing key cannot be read: {error}. {VARIABLE} is 64 hexadecimal digits (`openssl rand -hex 32`) or "
            "the path of a file that holds them."
        ) from None
    if not _is_key(text):
        raise UserError(f"{path} holds no signing key of 64 hexadecimal digits. Restore it from a backup.")
    return bytes.fromhex(text)


def _named() -> str:
    """The key, or its file, as the variable names it."""
    return os.environ.get(VARIABLE, "").strip()


def _key_file() -> Path | None:
    """The file with the key, which messages may name; None where the variable holds the key itself."""
    value = _named()
    if _is_key(value):
        return None
    return Path(value).expanduser() if value else _default()


def _default() -> Path:
    """The checkout's own key if it has one, else the user's; of a key that was moved, the one that its link names."""
    own, of_user, old = (
        checkout_folder(main_checkout()) / NAME,
        user_folder() / NAME,
        keyring.former_file(NAME, main_checkout()),
    )
    if not os.path.exists(old):  # unlike Path.exists, False in a folder of another user
        return own if own.exists() else of_user
    if keyring.is_foreign(old):
        return old
    if keyring.leads_to(old, own) or not (keyring.leads_to(old, of_user) or keyring.move(old, of_user)):
        return keyring.private_file(NAME, main_checkout())
    return of_user


def _is_key(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)
