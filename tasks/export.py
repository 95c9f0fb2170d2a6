"""Stage `export`: merge the adapter, prove that nothing changed, and write a model that stands alone.

One worker of the group `evaluate` loads and writes the model (tasks/machines/pool.py); this process adds the rest.

Writes data/model: safetensors, tokenizer, the adapter, GGUF files with a Modelfile where asked for, README.md (the
model card) and manifest.json (the birth certificate: what the model was made from and by, and a hash per file). A check
that fails stops the stage, and the export of before is kept (dvc.yaml says `persist`).
"""

import shutil
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.dataset.pairs import check, read_rows
from tasks.errors import UserError
from tasks.files import hash_files, publish, read_json, write_json
from tasks.machines.pool import Caller, Workers
from tasks.models import base_folder
from tasks.params import Params, load_cluster, load_params
from tasks.paths import CARD, MODEL, PAIRS, POLICY
from tasks.release import serve
from tasks.release.card import model_card
from tasks.release.lineage import manifest
from tasks.release.verify import MANIFEST, seal
from tasks.tracking.journal import Run

CHECKED_PROMPTS = 8


def export(run: Run) -> None:
    params, cluster = load_params(), load_cluster()
    base = base_folder(params.source.model)
    check(PAIRS / "eval.parquet", "prepare")
    prompts = [row["prompt_ids"] for row in read_rows(PAIRS / "eval.parquet")[:CHECKED_PROMPTS]]
    with publish(MODEL) as out:
        with Workers(cluster, cluster.evaluate, Caller, "export", most=1) as workers:
            folders = workers.folder(base), workers.folder(Path.cwd(), POLICY) / POLICY
            with workers.output(out) as target:
                (checks,) = workers.map("call", [(_write_model, params, *folders, target, prompts, workers.split)])
        if params.train.adapter:
            shutil.copytree(POLICY, out / "adapter")
        _share(out)
        content = manifest(params, checks, base)
        (out / "README.md").write_text(model_card(params, content, read_json(CARD / "report.json")))
        write_json(out / MANIFEST, {**content, "files": hash_files(out)})
        seal(out)
    print(f"export: {MODEL} verified, logits differ by at most {checks['largest_logit_difference']:.2g}")
    if "quantized_policy" in checks:
        print(
            f"export: the merged {params.export.dtype} model is not the {params.train.quantization} policy that was "
            f"evaluated: the mean KL of next tokens is {checks['quantized_policy']['kl']:.3g}"
        )
    run.artifact(MODEL / MANIFEST)
    run.artifact(MODEL / "README.md")
    run.summary({"merge_difference": checks["largest_logit_difference"]})


def _write_model(
    params: Params, base: Path, policy: Path, out: Path, prompts: list[list[int]], split: bool
) -> dict[str, Any]:
    """In a worker of the group `evaluate`, or in all where they share the model: its files, and what was checked."""
    from training import merging

    adapter, dtype, shard = params.train.adapter is not None, params.export.dtype, params.export.max_shard_size
    try:
        checks, logits = merging.export(base, policy, adapter, dtype, out, shard, prompts, split)
        if split and not merging.writes():
            return {}
        if params.train.quantization:
            given = (params.evaluate.dtype, params.train.quantization, logits, prompts)
            checks["quantized_policy"] = _rounded(merging.quantization_difference(base, policy, *given))
        checks |= {f"gguf_{kind}": _write_gguf(out, kind, logits, prompts) for kind in params.export.gguf}
    except ValueError as error:
        raise UserError(
            f"{str(error).rstrip('.')}. Nothing was exported. Set export.dtype to float32, look for very large values "
            "in the adapter, or leave the format out of export.gguf."
        ) from error
    if params.export.gguf:
        (out / "Modelfile").write_text(_modelfile(out, params.export.gguf[-1]))
    return checks


def _write_gguf(out: Path, kind: str, logits: list[Any], prompts: list[list[int]]) -> dict[str, float]:
    from training import gguf

    target = out / f"model-{kind}.gguf"
    gguf.write(out, target, kind)
    found = gguf.difference(target, logits, prompts)
    if not found["kl"] <= gguf.MOST_KL[kind]:
        raise UserError(
            f"{target.name} read back is not the model: the mean KL of its next tokens is {found['kl']:.3g}, and "
            f"rounding explains {gguf.MOST_KL[kind]} at most. Nothing was exported. Leave {kind} out of export.gguf."
        )
    return _rounded(found)


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 8) for name, value in found.items()}


def _modelfile(out: Path, kind: str) -> str:
    from training.chat import pieces
    from training.model import load_tokenizer

    return serve.modelfile(f"model-{kind}.gguf", pieces(load_tokenizer(out)))


def _share(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors leaves 0600: nobody else could serve it


if __name__ == "__main__":
    stage.main(export)
