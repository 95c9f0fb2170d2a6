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

from tests.benchmarks import kernel_profile, memory_profile
from tests.benchmarks.job import Job, Steps, Stopwatch
from tests.support.scoring import make_scorer, score_pairs
from tests.support.settings import make_settings
from training.models.compiling import compile_layers
from training.models.loading import best_device, load_model
from training.objectives.objective import Objective
from training.pairs.pair import Pair
from training.trainer import checkpoint_files, loop, memory
from training.trainer.settings import Settings

LORA: dict[str, Any] = {"rank": 16, "alpha": 32.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}


class LastStep(Exception):
    """The last step is done; evaluation and saving are not measured."""


def measure(job: Job, pairs: Sequence[Pair]) -> dict[str, Any]:
    scored, result = score(job, [_arrays(pair) for pair in pairs])
    steps, curve, kernels = Steps(job), [], None

    def log(step: int, values: dict[str, float]) -> None:
        nonlocal kernels
        if "loss" not in values:
            return
        curve.append({"step": step, **values})
        if job.profile and step == job.warmup:
            kernels = kernel_profile.start()
        if steps.done(step):
            raise LastStep

    with tempfile.TemporaryDirectory(prefix="bench-ours-") as folder:
        checkpoint_files.claim(Path(folder), "bench")
        if job.profile_memory:
            memory_profile.record()
        with suppress(LastStep):
            loop.train(_settings(job, folder), scored, {"": scored[:2]}, log, key=bytes(32))
        if kernels:
            result |= kernel_profile.stop(kernels, job.steps)
        if job.profile_memory:
            result |= memory_profile.at_peak()
        result["estimated_gib"] = memory.estimate(_settings(job, folder), 1, scored).total / 2**30
    measured = sum(map(len, in_order(job, pairs)[job.warmup * job.batch :]))
    # Without the unused ends of rows, which cost nothing.
    return {**result, **steps.speed(), "tokens_per_pair": measured / steps.pairs, "curve": curve}


def _arrays(pair: Pair) -> Pair:
    """A pair with arrays, as the pipeline reads pairs from disk."""
    parts = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
    arrays: dict[str, Any] = {part: np.asarray(getattr(pair, part), dtype=np.int32) for part in parts}
    return replace(pair, **arrays)


def score(job: Job, pairs: Sequence[Pair]) -> tuple[list[Pair], dict[str, Any]]:
    """The pairs with their reference log-probabilities, and the speed of that pass after a warm-up."""
    device = best_device()
    model = load_model(Path(job.model), job.dtype, device, job.quantization).eval()
    notes: list[str] = []
    scorer = make_scorer(model, pairs, device, notes.append)
    if torch.cuda.is_available():
        compile_layers(model)
    score_pairs(scorer, pairs[: 2 * job.batch], job.row_tokens, device)
    watch = Stopwatch()
    watch.start()
    scores = score_pairs(scorer, pairs, job.row_tokens, device)
    watch.stop()
    path = {"path": scorer.path, **({"note": notes[0]} if notes else {}), "noise": scorer.noise}
    result = {**watch.speed(len(pairs), "reference_"), "parameters": model.num_parameters(), **path}
    del model, scorer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    scored = [
        replace(pair, ref_chosen_logps=c, ref_rejected_logps=r) for pair, (c, r) in zip(pairs, scores, strict=True)
    ]
    return scored, result


def in_order(job: Job, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs in the order of our loop, for TRL to use the same."""
    from training.pairs.batches import step_pairs

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
        warmup_fraction=0.0,  # TRL's warm-up starts at a learning rate of 0, ours does not
        max_steps=job.total,
        logging_steps=job.logging_steps,
        save_steps=10**9,
        seed=job.seed,
        deterministic=job.deterministic,
        optimizer=job.optimizer,
        quantization=job.quantization,
        zero_stage=job.zero_stage,
        activation_checkpointing=job.checkpointing,
        mlp_tile_tokens=job.tile,
    )
