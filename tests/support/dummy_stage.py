"""A stage that does nothing: the fixture `dummy_repo` copies it into a repository as tasks/dummy.py.

DUMMY=train:user|crash|once|slow|sleep|sessions|drift makes that stage misbehave, promote:wait makes promote wait for
approval, and promote:win makes a champion. DUMMY=train:user>0.4 does so only if train.beta is above 0.4. A run on a
worker, whose environment a test cannot set, reads the same from .scratch/dummy.json, by its train.beta. Each execution
appends the stage's name to .scratch/ran.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

stage = sys.argv[1]
output = Path("data") / stage
marks = Path(os.environ["DPO_HOME"]) / ".scratch"
beta = yaml.safe_load(Path("params.yaml").read_text())["train"]["beta"]
by_beta = json.loads((marks / "dummy.json").read_text()) if (marks / "dummy.json").exists() else {}
target, _, behaviour = (os.environ.get("DUMMY") or by_beta.get(str(beta), "")).partition(":")
behaviour = behaviour if target == stage else ""
behaviour, _, above = behaviour.partition(">")
behaviour = behaviour if not above or beta > float(above) else ""

marks.mkdir(exist_ok=True)
with (marks / "ran").open("a") as file:
    file.write(f"{stage}\n")
print(f"{stage}: 1/2 steps, eta 0:01", flush=True)
if behaviour == "user":
    print("a word before", flush=True)
    print("error: pairs.jsonl line 3 is broken.\nMend it.", file=sys.stderr)
    sys.exit(2)
if behaviour == "crash" or (behaviour == "once" and not (marks / "crashed").exists()):
    (marks / "crashed").touch()
    sys.exit("the worker is gone")
if behaviour == "slow":
    time.sleep(6)
if behaviour == "sessions":  # as Ray does: a process in a session of its own, and one whose parent is gone
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], text=True)
    (marks / "pids").write_text(f"{os.getpid()} {away.pid} {int(orphan)}")
    time.sleep(600)
if behaviour == "sleep":
    below = subprocess.Popen(["sleep", "600"])
    (marks / "pids").write_text(f"{os.getpid()} {below.pid}")
    time.sleep(600)
print(f"{stage}: 2/2 steps, eta 0:00", flush=True)

if stage == "promote":
    reasons = [] if behaviour in ("wait", "win") else ["rewards/accuracies is 0.5, below <0.9>"]
    decision = {"model": "dpo-demo", "version": "7", "alias": "champion", "already": False, "rolled_back": ""}
    decision |= {"promoted": behaviour == "win", "waiting": behaviour == "wait", "reasons": reasons, "comparison": {}}
    Path("data/metrics/promote.json").write_text(json.dumps(decision))
    if behaviour == "win":
        from tasks.promote import outbox

        details = "against version 6: kind +0.02; other data"
        run = os.environ["DPO_RUN"]
        outbox.add("dpo-demo", "7", "champion", "it passed the gate", run, details).finish()
    sys.exit(0)
output.mkdir(parents=True, exist_ok=True)
(output / "out.json").write_text(json.dumps(yaml.safe_load(Path("params.yaml").read_text())[stage]) + behaviour)
if stage == "source":
    for name in ("raw", "base"):
        (Path("data") / name).mkdir(exist_ok=True)
        manifest = {"source": "dummy", "model": "dummy", "sha256": "0"}
        (Path("data") / name / "manifest.json").write_text(json.dumps(manifest))
if stage == "evaluate":
    metrics = {
        "rewards/accuracies": 0.98,
        "rewards/margins": beta,
        "samples": {"base": {"kind": 0.5}, "policy": {"kind": 0.97}},
    }
    (output / "evaluate.json").write_text(json.dumps(metrics))
    sample = {
        "prompt": "<script>alert(1)</script> [a](http://b.c) | x",
        "base": {"text": "no", "kind": False, "correct": True},
        "policy": {"text": "*yes*", "kind": True, "correct": True},
    }
    (output / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    metrics_folder = Path("data") / "metrics"
    metrics_folder.mkdir(exist_ok=True)
    for name in ("evaluate.json", "samples.jsonl"):
        (metrics_folder / name).write_bytes((output / name).read_bytes())
