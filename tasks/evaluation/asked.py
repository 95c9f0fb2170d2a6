"""A model asked again: its answers to held-out prompts, and what it makes of held-out pairs that it never saw.

Today's pairs have their reference in data/reference; an earlier set's is computed here by the base model, once.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.dataset.pairs import read_pairs, read_rows, with_reference
from tasks.errors import UserError
from tasks.evaluation.answers import Record, Row, held_out_prompts, records
from tasks.evaluation.evaluator import Weights
from tasks.evaluation.sharding import logps, pair_values, sampled, token_values
from tasks.files import home, sha256
from tasks.machines.pool import Workers
from tasks.models import base_folder
from tasks.params import Params
from tasks.paths import PAIRS
from tasks.progress import Bar
from training.objective import Objective
from training.options import OPTIONS
from training.packing import Pair

Margins = dict[str, dict[str, Any]]  # by pair id, as compare.Side has them


@dataclass(frozen=True)
class HeldOut:
    """A held-out set: its rows, and the same pairs with their reference where that is known."""

    rows: list[Row]
    pairs: list[Pair]
    quantization: str | None = None  # of the base model that computed the reference

    def without(self, prompts: set[str]) -> "HeldOut":
        kept = [number for number, row in enumerate(self.rows) if row["prompt"] not in prompts]
        return replace(self, rows=[self.rows[n] for n in kept], pairs=[self.pairs[n] for n in kept])


def todays(params: Params) -> HeldOut:
    pairs = read_pairs("eval")
    pairs = with_reference(pairs, "eval") if params.train.needs_reference else pairs
    return HeldOut(read_rows(PAIRS / "eval.parquet"), pairs, params.reference.quantization)


def earlier(file: Path) -> HeldOut:
    """The held-out set that a version of the registry was evaluated on; its reference is still to be computed."""
    place = home() / ".scratch" / "held-out" / sha256(file)[:24]
    copy = place / PAIRS / "eval.parquet"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return HeldOut(read_rows(copy), read_pairs("eval", place))


def ready_for(workers: Workers, params: Params, held: HeldOut, manifest: dict[str, Any]) -> HeldOut:
    """The same set with the reference that the manifest's model was trained against, computed where it is missing."""
    quantization = _quantization(manifest)
    known = bool(held.pairs) and held.pairs[0].ref_chosen is not None and held.quantization == quantization
    if not objective_of(manifest).needs_reference or not held.pairs or known:
        return held
    base = str(workers.folder(base_folder(params.source.model)))
    values = token_values(workers, Weights(base, base, params.reference.dtype, quantization), held.pairs)
    scores = zip(held.pairs, logps(values, held.pairs), strict=True)
    return HeldOut(held.rows, [replace(p, ref_chosen=a, ref_rejected=b) for p, (a, b) in scores], quantization)


def ask(
    workers: Workers, params: Params, folder: Path, held: HeldOut, manifest: dict[str, Any]
) -> tuple[dict[str, Record], Margins]:
    """What the exported model in a folder answers to the set's prompts, and its margins of the set's pairs."""
    prompts = held_out_prompts(held.rows, params.evaluate.prompts)
    model = evaluated_weights(workers, params, folder, manifest)
    with Bar(workers.stage, len(prompts) + len(held.pairs), "answers and held-out pairs") as bar:
        answers = sampled(workers, params.evaluate, model, [row["prompt_ids"] for row in prompts], bar.more)
        values = token_values(workers, model, held.pairs, bar.more)
    margins = _margins(workers, held, objective_of(manifest), values) if held.pairs else {}
    said = records(workers, params.evaluate, prompts, answers) if prompts else []
    return {row["prompt"]: record for row, record in zip(prompts, said, strict=True)}, margins


def evaluated_weights(workers: Workers, params: Params, folder: Path, manifest: dict[str, Any]) -> Weights:
    """The policy that `evaluate` measured: after QLoRA the adapter on the quantized base, else the merged model."""
    quantization, exported = _quantization(manifest), str(workers.folder(folder))
    if quantization is None:
        return Weights(exported, exported, params.evaluate.dtype)
    base = str(workers.folder(base_folder(params.source.model)))
    return Weights(base, exported, params.evaluate.dtype, quantization, str(Path(exported) / "adapter"))


def _margins(workers: Workers, held: HeldOut, objective: Objective, tokens: list[Any]) -> Margins:
    _, values = pair_values(workers, objective, held.pairs, tokens)
    return {
        value.id: {"id": value.id, "prompt": row["prompt"], "margin": value.margin}
        for value, row in zip(values, held.rows, strict=True)
    }


def objective_of(manifest: dict[str, Any]) -> Objective:
    """As the params in a model's manifest have it."""
    train = manifest["params"]["train"]
    return Objective(train["loss"], {name: train[name] for name in OPTIONS if train.get(name) is not None})


def _quantization(manifest: dict[str, Any]) -> str | None:
    return manifest["params"]["train"].get("quantization")


def refuse_other_tokens(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Pairs are tokens: a model with another tokenizer or another reference cannot be asked about them."""
    for what, one, other in (
        ("tokenizer", *(manifest["files"].get("tokenizer.json") for manifest in (ours, theirs))),
        ("base model", ours["base"]["sha256"], theirs["base"]["sha256"]),
    ):
        if one != other:
            raise UserError(f"the two models have not the same {what}, so that neither can be asked the other's pairs")
