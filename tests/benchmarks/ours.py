"""Our side of a measurement: the reference pass by `score_pairs`, then training by `loop.train`."""

import gc
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks import alive
from tests.benchmarks.job import Job, Steps, Stopwatch
from tests.settings import make_settings
from training import checkpoint, loop, memory
from training.logps import score_pairs
from training.model import best_device, compile_layers, load_model
from training.objective import Objective
from training.packing import Pair
from training.proof import make_scorer
from training.settings import Settings

LORA: dict[str, Any] = {"rank": 16, "alpha": 32.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}


class Enough(Exception):
    """The last step is done; evaluation and saving are not measured."""


def measure(job: Job, pairs: Sequence[Pair]) -> dict[str, Any]:
    scored, found = score(job, [_arrays(pair) for pair in pairs])
    steps, course = Steps(job), []

    def log(step: int, values: dict[str, float]) -> None:
        if "loss" not in values:
            return
        course.append({"step": step, **values})
        if steps.done(step):
            raise Enough

    with tempfile.TemporaryDirectory(prefix="bench-ours-") as folder:
        checkpoint.claim(Path(folder), "bench")
        if job.alive:
            alive.record()
        with suppress(Enough):
            loop.train(_settings(job, folder), scored, {"": scored[:2]}, log, key=bytes(32))
        if job.alive:
            found |= alive.at_peak()
        found["estimated_gib"] = memory.estimate(_settings(job, folder), 1, scored).total / 2**30
    measured = sum(map(len, in_order(job, pairs)[job.warmup * job.batch :]))
    # Without the unused ends of rows: they are no work done.
    return {**found, **steps.speed(), "tokens_per_pair": measured / steps.pairs, "course": course}


def _arrays(pair: Pair) -> Pair:
    """As the pipeline reads pairs from disk."""
    parts = ("prompt", "chosen", "rejected", "chosen_mask", "rejected_mask")
    arrays: dict[str, Any] = {part: np.asarray(getattr(pair, part), dtype=np.int32) for part in parts}
    return replace(pair, **arrays)


def score(job: Job, pairs: Sequence[Pair]) -> tuple[list[Pair], dict[str, Any]]:
    """The pairs with their reference, and how fast it was computed once everything was warm."""
    device = best_device()
    model = load_model(Path(job.model), job.dtype, device).eval()
    scorer = make_scorer(model, pairs, device)
    if torch.cuda.is_available():
        compile_layers(model)
    score_pairs(scorer, pairs[: 2 * job.batch], job.row_tokens, device)
    watch = Stopwatch()
    watch.start()
    scores = score_pairs(scorer, pairs, job.row_tokens, device)
    watch.stop()
    found = {**watch.speed(len(pairs), "reference_"), "parameters": model.num_parameters()}
    del model, scorer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    scored = [replace(pair, ref_chosen=c, ref_rejected=r) for pair, (c, r) in zip(pairs, scores, strict=True)]
    return scored, found


def in_order(job: Job, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs as our loop comes to them, so that the peer can be given the same order."""
    from training.batches import step_pairs

    steps = (step_pairs(step, len(pairs), job.batch, job.seed) for step in range(job.total))
    return [pairs[number] for numbers in steps for number in numbers]


def _settings(job: Job, folder: str) -> Settings:
    return make_settings(
        model=job.model,
        model_name="bench",
        folder=folder,
        attempt="bench",
        objective=Objective(dict.fromkeys(job.loss, 1.0), {"beta": job.beta}),
        learning_rate=job.learning_rate,
        global_batch_size=job.batch,
        row_tokens=job.row_tokens,
        adapter=LORA if job.lora else None,
        dtype=job.dtype,
        schedule=job.schedule,
        warmup_fraction=0.0,  # the peer's warm-up starts at a rate of 0, ours does not
        max_steps=job.total,
        logging_steps=job.logging_steps,
        save_steps=10**9,
        seed=job.seed,
        deterministic=job.deterministic,
        zero_stage=job.zero_stage,
        activation_checkpointing=job.checkpointing,
    )
