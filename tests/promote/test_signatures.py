"""Signatures: an export that this project did not sign, or that was changed since, is neither promoted nor loaded."""

import shutil

import pytest

from tasks.config.cluster import load_cluster
from tasks.config.paths import MODEL
from tasks.errors import UserError
from tasks.promote.champion import rollback
from tasks.promote.sign import sign
from tasks.secrets.private import user_folder
from tasks.secrets.redact import redact
from tasks.system import signing
from tasks.system.files import hash_files, read_json, sha256, write_json
from tasks.tracking import verify
from tasks.tracking.registry import registry
from tests.support.promotion import NAME, aliases, export, run


def test_rollback_refuses_a_damaged_or_forged_version(workspace, monkeypatch, tmp_path):
    """In a forged one weights, manifest, checksum and tag agree with each other; only the signature is wrong."""
    for weights in ("one", "two"):
        export(weights)
        run()
    with registry(load_cluster(), NAME) as model_registry:
        first, second = model_registry.versions()
        folder, other = model_registry.fetch(first, "model"), model_registry.fetch(second, "model")
    shutil.copytree(folder, tmp_path / "before")

    def refused(why: str) -> None:
        with pytest.raises(UserError, match=why):
            rollback()
        assert aliases()["champion"] == "2"

    (folder / "model.safetensors").write_text("eno")
    refused(r"Version 1 .* is not what was registered: model.safetensors has changed")

    shutil.rmtree(folder)
    shutil.copytree(other, folder)  # signed by us, but of another version
    refused("the hash of manifest.json is not the one in the tag manifest_sha256")

    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    signature = (folder / verify.SIGNATURE).read_text()
    (folder / "model.safetensors").write_text("evil")
    manifest = read_json(folder / "manifest.json")
    for name in (verify.MANIFEST, verify.CHECKSUM, verify.SIGNATURE):
        (folder / name).unlink()
    write_json(folder / "manifest.json", {**manifest, "files": hash_files(folder)})
    monkeypatch.setenv("DPO_SIGNING_KEY", "e" * 64)
    verify.seal(folder)
    monkeypatch.delenv("DPO_SIGNING_KEY")
    digest = sha256(folder / "manifest.json")
    folder = folder.rename(folder.with_name(digest[:12]))
    with registry(load_cluster(), NAME) as model_registry:
        model_registry.client.set_model_version_tag(NAME, "1", "manifest_sha256", digest)
    refused(r"signed by key [0-9a-f]{16}, and this project's key is")
    (folder / verify.SIGNATURE).write_text(signature)
    refused(r"it is not what key [0-9a-f]{16} signed")
    (folder / verify.SIGNATURE).unlink()
    refused("manifest.sig is missing")
    assert sign("1").startswith(f"{NAME} version 1: signed by key")  # a person vouches for it
    assert "is version 1" in rollback()


def test_an_export_without_a_signature_is_not_promoted_until_it_is_signed(workspace, monkeypatch):
    export("one")
    key = user_folder() / "signing.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (MODEL / verify.SIGNATURE).unlink()
    with pytest.raises(UserError, match=r"manifest.sig is missing: .*sign it with your key: `dpo sign data/model`"):
        run()
    with pytest.raises(UserError, match=r"manifest.sig is missing"):
        verify.require_intact(MODEL)
    sign("")
    assert run()["promoted"]
    monkeypatch.setenv("DPO_SIGNING_KEY", "a" * 64)  # another team's key
    assert "and this project's key is" in verify.problems(MODEL)[0]
    monkeypatch.delenv("DPO_SIGNING_KEY")
    public = signing.public_key()
    opened = workspace / ".scratch" / "opened"  # a worktree finds the key of its checkout
    opened.mkdir(parents=True)
    (opened / ".git").write_text(f"gitdir: {workspace}/.git/worktrees/opened\n")
    monkeypatch.setenv("DPO_HOME", str(opened))
    assert signing.public_key() == public
    monkeypatch.delenv("DPO_HOME")
    monkeypatch.setenv("DPO_SIGNING_KEY", "a" * 64)
    monkeypatch.setenv("DPO_TRUSTED_KEYS", public)
    assert verify.problems(MODEL) == []
    assert redact("the key is " + "a" * 64) == "the key is ***"


def test_verify_finds_changed_missing_and_unknown_files(workspace):
    export("weights")
    assert verify.problems(MODEL) == []
    content = bytearray((MODEL / "model.safetensors").read_bytes())
    content[3] ^= 1
    (MODEL / "model.safetensors").write_bytes(content)
    (MODEL / "evil.py").write_text("")
    changed, unknown = verify.problems(MODEL)
    assert changed.startswith("model.safetensors has changed")
    assert unknown == "evil.py is not part of this export"
    with pytest.raises(UserError, match="is not what was exported"):
        run()
    (MODEL / "model.safetensors").unlink()
    assert verify.problems(MODEL)[0] == "model.safetensors is missing"
    manifest = (MODEL / "manifest.json").read_text()
    (MODEL / "manifest.json").write_text(manifest.replace("0.97", "0.99"))
    assert verify.problems(MODEL) == ["manifest.json or manifest.sha256 has changed"]
