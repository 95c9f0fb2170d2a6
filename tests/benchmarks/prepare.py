"""Compare our data preparation with TRL 1.16's: the same rows, tokenizer and number of processes.

    python tests/benchmarks/prepare.py MODEL_FOLDER --rows 20000
    python tests/benchmarks/prepare.py MODEL_FOLDER --rows 1000000 --only ours

Rows are generated: conversational, about 300 tokens each. Both start from the same JSONL file, in a process that has
its libraries loaded; ours ends with Parquet, card and quarantine on disk, TRL's with its tokenised data set. Memory is
the peak over all processes of a side, as the sum of their proportional (PSS) and resident (RSS) set sizes. On a busy
machine, compare pairs per CPU second.
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
SENTENCES = 50_000  # number of distinct sentences in the rows


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(0)
    sentences = [sentence(rng) for _ in range(SENTENCES)]

    def text(shortest: int, longest: int) -> str:
        return " ".join(rng.choices(sentences, k=rng.randint(shortest, longest)))

    with path.open("w") as file:
        for number in range(count):
            prompt = {"role": "user", "content": f"Question {number}. {text(4, 9)}"}
            sides = [{"role": "assistant", "content": text(4, 11)} for _ in range(2)]
            file.write(json.dumps({"prompt": [prompt], "chosen": [sides[0]], "rejected": [sides[1]]}) + "\n")


def sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(6, 16))
    return " ".join([words[0].capitalize(), *words[1:-1], words[-1] + rng.choice(".?!")])


def ours(rows: Path, model: Path, processes: int) -> dict[str, float]:
    """Our stage in its own workspace, after `source` has copied and inspected the file."""
    import os

    import matplotlib.pyplot  # noqa: F401

    import training.models.loading  # noqa: F401
    from tasks.prepare.stage import prepare
    from tasks.source.stage import source
    from tasks.system.files import read_json
    from tasks.tracking.journal import StageJournal
    from tests.support.workspaces import make_workspace

    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        cluster = {"prepare.num_workers": processes}
        values: dict[str, Any] = {"source.data": str(rows), "prepare.max_tokens": 2048, "prepare.eval_fraction": 0.01}
        os.chdir(make_workspace(Path(folder) / "workspace", model, cluster=cluster, **values))
        source(StageJournal(Path(folder), "source"))
        began = clock()
        prepare(StageJournal(Path(folder), "prepare"))
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
    wanted: Any = SimpleNamespace(dataset_num_proc=processes, max_length=2048, truncation_mode="keep_start")
    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        began = clock()
        data = load_dataset("json", data_files=str(rows), split="train", cache_dir=folder)
        trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
        made = DPOTrainer._prepare_dataset(trainer, data, tokenizer, wanted, "train")
        spent = since(began)
        parts = ("prompt_ids", "chosen_ids", "rejected_ids")
        sample = made.select(range(min(1000, len(made))))
        tokens = sum(len(row[name]) for row in sample for name in parts) / len(sample)
    return {"pairs": len(made), **spent, "tokens": tokens}


def clock() -> tuple[float, float]:
    """Wall-clock time, and the CPU time of this process and of its finished children."""
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in used)


def since(began: tuple[float, float]) -> dict[str, float]:
    now = clock()
    return {"seconds": now[0] - began[0], "cpu_seconds": now[1] - began[1]}


def watched(side: str, rows: Path, model: Path, processes: int) -> dict[str, float]:
    """Run a side in its own process; its figures, and the peak memory of it and its children."""
    command = [sys.executable, __file__, str(model), "--side", side, "--file", str(rows), "--processes", str(processes)]
    log = rows.with_suffix(".log")  # not a pipe, which hours of progress would fill
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file)
    peak = {"pss": 0, "rss": 0}
    family = psutil.Process(child.pid)
    while child.poll() is None:
        sizes = [memory(member) for member in [family, *family.children(recursive=True)]]
        for index, name in enumerate(peak):
            peak[name] = max(peak[name], sum(size[index] for size in sizes))
        time.sleep(0.5)
    output = log.read_text()
    if child.returncode:
        sys.exit(output or f"{side} exited with {child.returncode}")
    result = json.loads(output.splitlines()[-1])
    speed = {
        "per_second": result["pairs"] / result["seconds"],
        "per_cpu_second": result["pairs"] / result["cpu_seconds"],
    }
    return {**result, **speed, **{f"{name}_gib": size / 2**30 for name, size in peak.items()}}


def memory(process: psutil.Process) -> tuple[int, int]:
    try:
        info = process.memory_full_info()
        return info.pss, info.rss
    except psutil.Error:  # the process has just ended
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
    args = parser.parse_args()
    if args.side:
        print("\n" + json.dumps({"ours": ours, "trl": trl}[args.side](args.file, args.model, args.processes)))
        return
    if args.only != "ours" and not importable("trl"):
        sys.exit(f"error: TRL is not installed. Run pip install --no-deps --target DIR {TRL} and set PYTHONPATH=DIR.")
    with tempfile.TemporaryDirectory() as folder:
        write_rows(rows := Path(folder) / "rows.jsonl", args.rows)
        for _ in range(args.repeats):
            compare([args.only] if args.only else ["ours", "trl"], rows, args.model.resolve(), args.processes)


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
