"""What is secret does not leave: neither in texts and tracebacks nor in journals and params."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.config.cluster import load_cluster
from tasks.config.params import Params, load_params
from tasks.config.strict import read_yaml
from tasks.doctor.report import Report
from tasks.secrets import redact
from tasks.tracking.journal import StageJournal
from tasks.tracking.pipeline_run import open_run
from tests.support.workspaces import PROJECT, make_workspace

HF = "hf_" + "Ab1" * 8


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("s3://AKID:s3cr3t/pw@bucket".replace("/pw", ""), "s3cr3t"),
        ("could not reach https://anna:hunter22@host:5000/api", "hunter22"),
        ("postgresql+psycopg2://mlflow:pa55word@db:5432/mlflow", "pa55word"),
        (f"token {HF} is invalid", HF),
        ("AKIAABCDEFGHIJKLMNOP is unknown", "AKIAABCDEFGHIJKLMNOP"),
        ("GET /x?X-Amz-Signature=0f3b9c77aa&y=1", "0f3b9c77aa"),
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ('{"password": "correct0horse"}', "correct0horse"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----", "MIIabc"),
    ],
)
def test_a_secret_is_taken_out_by_its_shape(text, secret):
    assert secret in text
    assert secret not in redact.redact(text)
    assert redact.HIDDEN in redact.redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 512, token_budget=8192",
        "hub:owner/name@main and user@example.com",
        "http://127.0.0.1:5000/#/experiments/1",
        "a token: required",
        "sha256 8a0ca03388c9c74285f30d57",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact.redact(text) == text


def test_values_of_secret_variables_are_taken_out_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "not-a-known-shape")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true-or-false")  # no secret, whatever it begins with
    monkeypatch.setenv("JUDGE", "only-configuration-knows")
    content = {"a": ["x not-a-known-shape y", {"b": "true-or-false"}], "n": 1, "j": "only-configuration-knows"}
    assert redact.redacted(content)["a"] == ["x *** y", {"b": "true-or-false"}]
    assert redact.redacted(content)["j"] == "only-configuration-knows"
    redact.protect("JUDGE")  # as endpoint.py does with evaluate.endpoint.key_variable
    assert redact.redacted(content)["j"] == "***"


def test_logins_webhooks_and_short_secrets_are_taken_out(monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "admin:correct-horse")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:correct-horse")
    monkeypatch.setenv("DPO_WEBHOOK_URL", "https://hooks.example/services/T01/B02/x9y8z7")
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg://dpo:battery@db:5432/prefect")
    monkeypatch.setenv("SOME_PASSWORD", "hunter2")
    monkeypatch.setenv("OTHER_PASSWORD", "tok")
    monkeypatch.setenv("SWITCH_TOKEN", "1")
    monkeypatch.setenv("LOCAL_CONNECTION_URL", "sqlite:///")
    monkeypatch.setenv("BROKEN_WEBHOOK_URL", "http://[half")
    monkeypatch.setenv("ANOTHER_TOKEN", "True")
    for text, hidden in (
        ("login admin:correct-horse refused", "login *** refused"),
        ("password correct-horse", "password ***"),
        ("POST https://hooks.example/services/T01/B02/x9y8z7 failed", "POST *** failed"),
        ("404 for /services/T01/B02/x9y8z7", "404 for ***"),
        ("FATAL: battery is wrong for dpo", "FATAL: *** is wrong for dpo"),
        ("(hunter2) and 'tok', tok", "(***) and '***', ***"),
    ):
        assert redact.redact(text) == hidden
    for text in ("1 token of 512 tokens; True", "hunter22 and stokers", "hooks.example"):  # whole words, no switches
        assert redact.redact(text) == text


def test_params_with_a_secret_are_refused_without_repeating_it():
    content = read_yaml(PROJECT / "params.yaml")
    content["source"]["data"] = "s3://key:s3cr3tvalue@bucket/pairs.jsonl"
    with pytest.raises(ValidationError) as caught:
        Params.model_validate(content)
    assert "`source.data` holds what looks like a password or a token" in str(caught.value.errors()[0]["msg"])
    content["source"]["data"] = [{"name": "a", "data": f"hub:x/y?token={HF}", "weight": 1.0, "share": 1.0}]
    with pytest.raises(ValidationError, match=r"`source\.data\.0\.data` holds"):
        Params.model_validate(content)


def test_a_stage_says_no_secret_in_errors_and_tracebacks(tmp_path):
    code = (
        "import sys\nfrom tasks import run_stage\nfrom tasks.errors import UserError\n"
        "def failing():\n"
        "    raise {kind}('https://anna:hunter22@host and token-of-this-test')\n"
        "run_stage.run_command(failing)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "SOME_API_KEY": "token-of-this-test"}
    for kind, status in (("UserError", 2), ("RuntimeError", 1)):
        command = [sys.executable, "-c", code.format(kind=kind)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status
        assert "https://***@host and ***" in done.stderr
        assert "hunter22" not in done.stdout + done.stderr
        assert "token-of-this-test" not in done.stdout + done.stderr.replace("raise", "")


def test_journals_and_params_for_mlflow_hold_no_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workspace(tmp_path / "workspace", Path("unused")))
    monkeypatch.setenv("DPO_RUN", "run")
    monkeypatch.setenv("SOME_SECRET", "value-of-the-secret")
    cluster = load_cluster().model_copy(update={"tracking_uri": "http://anna:hunter22@127.0.0.1:9"})
    folder = open_run(load_params(), cluster)
    run = StageJournal(folder, "train")
    run.params({"url": "https://anna:hunter22@host"})
    run.tags({"note": "value-of-the-secret"})
    written = "".join(path.read_text() for path in folder.iterdir() if path.name != "settings.json")
    assert "hunter22" not in written
    assert "value-of-the-secret" not in written
    assert (folder / "settings.json").stat().st_mode & 0o077 == 0  # it needs the address, for its owner alone


def test_the_doctor_says_no_secret(capsys):
    Report().wrong("the tracking server https://anna:hunter22@host does not answer")
    assert capsys.readouterr().out == "  WRONG  the tracking server https://***@host does not answer\n"
