"""Preparing pairs: ours against TRL 1.16's, the same rows, tokenizer and number of processes, one after the other.

    python tests/benchmarks/prepare.py MODEL_FOLDER --rows 20000
    python tests/benchmarks/prepare.py MODEL_FOLDER --rows 1000000 --only ours

Rows are generated: conversational, about 300 tokens each. Both start from the same JSONL file, in a process that has
its libraries loaded; ours ends with Parquet, card and quarantine on disk, TRL's with its tokenised data set. Memory is
the peak over all processes of a side, as the sum of their own shares (PSS) and of their resident sets (RSS). On a busy
machine compare pairs per second of processor time.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))
TRL = "trl==1.16.0"
WORDS = """
the a of to and in is it that was for on are with they be at one have this from or had by hot but some what there we can
out other were all your when up use word how said an each she which do their time if will way about many then them would
write like so these her long make thing see him two has look more day could go come did my sound no most number who over
know water than call first people may down side been now find any new work part take get place made live where after
back little only round man year came show every good me give our under name very through just form much great think
say help low line before turn cause same mean differ move right boy old too does tell sentence set three want
""".split()  # noqa: SIM905
SENTENCES = 50_000  # that rows are made of


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(0)
    sentences = [sentence(rng) for _ in range(SENTENCES)]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(sentences, k=rng.randint(least, most)))

    with path.open("w") as file:
        for number in range(count):
            prompt = {"role": "user", "content": f"Question {number}. {text(4, 9)}"}
            sides = [{"role": "assistant", "content": text(4, 11)} for _ in range(2)]
            file.write(json.dumps({"prompt": [prompt], "chosen": [sides[0]], "rejected": [sides[1]]}) + "\n")


def sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(6, 16))
    return " ".join([words[0].capitalize(), *words[1:-1], words[-1] + rng.choice(".?!")])


def ours(rows: Path, model: Path, processes: int) -> dict[str, float]:
    """The stage itself, in a workspace of its own; `source` has copied and inspected the file before."""
    import os

    import matplotlib.pyplot  # noqa: F401

    import training.model  # noqa: F401
    from tasks.files import read_json
    from tasks.prepare import prepare
    from tasks.source import source
    from tasks.tracking.journal import Run
    from tests.workspaces import make_workspace

    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        cluster = {"prepare.num_workers": processes}
        values: dict[str, Any] = {"source.data": str(rows), "prepare.max_tokens": 2048, "prepare.eval_fraction": 0.01}
        os.chdir(make_workspace(Path(folder) / "workspace", model, cluster=cluster, **values))
        source(Run(Path(folder), "source"))
        began = clock()
        prepare(Run(Path(folder), "prepare"))
        spent = since(began)
        report = read_json("data/card/report.json")
    tokens = sum(spread["mean"] for spread in report["tokens"].values())
    return {"pairs": sum(report["pairs"].values()), **spent, "tokens": tokens}


def trl(rows: Path, model: Path, processes: int) -> dict[str, float]:
    from datasets import disable_caching, disable_progress_bars, load_dataset
    from transformers import AutoTokenizer
    from trl import DPOTrainer

    disable_caching()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = SimpleNamespace(dataset_num_proc=processes, max_length=2048, truncation_mode="keep_start")
    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        began = clock()
        data = load_dataset("json", data_files=str(rows), split="train", cache_dir=folder)
        made = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=tokenizer), data, tokenizer, wanted, "train")
        spent = since(began)
        parts = ("prompt_ids", "chosen_ids", "rejected_ids")
        sample = made.select(range(min(1000, len(made))))
        tokens = sum(len(row[name]) for row in sample for name in parts) / len(sample)
    return {"pairs": len(made), **spent, "tokens": tokens}


def clock() -> tuple[float, float]:
    """Now, and the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def since(began: tuple[float, float]) -> dict[str, float]:
    now = clock()
    return {"seconds": now[0] - began[0], "cpu_seconds": now[1] - began[1]}


def watched(side: str, rows: Path, model: Path, processes: int) -> dict[str, float]:
    """A side in a process of its own, its figures, and the most memory that it and its children had."""
    command = [sys.executable, __file__, str(model), "--side", side, "--file", str(rows), "--processes", str(processes)]
    log = rows.with_suffix(".log")  # not a pipe: hours of progress would fill it
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file)
    peak = {"pss": 0, "rss": 0}
    family = psutil.Process(child.pid)
    while child.poll() is None:
        sizes = [memory(member) for member in [family, *family.children(recursive=True)]]
        for place, name in enumerate(peak):
            peak[name] = max(peak[name], sum(size[place] for size in sizes))
        time.sleep(0.5)
    said = log.read_text()
    if child.returncode:
        sys.exit(said or f"{side} ended with {child.returncode}")
    result = json.loads(said.splitlines()[-1])
    speed = {
        "per_second": result["pairs"] / result["seconds"],
        "per_cpu_second": result["pairs"] / result["cpu_seconds"],
    }
    return {**result, **speed, **{f"{name}_gib": size / 2**30 for name, size in peak.items()}}


def memory(process: psutil.Process) -> tuple[int, int]:
    try:
        info = process.memory_full_info()
        return info.pss, info.rss
    except psutil.Error:  # it has just ended
        return 0, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=["ours", "trl"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print("\n" + json.dumps({"ours": ours, "trl": trl}[given.side](given.file, given.model, given.processes)))
        return
    if given.only != "ours" and not importable("trl"):
        sys.exit(f"TRL is not installed: pip install --no-deps --target DIR {TRL}, then PYTHONPATH=DIR and this again.")
    with tempfile.TemporaryDirectory() as folder:
        write_rows(rows := Path(folder) / "rows.jsonl", given.rows)
        for _ in range(given.repeats):
            compare([given.only] if given.only else ["ours", "trl"], rows, given.model.resolve(), given.processes)


def compare(sides: list[str], rows: Path, model: Path, processes: int) -> None:
    made = {}
    for side in sides:
        made[side] = watched(side, rows, model, processes)
        figures = ", ".join(f"{name} {value:,.2f}" for name, value in made[side].items())
        print(f"{side:5} {figures}", flush=True)
    if len(made) == 2:
        for name in ("per_second", "per_cpu_second"):
            print(f"ours/trl {name} {made['ours'][name] / made['trl'][name]:.2f}", flush=True)


def importable(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    main()
