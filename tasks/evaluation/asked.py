"""A model asked again: its answers to held-out prompts, and what it makes of held-out pairs that it never saw.

Today's pairs have their reference in data/reference; an earlier set's is computed here by the base model, once.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.dataset.pairs import read_pairs, read_rows, with_reference
from tasks.errors import UserError
from tasks.evaluation.answers import Record, Row, held_out_prompts, records, sampled
from tasks.files import home, sha256
from tasks.models import base_folder
from tasks.params import Evaluate, Params, load_cluster
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

    def without(self, prompts: set[str]) -> "HeldOut":
        kept = [number for number, row in enumerate(self.rows) if row["prompt"] not in prompts]
        return HeldOut([self.rows[n] for n in kept], [self.pairs[n] for n in kept])


def todays(params: Params) -> HeldOut:
    pairs = read_pairs("eval")
    known = params.train.needs_reference
    return HeldOut(read_rows(PAIRS / "eval.parquet"), with_reference(pairs, "eval") if known else pairs)


def earlier(file: Path) -> HeldOut:
    """The held-out set that a version of the registry was evaluated on; its reference is still to be computed."""
    place = home() / ".scratch" / "held-out" / sha256(file)[:24]
    copy = place / PAIRS / "eval.parquet"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return HeldOut(read_rows(copy), read_pairs("eval", place))


def ready_for(params: Params, held: HeldOut, objective: Objective) -> HeldOut:
    """The same set with the base model's log-probabilities, where the objective needs them and they are not there."""
    if not objective.needs_reference or not held.pairs or held.pairs[0].ref_chosen is not None:
        return held
    from training.logps import score_pairs
    from training.model import best_device, load_model
    from training.proof import scoring

    device, wanted = best_device(), params.reference
    model = load_model(base_folder(params.source.model), wanted.dtype, device, wanted.quantization)
    with scoring(model, held.pairs, device) as scorer:
        scores = score_pairs(scorer, held.pairs, load_cluster().reference.row_tokens, device)
    pairs = [replace(p, ref_chosen=a, ref_rejected=b) for p, (a, b) in zip(held.pairs, scores, strict=True)]
    return HeldOut(held.rows, pairs)


def ask(params: Evaluate, folder: Path, held: HeldOut, objective: Objective) -> tuple[dict[str, Record], Margins]:
    """What the model in a folder answers to the set's prompts, and its margins of the set's pairs."""
    from training.model import best_device, load_model, load_tokenizer

    prompts, device = held_out_prompts(held.rows, params.prompts), best_device()
    model, tokenizer = load_model(folder, params.dtype, device), load_tokenizer(folder)
    with Bar("promote", len(prompts), "answers to held-out prompts") as bar:
        answers = sampled(params, model, (folder, None), tokenizer, prompts, bar)
    said = records(params, prompts, answers) if prompts else []
    margins = _margins(model, held, objective, device) if held.pairs else {}
    return {row["prompt"]: record for row, record in zip(prompts, said, strict=True)}, margins


def _margins(model: Any, held: HeldOut, objective: Objective, device: Any) -> Margins:
    from training.evaluation import pair_values
    from training.proof import scoring

    with scoring(model, held.pairs, device) as scorer:
        _, values = pair_values(scorer, objective, held.pairs, load_cluster().reference.row_tokens, device)
    return {
        value.id: {"id": value.id, "prompt": row["prompt"], "margin": value.margin}
        for value, row in zip(values, held.rows, strict=True)
    }


def objective_of(manifest: dict[str, Any]) -> Objective:
    """As the params in a model's manifest have it."""
    train = manifest["params"]["train"]
    return Objective(train["loss"], {name: train[name] for name in OPTIONS if train.get(name) is not None})


def refuse_other_tokens(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Pairs are tokens: a model with another tokenizer or another reference cannot be asked about them."""
    for what, one, other in (
        ("tokenizer", *(manifest["files"].get("tokenizer.json") for manifest in (ours, theirs))),
        ("base model", ours["base"]["sha256"], theirs["base"]["sha256"]),
    ):
        if one != other:
            raise UserError(f"the two models have not the same {what}, so that neither can be asked the other's pairs")
