"""The operator's signing key. It signs exports (Ed25519) and checkpoints (HMAC-SHA256).

Anyone who can write a file and its manifest can make the two agree; a signature needs the key. The key is 32
random bytes as 64 hexadecimal digits: the value of DPO_SIGNING_KEY, a file that DPO_SIGNING_KEY names, or
.services/signing.key of the main checkout, created at first use, readable by its user alone. The keys of exports and
of checkpoints are both derived from it; workers get only the latter.
"""

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.config.paths import home
from tasks.errors import UserError
from tasks.system.files import sync, temporary

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VARIABLE = "DPO_SIGNING_KEY"
TRUSTED = "DPO_TRUSTED_KEYS"  # public keys whose exports are accepted, too, separated by commas
PURPOSE = b"dpo export manifest\n"  # a signature of anything else is not valid for a manifest


def checkpoint_key() -> bytes:
    return hmac.digest(_secret(), b"dpo checkpoint", hashlib.sha256)


def public_key() -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return _private().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


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
    if public not in (*trusted, public_key()):
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


def _private() -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(hmac.digest(_secret(), b"dpo export", hashlib.sha256))


def _secret() -> bytes:
    path = _key_file()
    if path is None:
        return bytes.fromhex(os.environ[VARIABLE].strip())
    if path == _default() and not path.exists():
        _create(path)
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


def _create(path: Path) -> None:
    """Create the key atomically: of two processes at the same time, one wins and both use its key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with temporary(path) as aside, suppress(FileExistsError):
        aside.touch(mode=0o600)
        aside.write_text(secrets.token_hex(32) + "\n")
        sync(aside)
        os.link(aside, path)


def _key_file() -> Path | None:
    """The file with the key, which messages may name; None where the variable holds the key itself."""
    value = os.environ.get(VARIABLE, "").strip()
    if _is_key(value):
        return None
    return Path(value).expanduser() if value else _default()


def _default() -> Path:
    root = home()
    if (root / ".git").is_file():  # a worktree, as `dpo open` makes: .git names .git/worktrees/<name> of the checkout
        folder = Path((root / ".git").read_text().partition("gitdir:")[2].strip())
        root = folder.parents[2] if folder.parent.name == "worktrees" else root
    return root / ".services" / "signing.key"


def _is_key(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)
