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

from training.distributed.data_parallel import data_rank
from training.distributed.process_group import start_distributed
from training.distributed.sequence_parallel import start_sequence_groups
from training.distributed.tensor_parallel import start_tensor_groups
from training.models.dtypes import gpu_has_bfloat16
from training.objectives.held_out import HeldOut, evaluate_sets
from training.pairs import batches
from training.pairs.pair import Pair
from training.trainer import checkpoint, engine, memory
from training.trainer.background_writer import BackgroundWriter
from training.trainer.guards import PreemptionSignal
from training.trainer.moving_reference import FILE as REFERENCE_FILE
from training.trainer.moving_reference import MovingReference
from training.trainer.policy import save_policy, start_policy
from training.trainer.settings import Preempted, Settings
from training.trainer.speed import Speed
from training.trainer.start_checks import check_start
from training.trainer.step_loader import StepBatch, StepLoader
from training.trainer.train_step import TrainState, train_step

Log = Callable[[int, dict[str, float]], None]
Notify = Callable[[str], None]


def train(
    settings: Settings,
    pairs: Sequence[Pair],
    held_out: HeldOut,
    log: Log,
    notify: Notify = print,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    key: bytes,
) -> None:
    """Train and write `policy` into the settings' folder. Only rank 0 calls `log` and `notify`.

    If `stop_requested` returns true on any rank, all ranks save a checkpoint and raise Preempted. `key` authenticates
    checkpoints; it is not part of the settings, so that printing them cannot reveal it.
    """
    run = TrainRun(settings, pairs, held_out, log, notify, key)
    run.evaluate_start()
    last_step = run.done if run.resumed and run.should_stop() else run.total_steps
    speed = Speed(run.policy.module.causal, run.device, run.world, run.state.window.sums())
    preemption = PreemptionSignal(stop_requested, run.device)
    with run.writer:
        for batch in run.loader.steps(run.done, last_step, *data_rank(), run.device):
            zeros = run.step(batch)
            run.writer.check()
            speed.count(batch)
            if run.log_due() and (means := run.state.window.means()):
                run.report(means, {**run.health(zeros), **speed.since(means)})
            if run.eval_due():
                with speed.paused():
                    run.run_eval()
            if run.should_stop():
                break
            if run.save_due():
                with speed.paused():
                    run.save()
            if preemption.check() and run.done < run.total_steps:
                run.save()
                run.writer.wait()
                dist.barrier()  # rank 0 has published it
                run.notify(f"a worker was asked to stop: the checkpoint of step {run.done} is saved")
                raise Preempted
        run.finish()


class TrainRun:
    """A training run on this rank: the policy, its state, its progress, and where it reports."""

    def __init__(
        self, settings: Settings, pairs: Sequence[Pair], held_out: HeldOut, log: Log, notify: Notify, key: bytes
    ) -> None:
        self.settings, self.pairs, self.held_out, self.key = settings, pairs, held_out, key
        self.rank, self.world = start_distributed(settings.deterministic)
        start_sequence_groups(settings.sequence_parallel)
        start_tensor_groups(settings.tensor_parallel)
        self.log: Log = log if self.rank == 0 else _silent
        self.notify: Notify = notify if self.rank == 0 else _silent
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        self._check_settings()
        self.state, self.folder = TrainState(settings, self.device), Path(settings.folder)
        self.resumed = checkpoint.find(self.folder, settings, key)
        universal = self.resumed is not None and self.resumed.universal
        self.policy = start_policy(settings, pairs, self.device, universal, self.notify)
        self.moving = MovingReference(self.policy, **settings.reference_update) if settings.reference_update else None
        if self.moving:
            self.notify(self.moving.cost())
        self._restore_or_check()
        hidden = self.policy.module.causal.config.get_text_config().hidden_size
        sizes = (settings.global_batch_size, settings.row_tokens, settings.seed)
        self.loader = StepLoader(pairs, hidden, *sizes, settings.objective.reads_kl)
        self.total_steps = batches.total_steps(
            len(pairs), settings.global_batch_size, settings.epochs, settings.max_steps
        )
        self.eval_interval = eval_interval(settings, len(pairs), self.total_steps)
        self.done = self.resumed.state["step"] if self.resumed else 0
        self.evaluated_at, self.saved_at = -1, self.done if self.resumed and self.resumed.own else -1
        self.learning_rate = 0.0  # of the last step
        self.writer = BackgroundWriter()  # of checkpoints

    def _check_settings(self) -> None:
        if note := self.settings.objective.check_pairs(self.pairs):
            self.notify(note)
        if adapter := self.settings.adapter:
            self.notify(f"LoRA of rank {adapter['rank']}: {memory.sizes_of(self.settings).adapted}")
        memory.check_fits(self.settings, self.pairs, self.world, self.device)
        if self.settings.dtype == "float16" and gpu_has_bfloat16():
            self.notify(
                "this GPU has bfloat16, which needs no loss scaling: consider train.dtype bfloat16 instead of float16"
            )

    def _restore_or_check(self) -> None:
        """Load the checkpoint, or check that the policy starts as the reference. A collective."""
        settings = self.settings
        if self.resumed:
            checkpoint.load(self.policy, self.resumed)
            # The options of this training replace those in the checkpoint.
            engine.set_options(self.policy, settings.weight_decay, settings.max_grad_norm)
            if self.moving:
                self.moving.load(self.resumed.path)
            self.state.load(self.resumed.state)
            engine.load_loss_scale(self.policy, self.resumed.state.get("loss_scale"))
            if not self.resumed.own:
                self.state.reset_monitoring()
        elif settings.reference_model != "start":
            self.notify("the policy starts from another model than the reference: its start is not compared with it")
        elif settings.objective.needs_reference:
            gradients = settings.zero_stage < 3  # not through the engine, which expects a backward pass after it
            policy = self.policy.module if gradients else self.policy
            largest = check_start(policy, settings.objective, self.pairs, settings.row_tokens, self.device, gradients)
            self.notify(
                f"the policy starts as the reference: tokens within {largest['token']:.1g}, "
                f"loss within {largest['loss']:.1g}"
            )

    def step(self, batch: StepBatch) -> float | None:
        """Update the policy; the number of zeros in the gradient if this step is logged."""
        settings = self.settings
        self.done = batch.step + 1
        self.learning_rate = batches.learning_rate(
            batch.step, self.total_steps, settings.learning_rate, settings.warmup_fraction, settings.schedule
        )
        if settings.adapter and settings.adapter.get("dropout"):  # a resumed run repeats the draws of each step
            torch.manual_seed(hash((settings.seed, batch.step, self.rank)))
        return train_step(
            self.policy, settings, batch, self.learning_rate, self.state, self.pairs, self.moving, self.log_due()
        )

    def log_due(self) -> bool:
        return self.done % self.settings.logging_steps == 0 or self.done == self.total_steps

    def eval_due(self) -> bool:
        return self.eval_interval is not None and self.done % self.eval_interval == 0 and self.done < self.total_steps

    def save_due(self) -> bool:
        at_interval = self.done % self.settings.save_steps == 0
        return self.done < self.total_steps and (at_interval or self.done in self.state.best.steps)

    def should_stop(self) -> bool:
        """Whether to stop before the last step: out of patience, or an alarm under train.stop_on_alarm."""
        settings, alarms = self.settings, self.state.alarms.raised
        if self.state.best.out_of_patience:
            self.notify(f"stopped at step {self.done}: no better {settings.select} in {settings.patience} evaluations")
            return True
        if settings.stop_on_alarm and alarms:
            self.notify(f"stopped at step {self.done}: alarm {', '.join(alarms)}")
            return True
        return False

    def health(self, zeros: float | None) -> dict[str, float]:
        health = {} if (scale := engine.loss_scale(self.policy)) is None else {"loss_scale": scale}
        if not engine.skipped(self.policy):  # a skipped step has no norm
            norm = self.policy.get_global_grad_norm()
            health["grad_norm"] = float(norm) if norm is not None else math.nan
        if zeros is not None:
            health["num_zeros_in_grad"] = zeros
        epoch = self.done * self.settings.global_batch_size / len(self.pairs)
        return {**health, "learning_rate": self.learning_rate, "epoch": epoch}

    def report(self, means: dict[str, float], health: dict[str, float]) -> None:
        """Log a window's means, and raise the alarms that they trigger."""
        alarms = self.state.alarms.check(means)
        flags = {f"alarms/{name}": 1.0 for name in alarms}
        self.log(self.done, {**means, **health, "skipped_steps": self.state.skips.total, **flags})
        for message in alarms.values():
            self.notify(f"alarm at step {self.done}: {message}")

    def evaluate_start(self) -> None:
        """Evaluate the checkpoint of another training that this one continues: its policy may stay the best."""
        if self.resumed and not self.resumed.own and self.settings.select:
            self.run_eval()
            if self.done in self.state.best.steps:
                self.save()

    def run_eval(self) -> None:
        """Evaluate every held-out set, log the metrics, and save the policy if it is the best so far."""
        settings = self.settings
        values = evaluate_sets(
            self.policy, settings.objective, self.held_out, settings.row_tokens, self.device, self.state.reward_mean
        )
        self.log(self.done, values)
        if settings.select and settings.select not in values:
            raise ValueError(f"train.select: unknown metric '{settings.select}'. Choose one of {', '.join(values)}")
        if self.state.best.update(self.done, values):
            save_policy(self.policy.module.model, settings, "best")
        self.evaluated_at = self.done

    def save(self) -> None:
        """Write a checkpoint of this step in the background, unless there is one. A collective."""
        if self.saved_at == self.done:
            return
        settings, begun = self.settings, time.monotonic()
        loss_scale = engine.loss_scale_state(self.policy)
        state = {**self.state.state(), "loss_scale": loss_scale, "origin": settings.origin}
        state["optimizer"] = settings.optimizer
        tensors = {REFERENCE_FILE: self.moving.gathered()} if self.moving else {}
        kept = settings.keep_checkpoints, self.state.best.steps
        new = checkpoint.NewCheckpoint(self.folder, settings.attempt, self.done, *kept, self.key)
        checkpoint.save(self.policy, self.writer, new, state, tensors)
        self.log(self.done, {"checkpoint_seconds": time.monotonic() - begun})
        self.saved_at = self.done

    def finish(self) -> None:
        """Evaluate and save the last step, and publish `policy`: the best by train.select, or else the last."""
        settings, best = self.settings, self.state.best
        if self.evaluated_at != self.done:
            self.run_eval()
        self.save()  # the last step too: another training can continue a finished one
        self.writer.wait()
        if settings.keep_best:
            ranking = ", ".join(f"step {step} ({value:.4g})" for value, step in best.ranked)
            self.notify(f"checkpoints kept by {settings.select}: {ranking}")
        if settings.select and best.step is not None:
            self.notify(f"the policy is that of step {best.step}, {settings.select} {best.value:.4g}")
        if not settings.select:
            save_policy(self.policy.module.model, settings, "policy")
        elif self.rank == 0:
            shutil.rmtree(self.folder / "policy", ignore_errors=True)
            shutil.copytree(self.folder / "best", self.folder / "policy")
        dist.barrier()


def eval_interval(settings: Settings, pairs: int, steps: int) -> int | None:
    """Steps between two evaluations of the held-out pairs."""
    interval = settings.eval_steps
    if interval == "epoch":
        return batches.steps_per_epoch(pairs, settings.global_batch_size)
    return math.ceil(interval * steps) if isinstance(interval, float) else interval  # type: ignore[return-value]


def _silent(*_: Any) -> None:
    """Replaces `log` and `notify` on every rank but 0."""
