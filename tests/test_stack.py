"""What `make up` is asked for in vain is a sentence, before anything starts."""

import json
import os
import re
import socket
import stat
import tomllib
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from flows import passwords, services, stack
from tasks.errors import UserError


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"BIND": "::", "PREFECT_SERVER_API_AUTH_STRING": "secret"}, "must be user:password"),
        ({"PORT": "many"}, "PORT must be a port"),
        ({"DPO_WEBHOOK_URL": "hooks.example/x"}, "DPO_WEBHOOK_URL must begin with"),
        ({"DPO_SILENCE_SECONDS": "30"}, "more than a heartbeat's 30 seconds"),
        ({"DPO_TIMEZONE": "Europe/Berln", "TZ": "UTC"}, "DPO_TIMEZONE is 'Europe/Berln', which is not a time zone"),
        ({"TZ": "/etc/localtime"}, "TZ is '/etc/localtime', which is not a time zone. Set DPO_TIMEZONE to an IANA"),
    ],
)
def test_what_is_asked_for_in_vain_is_a_sentence(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        stack.settings(env)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("env", "zone"),
    [
        ({}, "UTC"),
        ({"DPO_TIMEZONE": "", "TZ": ":Asia/Tokyo"}, "Asia/Tokyo"),
        ({"DPO_TIMEZONE": "Europe/Berlin", "TZ": "Asia/Tokyo"}, "Europe/Berlin"),
    ],
)
def test_schedules_follow_the_time_zone_of_the_environment(env: dict[str, str], zone: str) -> None:
    assert stack.settings(env).timezone == zone


def test_pages_answer_to_the_names_of_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = ["127.0.0.1", "localhost", "[::1]"]
    assert stack.hosts(stack.settings({})) == stack.hosts(stack.settings({"BIND": "127.0.0.1"})) == loopback
    opened = stack.hosts(stack.settings({"BIND": "0.0.0.0"}))
    assert {*loopback, socket.gethostname()} <= set(opened)
    assert "evil.example" not in opened
    monkeypatch.setenv("DPO_ALLOWED_HOSTS", "dpo.example, train.example")
    assert stack.hosts(stack.settings({})) == [*loopback, "dpo.example", "train.example"]


def test_passwords_are_made_once_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "FOLDER", tmp_path / ".services")
    monkeypatch.setattr(passwords, "FILE", tmp_path / ".services" / "passwords.json")
    monkeypatch.setattr(passwords, "CLIENT", tmp_path / "prefect.toml")
    old = os.umask(0)  # the most careless one
    try:
        login = passwords.prefect_login()
        assert passwords.write_client("http://127.0.0.1:4200/api", 'ada:a "quoted" \\ one')
    finally:
        os.umask(old)
    assert passwords.prefect_login() == login
    made = passwords.load()
    assert min(map(len, made.values())) >= 32
    assert len(set(made.values())) == len(made) == 5
    for path in (passwords.FILE, passwords.CLIENT):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tomllib.loads(passwords.CLIENT.read_text())["api"]["auth_string"] == 'ada:a "quoted" \\ one'
    passwords.remove_client()
    passwords.CLIENT.write_text("[api]\nurl = 'https://theirs.example/api'\n")  # a person's own file stays
    assert not passwords.write_client("http://127.0.0.1:4200/api", login)
    passwords.remove_client()
    assert "theirs" in passwords.CLIENT.read_text()


def test_a_port_that_was_asked_for_and_is_taken_is_not_replaced() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = str(holder.getsockname()[1])
        who = re.escape(f"process {os.getpid()} ({psutil.Process().name()})")
        with pytest.raises(UserError, match=f"Port {number} is taken by {who}. Choose another PREFECT_PORT"):
            stack.port("prefect", stack.settings({"PREFECT_PORT": number}))


def test_another_port_than_before_is_said_with_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "FOLDER", tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        before = services.Service("mlflow", 1, 0.0, number, "", "")
        (tmp_path / "mlflow.json").write_text(json.dumps(asdict(before)))
        monkeypatch.setitem(stack.PORTS, "mlflow", ("PORT", number))
        found = stack.port("mlflow", stack.settings({}))
    said = capsys.readouterr().out
    assert f"Port {number} is taken by process {os.getpid()} " in said
    assert f"MLflow's server listens on {found} instead" in said


def test_mlflow_takes_what_its_page_posts_under_every_name_that_it_answers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.server.security_utils import get_allowed_origins_from_env, should_block_cors_request

    monkeypatch.setattr(socket, "gethostname", lambda: "Trainer")
    for name, value in stack.mlflow_names(stack.settings({"BIND": "0.0.0.0"}), 5000).items():
        monkeypatch.setenv(name, value)
    allowed = get_allowed_origins_from_env()
    for origin, blocked in (("http://trainer:5000", False), ("http://Trainer:5000", False), ("http://evil:5000", True)):
        assert should_block_cors_request(origin, "POST", allowed) is blocked, origin


def test_a_process_that_only_has_the_number_is_not_the_service() -> None:
    me = psutil.Process()
    mine = services.Service("worker", me.pid, me.create_time() - psutil.boot_time(), 1, "", "")
    assert mine.process == me
    assert services.Service("worker", me.pid, mine.began - 60, 1, "", "").process is None
