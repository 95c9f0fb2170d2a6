"""Keys and passwords are in the user's folder; those that an earlier version kept in a checkout move there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services import passwords
from tasks.errors import UserError
from tasks.secrets import private, redact
from tasks.secrets.private import checkout_folder, user_folder
from tasks.system import keyring, signing
from tests.support.workspaces import PROJECT


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The first of two checkouts of a user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DPO_SIGNING_KEY", raising=False)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DPO_HOME", str(tmp_path / "one"))
    return tmp_path / "one"


def former_key(checkout: Path, digits: str) -> Path:
    (checkout / ".services").mkdir(exist_ok=True)
    path = checkout / ".services" / "signing.key"
    path.unlink(missing_ok=True)  # as `tar` and `rsync` restore a file where a link is
    path.write_text(f"{digits}\n")
    return path


def test_a_new_key_belongs_to_the_user_and_all_checkouts_have_it(checkout, monkeypatch):
    line = signing.sign(b"manifest")
    key = user_folder() / "signing.key"
    assert [path.stat().st_mode & 0o777 for path in (key, key.parent)] == [0o600, 0o700]
    assert not list(checkout.iterdir())
    monkeypatch.setenv("DPO_HOME", str(checkout.with_name("two")))
    assert signing.sign(b"manifest") == line
    assert signing.signature_problem(b"manifest", line) is None
    assert redact.redact(f"x{key.read_text().strip()}x") == "x***x"


def test_the_key_of_a_checkout_moves_and_what_it_signed_stays_valid(checkout, monkeypatch, capsys):
    old = former_key(checkout, "ab" * 32)
    monkeypatch.setenv("DPO_SIGNING_KEY", "ab" * 32)
    line, mac = signing.sign(b"manifest"), signing.checkpoint_key()
    monkeypatch.delenv("DPO_SIGNING_KEY")
    assert signing.sign(b"manifest") == line
    assert signing.checkpoint_key() == mac
    assert old.readlink() == user_folder() / "signing.key"
    said = capsys.readouterr().err
    assert said == f"{old} is now {user_folder()}/signing.key: keys and passwords are kept outside of the checkout.\n"


def test_a_second_checkout_with_another_key_keeps_it_and_both_trust_each_other(checkout, monkeypatch):
    two = checkout.with_name("two")
    former_key(checkout, "ab" * 32), former_key(two, "cd" * 32)
    lines = {}
    for root in (checkout, two):
        monkeypatch.setenv("DPO_HOME", str(root))
        lines[root] = signing.sign(b"manifest")
    assert lines[checkout] != lines[two] == signing.sign(b"manifest")
    assert (user_folder() / "signing.key").read_text() == "ab" * 32 + "\n"
    assert (checkout_folder(two) / "signing.key").read_text() == "cd" * 32 + "\n"
    for root in (checkout, two):
        monkeypatch.setenv("DPO_HOME", str(root))
        for line in lines.values():
            assert signing.signature_problem(b"manifest", line) is None
            assert "is not what key" in str(signing.signature_problem(b"other", line))
    monkeypatch.setenv("DPO_SIGNING_KEY", "ef" * 32)  # a key that was named is the only one
    assert "this project's key is" in str(signing.signature_problem(b"manifest", lines[two]))


def test_no_key_is_ever_lost(checkout):
    """Neither of a checkout that gets a third key, as from a backup, nor of one whose key moved already."""
    for digits in ("ab", "cd", "ef", "ef", "ab"):
        former_key(checkout, digits * 32)
        signing.public_key()
    kept = {path.read_text().strip() for path in private.private_files()}
    assert kept == {"ab" * 32, "cd" * 32, "ef" * 32}
    (left,) = (checkout / ".services").iterdir()
    assert left.samefile(signing._default())


def test_processes_that_start_together_agree_on_the_key(checkout):
    code = "from tasks.system import signing; print(signing.public_key())"
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    former_key(checkout, "ab" * 32)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert {public for public, _ in ended} == {f"{signing.public_key()}\n"}
    assert sum(errors.count(" is now ") for _, errors in ended) == 1
    assert (user_folder() / "signing.key").read_text() == "ab" * 32 + "\n"


def test_a_run_from_before_the_upgrade_reads_the_same_files_at_the_old_place(checkout, monkeypatch):
    """Its worktree keeps the old code, which makes a file of its own where none is."""
    old = former_key(checkout, "ab" * 32)
    old.with_name("passwords.json").write_text('{"mlflow/reader": "the-first-password"}')
    public = signing.public_key()
    for path in (old, old.with_name("passwords.json")):
        now = signing._default() if path == old else keyring.private_file(path.name, checkout)
        assert not now.is_symlink()
        assert path.read_text() == now.read_text()
        assert private.Private([checkout]).contains(path)
    links = [(path, path.lstat().st_ino) for path in old.parent.iterdir()]
    assert signing.public_key() == public
    keyring.private_file("passwords.json", checkout)
    assert [(path, path.lstat().st_ino) for path in old.parent.iterdir()] == links
    shutil.rmtree(user_folder())  # as on a new machine: the key that is made is the one for both
    assert signing.public_key() != public
    assert old.read_text() == (user_folder() / "signing.key").read_text()


def test_passwords_of_a_checkout_move_and_a_restored_backup_counts(checkout):
    for text in ("first", "second"):
        former_key(checkout, "ab" * 32).with_name("passwords.json").unlink(missing_ok=True)
        (checkout / ".services" / "passwords.json").write_text(json.dumps({"mlflow/reader": f"the-{text}-password"}))
        path = keyring.private_file("passwords.json", checkout)
        assert json.loads(path.read_text()) == {"mlflow/reader": f"the-{text}-password"}
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(path.parent.glob("passwords*.json"))) == 2
    assert redact.redact("the-first-password and the-second-password") == "*** and ***"
    assert checkout_folder(checkout) != checkout_folder(checkout.with_name("two"))


def test_new_passwords_are_printed_and_those_of_a_former_folder_can_be_kept(checkout, monkeypatch):
    """As in a checkout that was renamed."""
    shown = checkout / ".services" / "passwords.shown"
    monkeypatch.setattr(passwords, "ROOT", checkout)
    monkeypatch.setattr(passwords, "SHOWN", shown)
    made = passwords.load()
    former_key(checkout, "ab" * 32)
    shown.touch()
    assert passwords.load() == made
    assert shown.exists()
    renamed = checkout.rename(checkout.with_name("renamed"))
    monkeypatch.setattr(passwords, "ROOT", renamed)
    monkeypatch.setattr(passwords, "SHOWN", renamed / ".services" / "passwords.shown")
    assert passwords.load() != made
    assert not passwords.SHOWN.exists()
    shutil.copy(checkout_folder(checkout) / "passwords.json", renamed / ".services")
    assert passwords.load() == made


def test_a_worktree_has_the_files_of_its_checkout(checkout):
    opened = checkout / ".scratch" / "opened"
    opened.mkdir(parents=True)
    for main in (checkout, "../.."):  # git writes a relative path with worktree.useRelativePaths
        (opened / ".git").write_text(f"gitdir: {main}/.git/worktrees/opened\n")
        assert checkout_folder(opened) == checkout_folder(checkout)


def test_without_a_folder_of_the_user_the_error_says_what_to_set(checkout, monkeypatch):
    (checkout / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(checkout / "file"))
    with pytest.raises(UserError, match=r"There is no folder for keys and passwords: .*Set XDG_CONFIG_HOME"):
        signing.public_key()


def test_what_configuration_quotes_are_no_secrets_of_files(checkout):
    """Other files of .services, and short or descriptive values of infra/.env, are no secrets."""
    (checkout / ".services").mkdir()
    (checkout / ".services" / "mlflow.json").write_text('{"address": "http://127.0.0.1:5000"}')
    (checkout / "infra").mkdir()
    (checkout / "infra" / ".env").write_text("POSTGRES_PASSWORD=battery-staple\nDPO_TIMEZONE=Europe/Berlin\n# a note\n")
    private.forget_values()
    text = "battery-staple at http://127.0.0.1:5000 in Europe/Berlin"
    assert redact.redact(text) == "*** at http://127.0.0.1:5000 in Europe/Berlin"
