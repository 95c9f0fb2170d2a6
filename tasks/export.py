"""Stage `export`: merge the adapter in one process, prove that nothing changed, and write a model that stands alone.

Writes data/model: safetensors, tokenizer, the adapter, README.md (the model card) and manifest.json (the birth
certificate: what the model was made from, and a hash per file).
"""

import gc
import shutil
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.card import model_card
from tasks.errors import UserError
from tasks.files import hash_files, publish, read_json, write_json
from tasks.models import base_folder
from tasks.pairs import read_rows
from tasks.params import Params, load_params
from tasks.paths import BASE, METRICS, MODEL, PAIRS, POLICY, RAW, REFERENCE
from tasks.tracking import Run

CHECKED_PROMPTS = 8
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # of a logit: merging rounds each weight once
GREEDY_TOKENS = 16


def export(run: Run) -> None:
    params = load_params()
    with publish(MODEL) as out:
        checks = _write_model(params, out)
        _share(out)
        manifest = _manifest(params, checks)
        (out / "README.md").write_text(model_card(params, manifest))
        write_json(out / "manifest.json", {**manifest, "files": hash_files(out)})
    print(f"export: {MODEL} verified, logits differ by at most {checks['largest_logit_difference']:.2g}")
    run.artifact(MODEL / "manifest.json")
    run.artifact(MODEL / "README.md")
    run.summary({"merge_difference": checks["largest_logit_difference"]})


def _write_model(params: Params, out: Path) -> dict[str, Any]:
    """Merge and save, reload from disk, and compare with the unmerged policy on real prompts."""
    from training import adapters
    from training.model import load_model, load_tokenizer
    from training.sampling import sample

    folder, dtype = base_folder(params.source.model), params.export.dtype
    tokenizer = load_tokenizer(folder)

    def greedy(model: Any) -> str:
        return sample(model, tokenizer, prompts[:1], GREEDY_TOKENS, temperature=0.0, top_p=1.0, seed=0)[0].text

    prompts = [row["prompt_ids"] for row in read_rows(PAIRS / "eval.parquet")[:CHECKED_PROMPTS]]
    if params.train.adapter:
        policy: Any = adapters.load_adapter(load_model(folder, dtype), POLICY)
        logits, words = adapters.logits_of(policy, prompts), greedy(policy)
        policy = adapters.merge(policy)
        shutil.copytree(POLICY, out / "adapter")
    else:
        policy = load_model(POLICY, dtype)
        logits, words = adapters.logits_of(policy, prompts), greedy(policy)
    policy.save_pretrained(out, max_shard_size=params.export.max_shard_size)
    tokenizer.save_pretrained(out)
    del policy
    gc.collect()
    reloaded = load_model(out, dtype)
    difference = adapters.largest_difference(logits, adapters.logits_of(reloaded, prompts))
    same_words = greedy(reloaded) == words
    if not difference <= TOLERANCE[dtype]:
        raise UserError(
            f"The merged model is not the trained policy: its logits differ by {difference:.3g}, and rounding to "
            f"{dtype} explains {TOLERANCE[dtype]} at most. Nothing was exported. Set export.dtype to float32, or look "
            "for very large values in the adapter."
        )
    return {"largest_logit_difference": difference, "prompts": len(prompts), "same_greedy_text": same_words}


def _share(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors leaves 0600: nobody else could serve it


def _manifest(params: Params, checks: dict[str, Any]) -> dict[str, Any]:
    """What the model was made from."""
    raw, base = read_json(RAW / "manifest.json"), read_json(BASE / "manifest.json")
    return {
        "model": params.promote.model_name,
        "data": {"source": raw["source"], "sha256": raw["sha256"], "rows": raw["rows"], "pairs": hash_files(PAIRS)},
        "base": {"model": base["model"], "revision": base["revision"], "sha256": base["sha256"]},
        "reference": read_json(REFERENCE / "manifest.json"),
        "policy": hash_files(POLICY),
        "params": params.model_dump(exclude={"promote"}),
        "metrics": read_json(METRICS / "evaluate.json"),
        "merge": checks,
        "environment": _environment(),
    }


def _environment() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "transformers", "peft", "deepspeed", "ray", "datasets")
    return {name: version(name) for name in names}


if __name__ == "__main__":
    stage.main(export)
