"""What `make up` is asked for in vain is a sentence, before anything starts."""

import socket

import psutil
import pytest

from flows import services, stack
from tasks.errors import UserError


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"BIND": "0.0.0.0"}, "BIND=0.0.0.0 would let in everybody"),
        ({"BIND": "::"}, "Set PREFECT_SERVER_API_AUTH_STRING=user:password as well"),
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


def test_pages_open_to_others_only_with_a_password() -> None:
    assert stack.settings({"BIND": "0.0.0.0", "PREFECT_SERVER_API_AUTH_STRING": "ada:secret"}).open
    assert not stack.settings({"BIND": "127.0.0.1"}).open
    assert not stack.settings({}).open


def test_a_port_that_was_asked_for_and_is_taken_is_not_replaced() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = str(holder.getsockname()[1])
        with pytest.raises(UserError, match=f"Port {number} is taken by another program. Choose another PREFECT_PORT"):
            stack.port("prefect", stack.settings({"PREFECT_PORT": number}))


def test_a_process_that_only_has_the_number_is_not_the_service() -> None:
    me = psutil.Process()
    mine = services.Service("worker", me.pid, me.create_time() - psutil.boot_time(), 1, "", "")
    assert mine.process == me
    assert services.Service("worker", me.pid, mine.began - 60, 1, "", "").process is None
