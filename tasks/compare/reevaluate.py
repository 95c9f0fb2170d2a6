"""Evaluate an exported model again, on a held-out set other than its own: sampled answers and reward margins.

The reference log-probabilities of today's pairs are in data/reference. Those of another set are computed here by the
base model.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.models import base_folder
from tasks.artifacts.pairs import PairTable, open_table, pairs_file, read_pairs, read_rows
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.old_train import to_new_form
from tasks.config.params import Params
from tasks.errors import UserError
from tasks.evaluate.answers import Record, held_out_prompts, judge_answers
from tasks.evaluate.drawing import sample_answers
from tasks.evaluate.held_out import PairRow
from tasks.evaluate.sampler import Weights
from tasks.evaluate.scoring import pair_values, split_logps, token_values
from tasks.system.progress import Bar
from training.objectives.mixture import SHARED
from training.pairs.pair import Pair

if TYPE_CHECKING:
    from training.objectives.objective import Objective


@dataclass(frozen=True)
class HeldOut:
    """A held-out set: its rows, and the same pairs with their reference log-probabilities where known."""

    rows: list[PairRow]
    pairs: list[Pair]
    quantization: str | None = None  # of the base model that computed the reference

    def without(self, prompts: set[str]) -> "HeldOut":
        kept = [number for number, row in enumerate(self.rows) if row["prompt"] not in prompts]
        return replace(self, rows=[self.rows[n] for n in kept], pairs=[self.pairs[n] for n in kept])


@dataclass(frozen=True)
class ModelResults:
    """A model's results on a held-out set: its answer by prompt, and the margin of each pair by the pair's id."""

    answers: dict[str, Record]
    pairs: dict[str, dict[str, Any]]


def current_held_out(params: Params) -> HeldOut:
    pairs = read_pairs("eval", params.train.needs_reference)
    return HeldOut(read_rows(pairs_file("eval")), list(pairs), params.reference.quantization)


def stored_held_out(file: Path) -> HeldOut:
    """The held-out set of a registered version, without reference log-probabilities."""
    return HeldOut(read_rows(file), list(PairTable(open_table(file))))


def add_reference(workers: WorkerPool, params: Params, held_out: HeldOut, manifest: dict[str, Any]) -> HeldOut:
    """The set with the reference that the manifest's model was trained against, computed if it is missing."""
    pairs, quantization = held_out.pairs, _quantization(manifest)
    known = bool(pairs) and pairs[0].ref_chosen_logps is not None and held_out.quantization == quantization
    if not pairs or known or not _objective(manifest).needs_reference:
        return held_out
    base = workers.shared_path(base_folder(params.source.model))
    values = token_values(workers, Weights(base, base, params.reference.dtype, quantization), pairs)
    logps = zip(pairs, split_logps(values, pairs), strict=True)
    pairs = [replace(pair, ref_chosen_logps=chosen, ref_rejected_logps=rejected) for pair, (chosen, rejected) in logps]
    return HeldOut(held_out.rows, pairs, quantization)


def reevaluate(
    workers: WorkerPool, params: Params, folder: Path, held_out: HeldOut, manifest: dict[str, Any]
) -> ModelResults:
    """The answers of the exported model in a folder to the set's prompts, and its margins on the set's pairs."""
    prompts = held_out_prompts(held_out.rows, params.evaluate.prompts)
    weights = evaluated_weights(workers, params, folder, manifest)
    with Bar(workers.stage, len(prompts), "answers") as bar:
        answers = sample_answers(workers, params.evaluate, weights, [row["prompt_ids"] for row in prompts], bar.more)
    with Bar(workers.stage, len(held_out.pairs), "held-out pairs") as bar:
        tokens = token_values(workers, weights, held_out.pairs, bar.more)
    records = judge_answers(workers, params.evaluate, prompts, answers) if prompts else []
    _, values = pair_values(workers, _objective(manifest), held_out.pairs, tokens) if held_out.pairs else ({}, [])
    return ModelResults(
        {row["prompt"]: record for row, record in zip(prompts, records, strict=True)},
        {
            value.id: {"id": value.id, "prompt": row["prompt"], "margin": value.margin, "sign": value.sign}
            for value, row in zip(values, held_out.rows, strict=True)
        },
    )


def evaluated_weights(workers: WorkerPool, params: Params, folder: Path, manifest: dict[str, Any]) -> Weights:
    """The policy that `evaluate` measured: after QLoRA the adapter on the quantized base, else the merged model."""
    quantization, exported = _quantization(manifest), workers.shared_path(folder)
    if quantization is None:
        return Weights(exported, exported, params.evaluate.dtype)
    base = workers.shared_path(base_folder(params.source.model))
    return Weights(base, exported, params.evaluate.dtype, quantization, exported / "adapter")


def require_same_tokens(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Pairs are stored as tokens: a model with another tokenizer or base model cannot be evaluated on them."""
    tokenizers = {manifest["files"].get("tokenizer.json") for manifest in (ours, theirs)}
    bases = {manifest["base"]["sha256"] for manifest in (ours, theirs)}
    for part, hashes in (("tokenizer", tokenizers), ("base model", bases)):
        if len(hashes) > 1:
            raise UserError(
                f"the two models do not have the same {part}, so neither can be evaluated on the other's pairs"
            )


def _objective(manifest: dict[str, Any]) -> "Objective":
    """The training objective of a manifest's model."""
    from training.objectives.objective import Objective  # loads torch; a first champion is compared with nothing

    train = to_new_form(manifest["params"])["train"]
    return Objective(train["loss"], {name: train[name] for name in SHARED if train.get(name) is not None})


def _quantization(manifest: dict[str, Any]) -> str | None:
    return manifest["params"]["train"].get("quantization")
