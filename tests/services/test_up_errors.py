"""`dpo up` rejects invalid settings with one message before it starts anything."""

import json
import os
import socket
import stat
import tomllib
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from services import background, passwords, stack
from tasks.errors import UserError


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"BIND": "::", "PREFECT_SERVER_API_AUTH_STRING": "secret"}, "must have the form user:password"),
        ({"PORT": "many"}, "PORT is 'many'; a port is"),
        ({"DPO_WEBHOOK_URL": "hooks.example/x"}, "DPO_WEBHOOK_URL must start with"),
        ({"DPO_SILENCE_SECONDS": "30"}, "DPO_SILENCE_SECONDS is '30'; it must be a number above 30"),
        ({"DPO_TIMEZONE": "Europe/Berln", "TZ": "UTC"}, "DPO_TIMEZONE is 'Europe/Berln', which is not a time zone"),
        ({"TZ": "/etc/localtime"}, "TZ is '/etc/localtime', which is not a time zone. Set DPO_TIMEZONE to an IANA"),
    ],
)
def test_an_invalid_setting_is_rejected_with_its_name(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        stack.read_settings(env)
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
    assert stack.read_settings(env).timezone == zone


def test_pages_accept_only_host_names_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = ["127.0.0.1", "localhost", "[::1]"]
    assert (
        stack.allowed_hosts(stack.read_settings({}))
        == stack.allowed_hosts(stack.read_settings({"BIND": "127.0.0.1"}))
        == loopback
    )
    opened = stack.allowed_hosts(stack.read_settings({"BIND": "0.0.0.0"}))
    assert {*loopback, socket.gethostname()} <= set(opened)
    assert "evil.example" not in opened
    monkeypatch.setenv("DPO_ALLOWED_HOSTS", "dpo.example, train.example")
    assert stack.allowed_hosts(stack.read_settings({})) == [*loopback, "dpo.example", "train.example"]


def test_passwords_are_generated_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FOLDER", tmp_path / ".services")
    monkeypatch.setattr(passwords, "ROOT", tmp_path)
    monkeypatch.setattr(passwords, "CLIENT", tmp_path / "prefect.toml")
    old = os.umask(0)  # no protection from the umask
    try:
        login = passwords.prefect_login()
        assert passwords.write_client("http://127.0.0.1:4200/api", 'ada:a "quoted" \\ one')
    finally:
        os.umask(old)
    assert passwords.prefect_login() == login
    made = passwords.load()
    assert min(map(len, made.values())) >= 32
    assert len(set(made.values())) == len(made) == 6
    for path in (passwords.file(), passwords.CLIENT):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tomllib.loads(passwords.CLIENT.read_text())["api"]["auth_string"] == 'ada:a "quoted" \\ one'
    passwords.remove_client()
    passwords.CLIENT.write_text("[api]\nurl = 'https://theirs.example/api'\n")  # a file that the user wrote stays
    assert not passwords.write_client("http://127.0.0.1:4200/api", login)
    passwords.remove_client()
    assert "theirs" in passwords.CLIENT.read_text()


def test_a_configured_port_that_is_in_use_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = str(holder.getsockname()[1])
        message = rf"Port {number} is in use by process {os.getpid()} \(`.+`\). Set PREFECT_PORT to another"
        with pytest.raises(UserError, match=message):
            stack.choose_port("prefect", stack.read_settings({"PREFECT_PORT": number}))


def test_a_replaced_port_is_reported_with_the_process_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "FOLDER", tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        before = background.Service("mlflow", 1, 0.0, number, "", "")
        (tmp_path / "mlflow.json").write_text(json.dumps(asdict(before)))
        monkeypatch.setitem(stack.PORTS, "mlflow", ("PORT", number))
        port = stack.choose_port("mlflow", stack.read_settings({}))
    output = capsys.readouterr().out
    assert f"Port {number} is in use by process {os.getpid()} " in output
    assert f"the MLflow server listens on {port} instead" in output


def test_mlflow_accepts_posts_of_its_pages_under_every_allowed_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.server.security_utils import get_allowed_origins_from_env, should_block_cors_request

    monkeypatch.setattr(socket, "gethostname", lambda: "Trainer")
    for name, value in stack.mlflow_host_checks(stack.read_settings({"BIND": "0.0.0.0"}), 5000).items():
        monkeypatch.setenv(name, value)
    allowed = get_allowed_origins_from_env()
    for origin, blocked in (("http://trainer:5000", False), ("http://Trainer:5000", False), ("http://evil:5000", True)):
        assert should_block_cors_request(origin, "POST", allowed) is blocked, origin


def test_another_process_with_the_same_id_is_not_the_service() -> None:
    me = psutil.Process()
    mine = background.Service("worker", me.pid, me.create_time() - psutil.boot_time(), 1, "", "")
    assert mine.process == me
    assert background.Service("worker", me.pid, mine.began - 60, 1, "", "").process is None
