"""The training loop: pairs with reference log-probabilities in, an aligned policy out.

Runs under any launcher that sets the usual rank variables (Ray Train here, torchrun elsewhere), or alone.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training import adapters, batches, checkpoint, engine
from training.dtypes import DTYPES
from training.logps import TOLERANCE, check_packing, row_logps
from training.losses import Objective
from training.metrics import Window, row_metrics, row_pairs
from training.model import load_model
from training.packing import Pair, Row, build_row
from training.settings import Mismatch, Settings

Log = Callable[[int, dict[str, float]], None]


def train(settings: Settings, pairs: Sequence[Pair], held_out: Sequence[Pair], log: Log) -> None:
    """Train and write `policy` into the settings' folder. `log` is called on rank 0 alone."""
    rank, _ = engine.start_distributed()
    log = log if rank == 0 else _silent
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    model = build_policy(settings, device)
    check_packing(model, _shortest(pairs, 2), DTYPES[settings.dtype], device)
    config = engine.deepspeed_config(settings.zero_stage, settings.offload, settings.dtype, settings.max_grad_norm)
    policy = engine.initialize(model, config, settings.learning_rate, settings.weight_decay)

    window, folder = Window(device), Path(settings.folder)
    state = checkpoint.load(policy, folder)
    first = state["step"] if state else 0
    if state:
        window.load(state["window"])
    elif settings.objective.needs_reference:
        prove_start(policy, settings, pairs, device)

    steps = batches.total_steps(len(pairs), settings.global_batch_size, settings.epochs, settings.max_steps)
    lengths = [len(pair) for pair in pairs]
    since = time.monotonic()
    for step in range(first, steps):
        rate = batches.learning_rate(step, steps, settings.learning_rate, settings.warmup_fraction, settings.schedule)
        numbers = batches.step_pairs(step, len(pairs), settings.global_batch_size, settings.seed)
        train_step(policy, settings, pairs, lengths, numbers, rate, window)
        done = step + 1
        if done % settings.logging_steps == 0 or done == steps:
            values = window.means()
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"the loss is not finite at step {done}; the last checkpoint is kept")
            seconds, since = time.monotonic() - since, time.monotonic()
            epoch = done * settings.global_batch_size / len(pairs)
            log(done, {**values, **_health(policy, rate, epoch), **_speed(values, seconds)})
        if settings.eval_steps and done % settings.eval_steps == 0 and done < steps:
            log(done, _held_out(policy, settings, held_out, device))
        if done % settings.save_steps == 0 and done < steps:
            state = {"window": window.state()}
            checkpoint.save(policy, folder, settings.attempt, done, state, settings.keep_checkpoints)
    log(steps, _held_out(policy, settings, held_out, device))
    save_policy(policy.module, settings)


def build_policy(settings: Settings, device: torch.device) -> nn.Module:
    model: Any = load_model(Path(settings.model), settings.dtype, device)
    if settings.adapter:
        model = adapters.add_adapter(model, **settings.adapter, seed=settings.seed)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def train_step(
    policy: Any,
    settings: Settings,
    pairs: Sequence[Pair],
    lengths: Sequence[int],
    numbers: Sequence[int],
    rate: float,
    window: Window,
) -> None:
    """One update by the mean loss over the pairs of the global batch, whichever rows and ranks they fell on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = batches.rank_rows(numbers, lengths, settings.row_tokens, rank, world)
    engine.set_learning_rate(policy, rate)
    for place, (members, counts) in enumerate(rows):
        row = build_row(pairs, members).to(window.device)
        per_pair, values = row_loss(policy, settings.objective, row)
        # DeepSpeed averages gradients over ranks, and we want their sum over the global batch's pairs.
        loss = per_pair.sum() * (world / len(numbers)) * float(counts)
        policy.set_gradient_accumulation_boundary(place == len(rows) - 1)
        policy.backward(loss)
        policy.step()
        window.add(values, len(row.input_ids), counts)
    window.end_step()


def row_loss(policy: nn.Module, objective: Objective, row: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics per pair of one row."""
    tokens = row_logps(policy, row)
    pairs = row_pairs(row, tokens.logps)
    parts = objective.losses(pairs)
    return parts["loss"], row_metrics(row, tokens, pairs, parts, objective)


@torch.no_grad()
def evaluate(
    policy: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> dict[str, float]:
    """The training metrics on held-out pairs. A collective."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    window = Window(device)
    lengths = [len(pair) for pair in pairs]
    policy.eval()
    for members, counts in batches.rank_rows(range(len(pairs)), lengths, row_tokens, rank, world):
        row = build_row(pairs, members).to(device)
        window.add(row_loss(policy, objective, row)[1], len(row.input_ids), counts)
    window.end_step()
    policy.train()
    return window.means()


@torch.no_grad()
def prove_start(policy: nn.Module, settings: Settings, pairs: Sequence[Pair], device: torch.device) -> None:
    """Before the first update the policy is the reference: the stored values must be those computed live."""
    sample = _shortest(pairs, 4)
    row = build_row(sample, range(len(sample))).to(device)
    difference = (row_logps(policy, row).logps - row.reference).abs().max().item()
    if not difference <= TOLERANCE[DTYPES[settings.dtype]]:
        raise Mismatch(
            f"the stored reference log-probabilities differ by up to {difference:.3g} from those of the model that is "
            f"about to be trained (pairs {', '.join(pair.id for pair in sample)}): another base model, template or "
            "precision made them"
        )


def save_policy(model: nn.Module, settings: Settings) -> None:
    """The adapter, or the whole model, into `policy`; there whole or not at all."""
    aside, target = Path(settings.folder) / ".policy", Path(settings.folder) / "policy"
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad or not settings.adapter]
    state = engine.gathered(parameters)
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        if settings.adapter:
            adapters.save_adapter(model, state, aside, settings.model_name)  # type: ignore[arg-type]
        else:
            model.save_pretrained(aside, state_dict=state)  # type: ignore[operator]
        os.rename(aside, target)
    dist.barrier()


def _held_out(policy: nn.Module, settings: Settings, pairs: Sequence[Pair], device: torch.device) -> dict[str, float]:
    means = evaluate(policy, settings.objective, pairs, settings.row_tokens, device)
    return {f"eval/{name}": value for name, value in means.items() if name not in ("pairs", "tokens")}


def _health(policy: Any, rate: float, epoch: float) -> dict[str, float]:
    norm = policy.get_global_grad_norm()
    return {"learning_rate": rate, "epoch": epoch, "grad_norm": float(norm) if norm is not None else math.nan}


def _speed(values: dict[str, float], seconds: float) -> dict[str, float]:
    speed = {"tokens_per_second": values["tokens"] / seconds, "pairs_per_second": values["pairs"] / seconds}
    if torch.cuda.is_available():
        speed["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return speed


def _shortest(pairs: Sequence[Pair], count: int) -> list[Pair]:
    return sorted(pairs, key=len)[:count]


def _silent(step: int, values: dict[str, float]) -> None:
    """The log of every rank but 0."""
