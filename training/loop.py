"""The training loop: pairs with reference log-probabilities in, an aligned policy out.

Runs under any launcher that sets the usual rank variables (Ray Train here, torchrun elsewhere), or alone.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training import batches, checkpoint, engine, global_batch, memory
from training.dtypes import gpu_has_bfloat16
from training.feed import Feed, Step
from training.guards import Alarms, Best, Notice, Preempted, Skips, not_finite
from training.logps import AT_ONCE, Scorer, row_logps
from training.metrics import Window, row_metrics, row_pairs
from training.model import compile_layers
from training.moving_reference import FILE as REFERENCE_FILE
from training.moving_reference import MovingReference
from training.objective import Objective
from training.packing import Pair, Row, build_row
from training.policy import build_policy, save_policy
from training.proof import find_way, prove_determinism, prove_start
from training.routers import LoadBalance
from training.settings import Settings
from training.speed import Speed

ZERO_2 = "set actor_train.zero_stage to 2 in infra/cluster.yaml"
Log = Callable[[int, dict[str, float]], None]


class Course:
    """What a run carries from step to step, and into its checkpoints."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.window = Window(device)
        self.skips = Skips(settings.max_skipped_steps)
        self.alarms = Alarms(settings.kl_limit)
        self.best = Best(settings.select, settings.patience, settings.keep_best)
        self.rewards = torch.zeros(2, dtype=torch.float64, device=device)  # sum and number of all rewards so far
        self.margins = torch.zeros_like(self.rewards)  # beta-DPO's running mean and deviation of the reward margins

    @property
    def reward_mean(self) -> Tensor:
        return (self.rewards[0] / self.rewards[1].clamp(min=1.0)).float()

    def state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state() for name in ("window", "skips", "alarms", "best")}
        return {**parts, "rewards": self.rewards.tolist(), "margins": self.margins.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in ("window", "skips", "alarms", "best"):
            getattr(self, name).load(state[name])
        self.rewards = self.rewards.new_tensor(state["rewards"])
        self.margins = self.margins.new_tensor(state.get("margins", [0.0, 0.0]))

    def start_over(self) -> None:
        """What another training's checkpoint brings and this one counts for itself: its alarms and its best policy."""
        self.alarms.raised = []
        self.best = Best(self.best.metric, self.best.patience, self.best.keep)


def train(
    settings: Settings,
    pairs: Sequence[Pair],
    held_out: Mapping[str, Sequence[Pair]],
    log: Log,
    say: Callable = print,
    asked_to_end: Callable[[], bool] = lambda: False,
    *,
    key: bytes,
) -> None:
    """Train and write `policy` into the settings' folder. `log` and `say` are called on rank 0 alone.

    Where `asked_to_end` is true on any rank, all save a checkpoint and raise Preempted. `key` authenticates
    checkpoints; it is no part of the settings, so that nothing that shows them shows it.
    """
    rank, world = engine.start_distributed(settings.deterministic)
    log, say = (log, say) if rank == 0 else (_silent, _silent)
    note = settings.objective.check_pairs(pairs)
    if note:
        say(note)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    memory.fits(settings, pairs, world, device)
    if settings.dtype == "float16" and gpu_has_bfloat16():
        say("this GPU has bfloat16, which needs no loss scaling: consider train.dtype bfloat16 instead of float16")
    course, folder = Course(settings, device), Path(settings.folder)
    found = checkpoint.find(folder, settings.zero_stage, key)
    policy = start(settings, pairs, device, bool(found and found.universal), say)
    moving = MovingReference(policy, **settings.reference_update) if settings.reference_update else None
    if moving:
        say(moving.cost())
    if found:
        restore(policy, found, course, moving, settings)
    elif settings.objective.needs_reference:
        proof = prove_start(policy, settings.objective, pairs, settings.row_tokens, device)
        say(f"the policy starts as the reference: tokens within {proof['token']:.1g}, loss within {proof['loss']:.1g}")

    hidden = policy.module.causal.config.get_text_config().hidden_size
    feed = Feed(pairs, hidden, settings.global_batch_size, settings.row_tokens, settings.seed)
    ids = [pair.id for pair in pairs]
    steps = batches.total_steps(len(pairs), settings.global_batch_size, settings.epochs, settings.max_steps)
    first = found.state["step"] if found else 0
    evaluate_every = _evaluate_every(settings, len(pairs), steps)

    def look(step: int) -> int:
        _look(policy, settings, held_out, step, course, log, device)
        return step

    def save(step: int) -> int:
        state = {**course.state(), "loss_scale": engine.loss_scale_state(policy), "origin": settings.origin}
        tensors = {REFERENCE_FILE: moving.gathered()} if moving else None
        best, begun = course.best.steps, time.monotonic()
        checkpoint.save(policy, folder, settings.attempt, step, state, settings.keep_checkpoints, best, key, tensors)
        log(step, {"checkpoint_seconds": time.monotonic() - begun})
        return step

    done, looked, saved = first, -1, first if found and found.own else -1
    if found and not found.own and settings.select:  # the policy that it starts with may stay the best
        looked = look(first)
        saved = save(first) if first in course.best.steps else saved
    over = found is not None and _over(settings, course, first, say)
    speed, notice = Speed(policy.module, device, world, course.window.sums()), Notice(asked_to_end, device)
    for step in feed.steps(first, first if over else steps, rank, world, device):
        done = step.number + 1
        logs = done % settings.logging_steps == 0 or done == steps
        rate = batches.learning_rate(
            step.number, steps, settings.learning_rate, settings.warmup_fraction, settings.schedule
        )
        zeros = train_step(
            policy,
            settings.objective,
            step,
            rate,
            course,
            ids,
            moving=moving,
            balance_weight=settings.router_aux_loss_coef or 0.0,
            count_zeros=logs,
        )
        if logs and (values := course.window.means()):
            epoch = done * settings.global_batch_size / len(pairs)
            health = {**_health(policy, zeros), "learning_rate": rate, "epoch": epoch}
            _report(done, values, {**health, **speed.since(values)}, course, log, say)
        if evaluate_every and done % evaluate_every == 0 and done < steps:
            with speed.paused():
                looked = look(done)
        if _over(settings, course, done, say):
            break
        if done < steps and (done % settings.save_steps == 0 or done in course.best.steps):
            with speed.paused():
                saved = save(done)
        if notice.look() and done < steps:
            if saved != done:
                save(done)
            say(f"a worker was asked to end: the checkpoint of step {done} is saved")
            raise Preempted
    if looked != done:
        look(done)
    if saved != done:  # the last step too: a finished training can be continued
        save(done)
    if settings.keep_best:
        ranking = ", ".join(f"step {step} ({value:.4g})" for value, step in course.best.ranked)
        say(f"checkpoints kept by {settings.select}: {ranking}")
    if settings.select and course.best.step is not None:
        say(f"the policy is that of step {course.best.step}, {settings.select} {course.best.value:.4g}")
    _finish(policy.module.model, settings)


def _evaluate_every(settings: Settings, pairs: int, steps: int) -> int | None:
    """Steps between two evaluations of the held-out pairs."""
    asked = settings.eval_steps
    if asked == "epoch":
        return batches.steps_per_epoch(pairs, settings.global_batch_size)
    if isinstance(asked, float):
        return math.ceil(asked * steps)
    return asked  # type: ignore[return-value]


def restore(
    policy: Any, found: checkpoint.Found, course: Course, moving: MovingReference | None, settings: Settings
) -> None:
    """The state of a checkpoint, with the options of this training and not those that made it. A collective."""
    checkpoint.load(policy, found)
    engine.set_options(policy, settings.weight_decay, settings.max_grad_norm)
    if moving:
        moving.load(found.origin)
    course.load(found.state)
    engine.load_loss_scale(policy, found.state.get("loss_scale"))
    if not found.own:
        course.start_over()


def start(
    settings: Settings,
    pairs: Sequence[Pair],
    device: torch.device,
    universal: bool,
    say: Callable,
) -> Any:
    """The policy in its engine, as new; `universal` where it will load a checkpoint of another number of ranks."""
    config = engine.deepspeed_config(
        settings.zero_stage, settings.offload, settings.dtype, settings.max_grad_norm, universal
    )
    with engine.sharded_from_birth(config):
        scorer = Scorer(build_policy(settings, device))
    scorer.whole_head = settings.zero_stage < 3
    if settings.zero_stage == 3 and any(isinstance(module, nn.Conv1d) for module in scorer.modules()):
        raise ValueError(
            f"the recurrent layers of {type(scorer.causal).__name__} read weights that ZeRO-3 keeps on other ranks: "
            f"{ZERO_2}"
        )
    policy = engine.initialize(scorer, config, settings.learning_rate, settings.weight_decay)
    note = find_way(scorer, pairs, device)
    engine.forget_gradients(policy)
    if note:
        say(note)
    if scorer.how == "plain" and settings.zero_stage == 3:
        raise ValueError(f"{note}. Ranks would differ in their passes, which are collectives there: {ZERO_2}")
    prove_determinism(scorer, pairs, device)
    # The hooks that record router logits were not tried inside compiled layers.
    compiles = settings.compile and device.type == "cuda" and settings.zero_stage < 3 and scorer.packs
    if compiles and not settings.router_aux_loss_coef:
        compile_layers(scorer.causal)
    scorer.balance = LoadBalance(scorer.causal) if settings.router_aux_loss_coef else None
    return policy


def train_step(
    policy: Any,
    objective: Objective,
    step: Step,
    rate: float,
    course: Course,
    ids: Sequence[str],
    *,
    moving: MovingReference | None,
    balance_weight: float,
    count_zeros: bool,
) -> float | None:
    """One update by the mean loss over the pairs of the global batch, whichever rows and ranks they fell on."""
    window, world = course.window, dist.get_world_size()
    rows = [(row.to(window.device), counts) for row, counts in step.rows]
    rows = moving.rows(step.number, rows) if moving else rows
    told, margins = global_batch.look(
        policy, objective, rows, step.numbers, window.device, running=course.margins, seed=step.number
    )
    engine.set_learning_rate(policy, rate)
    losses, zeros = [], None
    for place, (row, counts) in enumerate(rows):
        per_pair, values, balance = row_loss(
            policy, objective, row, reward_mean=course.reward_mean, **told.get(place, {})
        )
        # DeepSpeed averages gradients over ranks, and we want their weighted mean over the global batch's pairs.
        loss = (per_pair * row.weight).sum() * (world / step.weight)
        if balance is not None:
            share = len(row.input_ids) / step.tokens
            loss = loss + balance * (balance_weight * share * world)
            # Logged values are means over pairs: their sum over the step's pairs must be that of the shares.
            per_step = balance.detach() * share * (len(step.numbers) / len(row.pairs))
            values["aux_loss"] = per_step.expand(len(row.pairs))
        loss = loss * float(counts)
        policy.set_gradient_accumulation_boundary(place == len(rows) - 1)
        policy.backward(poison(loss))
        if count_zeros and place == len(rows) - 1:
            zeros = engine.zero_gradients(policy)
        policy.step()
        window.add(values, row.weight, len(row.input_ids), counts)
        losses.append((row.pairs, per_pair.detach()))
    if engine.skipped(policy):
        window.drop_step()
        broken = not_finite(losses, ids)
        if engine.loss_scale(policy) is None or broken:
            course.skips.skipped(step.number + 1, broken)
        else:
            engine.update_loss_scale(policy, step.number + 1, overflow=True)
            course.skips.overflowed()
    else:
        engine.update_loss_scale(policy, step.number + 1, overflow=False)
        sums = window.end_step()
        course.skips.taken()
        course.margins = course.margins if margins is None else margins
        course.rewards += torch.stack([sums["rewards/chosen"] + sums["rewards/rejected"], 2 * sums["pairs"]])
    if moving:
        moving.update(step.number + 1)
    return zeros


def poison(loss: Tensor) -> Tensor:
    """A loss that is not finite may have a finite gradient: NaN makes all ranks skip the update."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def row_loss(
    policy: nn.Module,
    objective: Objective,
    row: Row,
    **known: Any,
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Loss and metrics per pair of one row, and its load-balancing loss where wanted; `known` is for `row_pairs`."""
    tokens = row_logps(policy, row)
    pairs = row_pairs(row, tokens, objective, **known)
    parts = objective.losses(pairs)
    return parts["loss"], row_metrics(row, tokens, pairs, parts, objective), tokens.balance


@torch.no_grad()
def evaluate(
    policy: nn.Module,
    objective: Objective,
    pairs: Sequence[Pair],
    row_tokens: int,
    device: torch.device,
    *,
    reward_mean: Tensor | float = 0.0,
    each: Callable[[Row, dict[str, Tensor]], None] | None = None,
) -> dict[str, float]:
    """The training metrics on held-out pairs, which are one batch; `each` gets those of a row's pairs. A collective."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    lengths = [len(pair) for pair in pairs]
    dealt = [
        deal
        for start in range(0, len(pairs), AT_ONCE)
        for deal in batches.rank_rows(
            range(start, min(start + AT_ONCE, len(pairs))), lengths, lengths, row_tokens, rank, world
        )
    ]
    training = policy.training
    policy.eval()

    def rows() -> Iterator[tuple[Row, bool]]:
        for members, counts in dealt:
            yield build_row(pairs, members).to(device), counts

    told, _ = global_batch.look(policy, objective, rows(), range(len(pairs)), device)
    window = Window(device)
    for place, (row, counts) in enumerate(rows()):
        _, values, _ = row_loss(policy, objective, row, reward_mean=reward_mean, **told.get(place, {}))
        window.add(values, row.weight, len(row.input_ids), counts)
        if each and counts:
            each(row, values)
    window.end_step()
    policy.train(training)
    return window.means()


def _look(
    policy: nn.Module,
    settings: Settings,
    held_out: Mapping[str, Sequence[Pair]],
    step: int,
    course: Course,
    log: Log,
    device: torch.device,
) -> None:
    """Evaluate every held-out set, log it, and keep the policy where it is the best so far."""
    each = {
        name: evaluate(policy, settings.objective, pairs, settings.row_tokens, device, reward_mean=course.reward_mean)
        for name, pairs in held_out.items()
    }
    values = {f"eval/{name}": value for name, value in _mean_of_sets(each, held_out).items()}
    if len(each) > 1:
        for held, means in each.items():
            values |= {f"eval/{held}/{name}": v for name, v in means.items() if name not in ("pairs", "tokens")}
    log(step, values)
    if settings.select and settings.select not in values:
        raise ValueError(f"train.select: there is no metric '{settings.select}': there are {', '.join(values)}")
    if course.best.look(step, values):
        save_policy(policy.module.model, settings, "best")  # type: ignore[union-attr, arg-type]


def _mean_of_sets(each: Mapping[str, Mapping[str, float]], sets: Mapping[str, Sequence[Pair]]) -> dict[str, float]:
    """Means over the pairs of all sets: losses by the pairs' weights, the rest by their number, as in one set."""
    weights = {held: sum(pair.weight for pair in pairs) for held, pairs in sets.items()}
    means: dict[str, float] = {}
    for name in next(iter(each.values())):
        shares = weights if name.startswith("loss") else {held: len(pairs) for held, pairs in sets.items()}
        if name not in ("pairs", "tokens"):
            means[name] = sum(each[held][name] * share for held, share in shares.items()) / sum(shares.values())
    return means


def _report(
    step: int, means: dict[str, float], health: dict[str, float], course: Course, log: Log, say: Callable
) -> None:
    """Log a window's means, and raise the alarms that they give cause for."""
    new = course.alarms.look(means)
    marks = {f"alarms/{name}": 1.0 for name in new}
    log(step, {**means, **health, "skipped_steps": course.skips.total, **marks})
    for sentence in new.values():
        say(f"alarm at step {step}: {sentence}")


def _over(settings: Settings, course: Course, step: int, say: Callable) -> bool:
    """Whether to stop before the last step, as was asked for."""
    if course.best.exhausted:
        say(f"stopped at step {step}: no better {settings.select} in {settings.patience} evaluations")
        return True
    if settings.stop_on_alarm and course.alarms.raised:
        say(f"stopped at step {step}: alarm {', '.join(course.alarms.raised)}")
        return True
    return False


def _finish(model: nn.Module, settings: Settings) -> None:
    """Publish `policy`: the best where one was to be selected, the last otherwise."""
    folder = Path(settings.folder)
    if not settings.select:
        save_policy(model, settings, "policy")
    elif dist.get_rank() == 0:
        shutil.rmtree(folder / "policy", ignore_errors=True)
        shutil.copytree(folder / "best", folder / "policy")
    dist.barrier()


def _health(policy: Any, zeros: float | None) -> dict[str, float]:
    health = {} if (scale := engine.loss_scale(policy)) is None else {"loss_scale": scale}
    if not engine.skipped(policy):  # a skipped step has no norm
        norm = policy.get_global_grad_norm()
        health["grad_norm"] = float(norm) if norm is not None else math.nan
    return health if zeros is None else {**health, "num_zeros_in_grad": zeros}


def _silent(*_: Any) -> None:
    """The log of every rank but 0."""
