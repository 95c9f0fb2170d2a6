"""Compare the new model and the champion on both held-out sets: today's and the champion's."""

import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tasks.artifacts import demo
from tasks.compare.compare import evaluated_version, results_here
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.evaluate.scoring import evaluator_pool
from tasks.promote.stage import promote
from tasks.system.files import fingerprint, hash_files, read_json, write_json
from tasks.tracking import verify
from tasks.tracking.journal import StageJournal
from tasks.tracking.pipeline_run import open_run
from tasks.tracking.registry import registry

ROWS = demo.rows(0)[:200]
SET = {"evaluate.prompts": 3, "evaluate.max_new_tokens": 4, "evaluate.judge": "none", "promote.require": {}}
UNSET = {"prompt_mask": [], "label": 1.0, "margin": 0.0, "weight": 1.0, "sign": 0, "source": "rows"}
GATE = {"promote.limits": {}, "promote.max_regression": {"rewards/accuracies": 0.0}}


@pytest.fixture
def workspace(tmp_path: Path, tiny_base: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tests.support.workspaces import make_workspace

    root = make_workspace(tmp_path / "workspace", tiny_base, **SET, **GATE)
    shutil.copytree(mlflow_store, root / ".mlflow")
    monkeypatch.chdir(root)
    monkeypatch.delenv("DPO_RUN", raising=False)
    files = hash_files(tiny_base)
    sizes = {name: (tiny_base / name).stat().st_size for name in files}
    manifest = {"model": str(tiny_base), "sha256": "b" * 64, "sizes": sizes, "files": files}
    write_json(Path("data/base/manifest.json"), manifest)
    return root


def write_pairs(split: str, rows: list[dict[str, Any]], base: Path) -> None:
    """Write what the stages prepare and reference would write for these rows."""
    import pyarrow as pa

    from tasks.artifacts.pairs import PAIR_SCHEMA, REFERENCE_SCHEMA, pairs_file, read_pairs, reference_file
    from tasks.compare.reevaluate import HeldOut, add_reference
    from tasks.prepare.shards import read_shard, write_shard
    from training.models.tokenizer import load_tokenizer

    encode = load_tokenizer(base).encode
    made = []
    for row in rows:
        ids = {name: encode(row[name], add_special_tokens=False) for name in ("prompt", "chosen", "rejected")}
        tokens = {f"{name}_ids": given for name, given in ids.items()}
        masks = {f"{name}_mask": [1] * len(ids[name]) for name in ("chosen", "rejected")}
        made.append({**UNSET, "id": fingerprint(row), "prompt": row["prompt"], **tokens, **masks})
    Path("data/pairs").mkdir(parents=True, exist_ok=True)
    write_shard(Path("shard"), made)
    with pa.ipc.new_stream(pairs_file(split), PAIR_SCHEMA) as writer:
        writer.write_table(read_shard(Path("shard")))
    params = load_params()
    with evaluator_pool(load_cluster(), "prepare") as workers:
        held = add_reference(workers, params, HeldOut(made, list(read_pairs(split))), {"params": params.model_dump()})
    Path("data/reference").mkdir(exist_ok=True)
    values = [
        {"id": p.id, "chosen_logps": p.ref_chosen_logps, "rejected_logps": p.ref_rejected_logps} for p in held.pairs
    ]
    with pa.ipc.new_stream(reference_file(split), REFERENCE_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(values, REFERENCE_SCHEMA))
    write_json(Path("data/reference/manifest.json"), {"files": hash_files(Path("data/reference"))})


def make_model(base: Path, seed: int) -> None:
    """Export the base model with noise in its weights, evaluated on today's held-out pairs."""
    import torch

    from tasks.compare.reevaluate import current_held_out, reevaluate
    from tasks.config.paths import METRICS, MODEL
    from training.models.loading import load_model

    shutil.rmtree(MODEL, ignore_errors=True)
    shutil.copytree(base, MODEL)
    model = load_model(base, "float32")
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    model.save_pretrained(MODEL)
    params = load_params()
    manifest = {
        "data": {"sha256": "d" * 64, "pairs": hash_files(Path("data/pairs"))},
        "base": {"model": "base", "sha256": "b" * 64},
        "params": params.model_dump(exclude={"promote"}),
        "metrics": {},
        "checks": {},
        "made": {"commit": "c" * 40},
    }
    with evaluator_pool(load_cluster(), "evaluate") as workers:
        results = reevaluate(workers, params, MODEL, current_held_out(params), manifest)
    METRICS.mkdir(parents=True, exist_ok=True)
    samples = [{"prompt": prompt, "policy": answer} for prompt, answer in results.answers.items()]
    for name, lines in (("samples", samples), ("pairs", list(results.pairs.values()))):
        (METRICS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(METRICS / "evaluate.json", {})
    write_json(MODEL / "manifest.json", {**manifest, "files": hash_files(MODEL)})
    verify.seal(MODEL)


def promoted() -> dict[str, Any]:
    promote(StageJournal(open_run(load_params(), load_cluster()), "promote"))
    return read_json("data/metrics/promote.json")


def pair_lines() -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in map(json.loads, Path("data/metrics/pairs.jsonl").read_text().splitlines())}


def test_new_and_champion_are_compared_on_both_held_out_sets(workspace: Path, tiny_base: Path) -> None:
    rows = list({row["prompt"]: row for row in ROWS}.values())  # one row per prompt
    write_pairs("train", rows[60:80], tiny_base)
    write_pairs("eval", rows[:30], tiny_base)
    make_model(tiny_base, seed=1)
    assert promoted()["promoted"]
    champions = pair_lines()

    write_pairs("train", rows[:5] + rows[60:80], tiny_base)  # includes five of the champion's held-out prompts
    write_pairs("eval", rows[20:50], tiny_base)
    make_model(tiny_base, seed=2)
    ours = pair_lines()
    decision = promoted()
    new, old = (found["rewards/accuracies"] for found in (decision["comparison"], decision["earlier"]["comparison"]))
    assert (new["count"], old["count"]) == (30, 25)
    assert (decision["earlier"]["pairs"], decision["earlier"]["trained_on"]) == (25, 5)
    assert new["ours"] == pytest.approx(mean(line["margin"] > 0 for line in ours.values()), abs=1e-6)
    asked = [line["margin"] > 0 for line in champions.values() if line["prompt"] not in {r["prompt"] for r in rows[:5]}]
    assert old["theirs"] == pytest.approx(mean(asked), abs=1e-6)
    # The champion gives a pair the same margin as before, although it is a copy and scores other pairs with it.
    with registry(load_cluster(), "dpo-demo") as model_registry, evaluator_pool(load_cluster(), "compare") as workers:
        theirs = results_here(workers, evaluated_version(model_registry, model_registry.versions()[0]))
    both = theirs.pairs.keys() & champions.keys()
    assert len(both) == 10
    for name in both:
        assert theirs.pairs[name]["margin"] == pytest.approx(champions[name]["margin"], abs=1e-4)
    assert decision["promoted"] is False  # two noisy models: on neither set is the new one proven to be no worse
    own = [reason.endswith("on its own held-out pairs") for reason in decision["reasons"]]
    assert own == [False, True]
