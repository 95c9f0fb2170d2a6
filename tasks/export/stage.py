"""Stage `export`: merge the adapter, check that the merged model equals the policy, and write a standalone model.

One worker of the group `inference` loads and writes the model. This process adds the rest.

Writes data/model: safetensors, tokenizer, adapter, GGUF files with a Modelfile (`export.gguf`), README.md (the model
card) and manifest.json (what the model was made from, and a hash per file). A failed check stops the stage and keeps
the previous export (`persist` in dvc.yaml).
"""

import shutil
from pathlib import Path
from typing import Any

from tasks.artifacts.models import base_folder
from tasks.artifacts.pairs import check, pairs_file, read_rows
from tasks.cluster.worker_pool import Worker, WorkerPool
from tasks.config.cluster import load_cluster
from tasks.config.params import Params, load_params
from tasks.config.paths import CARD, MODEL, POLICY
from tasks.errors import UserError
from tasks.export.card import model_card
from tasks.export.lineage import build_manifest
from tasks.export.modelfile import modelfile
from tasks.system.files import hash_files, publish, read_json, write_json
from tasks.tracking.journal import StageJournal
from tasks.tracking.verify import MANIFEST, seal

CHECKED_PROMPTS = 8


def export(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    base = base_folder(params.source.model)
    check(pairs_file("eval"), "prepare")
    prompts = [row["prompt_ids"] for row in read_rows(pairs_file("eval"), CHECKED_PROMPTS)]
    card = read_json(CARD / "report.json")
    with publish(MODEL) as out:
        with WorkerPool(cluster, cluster.inference, Worker, "export", max_workers=1) as workers:
            folders = workers.shared_path(base), workers.shared_path(Path.cwd(), POLICY) / POLICY
            with workers.shared_output(out) as target:
                task = (_write_model, params, *folders, target, prompts, workers.zero3, card["chat_template"])
                (checks,) = workers.map("call", [task])
        if params.train.adapter:
            shutil.copytree(POLICY, out / "adapter")
        for path in out.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes 0600: no other user could serve it
        manifest = build_manifest(params, checks, base)
        (out / "README.md").write_text(model_card(params, manifest, card))
        write_json(out / MANIFEST, {**manifest, "files": hash_files(out)})
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
    params: Params, base: Path, policy: Path, out: Path, prompts: list[list[int]], zero3: bool, template: Any
) -> dict[str, Any]:
    """Write the model's files and return the checks; runs in a worker, or in all workers of a model that they share."""
    from training.exporting import merging  # imports torch, which this stage's own process does not need
    from training.models.chat import chat_pieces, keep_template

    adapter, dtype, shard_size = params.train.adapter is not None, params.export.dtype, params.export.max_shard_size
    try:
        checks, logits = merging.export(base, policy, adapter, dtype, out, shard_size, prompts, zero3)
        if zero3 and not merging.is_writer():
            return {}
        keep_template(out, template, params.prepare.chat_template_kwargs)
        if params.train.quantization:
            settings = (params.evaluate.dtype, params.train.quantization, logits, prompts)
            checks["quantized_policy"] = _rounded(merging.quantization_difference(base, policy, *settings))
        checks |= {f"gguf_{kind}": _write_gguf(out, kind, logits, prompts) for kind in params.export.gguf}
    except ValueError as error:
        raise UserError(
            f"{str(error).rstrip('.')}. Nothing was exported. Set export.dtype to float32, look for very large values "
            "in the adapter, or remove the format from export.gguf."
        ) from error
    if params.export.gguf:
        file = f"model-{params.export.gguf[-1]}.gguf"
        (out / "Modelfile").write_text(modelfile(file, chat_pieces(out)))
    return checks


def _write_gguf(out: Path, kind: str, logits: list[Any], prompts: list[list[int]]) -> dict[str, float]:
    from training.exporting import gguf  # imports torch

    target = out / f"model-{kind}.gguf"
    gguf.write(out, target, kind)
    difference = gguf.difference(target, logits, prompts)
    if not difference["kl"] <= gguf.MAX_KL[kind]:
        raise UserError(
            f"{target.name} does not contain the model: after reading it back, the mean KL of its next tokens is "
            f"{difference['kl']:.3g}, and rounding explains at most {gguf.MAX_KL[kind]}. Nothing was exported. Remove "
            f"{kind} from export.gguf."
        )
    return _rounded(difference)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 8) for name, value in values.items()}
