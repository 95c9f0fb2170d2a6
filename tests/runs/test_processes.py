"""A child ends with all its descendants, wherever they are."""

import os
import subprocess
import sys

import psutil

from tasks.system import processes

FAMILY = """
import os, subprocess, time
away = subprocess.Popen(["sleep", "600"], start_new_session=True)
orphan = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], text=True)
print(os.getpid(), away.pid, orphan, flush=True)
time.sleep(600)
"""


def test_descendants_in_sessions_of_their_own_end_after_the_grace_period(tmp_path, monkeypatch):
    """As Ray's processes, which get no SIGTERM from us."""
    monkeypatch.setattr(processes, "GRACE", 1.0)
    with processes.spawn([sys.executable, "-c", FAMILY], tmp_path, os.environ, subprocess.PIPE) as process:
        family = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(family) == 3
        assert all(map(processes.is_running, family))
    assert not any(map(processes.is_running, family))
