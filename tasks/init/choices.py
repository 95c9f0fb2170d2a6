"""The values of a recipe for some data, a model and a machine, each with its reason."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import Params, overlay
from tasks.config.paths import ROOT
from tasks.config.strict import dotted, read_yaml, validate
from tasks.init.data_facts import DataFacts
from tasks.init.facts import Facts
from tasks.init.machine import GIB, Machine, ModelFacts
from tasks.lifecycle.estimates import training_memory

MAX_TOKENS = (512, 1024, 2048, 4096, 8192)
KEPT = 0.95  # share of the pairs that `max_tokens` should keep
HELD_OUT = 200  # pairs, for an interval of about 0.07 to either side of an accuracy
STEPS = 60  # that a run has at least; a larger batch would have fewer
SHARD_PAIRS = 16  # on a CPU; a shard takes seconds to a minute
SMALL_MODEL = 10**9  # parameters


class Choice(NamedTuple):
    key: str  # dotted, below `params` or `cluster`
    value: Any
    why: str


@dataclass(frozen=True)
class Plan:
    """A recipe with what it needs."""

    choices: list[Choice]
    params: Params
    cluster: Cluster
    memory: float  # bytes per training worker
    fits: bool


def limits(model: ModelFacts) -> list[int]:
    """The values of `prepare.max_tokens` that the model's positions allow."""
    return [limit for limit in MAX_TOKENS if limit <= (model.context or MAX_TOKENS[-1])] or [model.context or 512]


def choose(
    addresses: tuple[str, str],
    name: str,
    facts: Facts,
    full: bool,
    overrides: dict[str, Any],
) -> Plan:
    """The first variant that fits the machine; the smallest if none does."""
    data, model, machine = facts.data, facts.model, facts.machine
    fixed = [
        Choice(key if key.startswith("cluster.") else f"params.{key}", value, "given with --set")
        for key, value in overrides.items()
    ]
    choices = [*_source(addresses, data, model), *_values(name, data, model, machine, full, overrides)]
    for variant in _variants(machine, full):
        free = [choice for choice in (*choices, *variant) if not any(_overlap(choice.key, key) for key, *_ in fixed)]
        plan = _plan([*free, *fixed], facts)
        if plan.fits:
            break
    return plan


def _overlap(key: str, other: str) -> bool:
    """Whether both name the same value, or one of them a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _plan(choices: list[Choice], facts: Facts) -> Plan:
    nested = dotted({choice.key: choice.value for choice in choices})
    content = overlay(read_yaml(ROOT / "params.yaml"), nested["params"])
    params, cluster = validate(Params, content, ROOT / "params.yaml"), load_cluster(ROOT, nested["cluster"])
    needed = training_memory(params, cluster, facts.model.folder, facts.data.longest_within(params.prepare.max_tokens))
    workers, machine = cluster.actor_train.num_workers, facts.machine
    available = machine.worker_memory if machine.gpus else machine.worker_memory * machine.workers / workers
    return Plan(choices, params, cluster, needed, needed <= available)


def _source(addresses: tuple[str, str], data: DataFacts, model: ModelFacts) -> Iterator[Choice]:
    template = "with a chat template" if model.has_template else "without a chat template: prepare.template is plain"
    yield Choice("params.source.data", addresses[0], f"{data.rows} rows of the shape {data.shape}")
    yield Choice("params.source.model", addresses[1], f"{model.millions} parameters in {model.dtype}, {template}")


def _values(
    name: str, data: DataFacts, model: ModelFacts, machine: Machine, full: bool, overrides: dict[str, Any]
) -> Iterator[Choice]:
    limit = overrides.get("prepare.max_tokens") or next(
        (value for value in limits(model) if data.share_within(value) >= KEPT), limits(model)[-1]
    )
    pairs = max(1, round(data.pairs * data.share_within(limit)))
    pairs = min(pairs, overrides.get("prepare.max_pairs") or pairs)
    fraction = round(min(0.2, max(0.05, HELD_OUT / pairs)), 2)
    held_out, training = round(pairs * fraction), round(pairs * (1 - fraction))
    longest = int(data.lengths.max())
    yield Choice(
        "params.prepare.max_tokens",
        limit,
        f"keeps {data.share_within(limit):.1%} of the pairs; the longest has {longest} tokens",
    )
    yield Choice("params.prepare.eval_fraction", fraction, f"about {held_out} held-out pairs")
    if data.shape == "unpaired":
        yield Choice("params.train.loss", {"kto": 1.0}, "KTO: the rows have one answer each, desirable or not")
    else:
        yield Choice("params.train.loss", {"sigmoid": 1.0}, "DPO as in its paper; docs/losses.md has others")
    yield from _training(training, model, full, overrides)
    if not model.has_template:
        yield from _sft(model, machine, full)
    answer = int(np.percentile(data.chosen, 95))
    tokens = min(512, max(64, 32 * math.ceil(answer / 32)))
    yield Choice("params.evaluate.max_new_tokens", tokens, f"95% of the chosen answers have at most {answer} tokens")
    prompts = max(1, min(128 if machine.gpus else 32, held_out))
    yield Choice("params.evaluate.prompts", prompts, "answers of both models to read and to check for repetition")
    yield Choice("params.promote.model_name", name, "of the registered model")
    yield Choice(
        "params.promote.require", {"rewards/accuracies": 0.5}, "better than chance, at the lower end of its interval"
    )
    why = f"refuses what {held_out} pairs show to be worse than the champion"
    yield Choice("params.promote.max_regression", {"rewards/accuracies": "auto"}, why)


def _training(pairs: int, model: ModelFacts, full: bool, overrides: dict[str, Any]) -> Iterator[Choice]:
    epochs = overrides.get("train.epochs") or (3 if pairs < 1000 else 2 if pairs < 5000 else 1)
    batch = next((size for size in (64, 32, 16) if pairs * epochs / size >= STEPS), 8)
    steps, small = math.ceil(pairs / batch) * epochs, model.sizes.parameters < SMALL_MODEL
    yield Choice("params.train.epochs", epochs, f"about {pairs} training pairs; fewer pairs take more epochs")
    yield Choice("params.train.global_batch_size", batch, f"about {steps} steps")
    yield Choice("params.train.beta", 0.1, "a higher value keeps the model closer to the base model")
    if full:
        yield Choice("params.train.adapter", None, "full fine-tuning (--full)")
        rate, why = (5.0e-6 if small else 1.0e-6), "full fine-tuning: 5.0e-7 to 5.0e-6"
    else:
        yield Choice("params.train.adapter.rank", 16, "LoRA on every linear layer; more for new skills than for style")
        rate, why = (2.0e-4 if small else 5.0e-5), "LoRA: 5.0e-6 to 2.0e-4, small models take more"
    yield Choice("params.train.learning_rate", rate, why)
    yield Choice("params.train.logging_steps", max(1, steps // 50), "about 50 points of each curve")


def _sft(model: ModelFacts, machine: Machine, full: bool) -> Iterator[Choice]:
    small = model.sizes.parameters < SMALL_MODEL
    rate = (5.0e-5 if small else 1.0e-5) if full else (5.0e-4 if small else 2.0e-4)
    why = "a model without a chat template has not learnt to answer: first SFT on the chosen answers (docs/sft.md)"
    yield Choice("params.sft.learning_rate", rate, why)
    if machine.gpus:
        yield Choice("params.sft.dtype", machine.dtype, "the GPU computes in it")
    if full:
        yield Choice("params.sft.adapter", None, "full fine-tuning (--full)")


def _variants(machine: Machine, full: bool) -> Iterator[Sequence[Choice]]:
    """Placement and dtype, from the fastest to the one that needs the least memory."""
    if not machine.gpus:
        yield _placement(machine.workers, machine, "float32", 2)
        yield _placement(1, machine, "float32", 2)
        yield _placement(1, machine, "float32", 2, activation_checkpointing=True)
        yield _placement(1, machine, "bfloat16", 2, activation_checkpointing=True)
        return
    count, dtype = len(machine.gpus), machine.dtype
    yield _placement(count, machine, dtype, 1)
    yield _placement(count, machine, dtype, 1, activation_checkpointing=True)
    if full:
        why = "the moments in float32 would not fit"
        moments = Choice("params.train.optimizer", "adamw_bf16", why)
        yield [*_placement(count, machine, dtype, 1), moments]
        yield [*_placement(count, machine, dtype, 1, activation_checkpointing=True), moments]
    elif find_spec("bitsandbytes"):
        why = "4-bit base model: the weights would not fit otherwise"
        quantization = [Choice(f"params.{stage}.quantization", "nf4", why) for stage in ("reference", "train")]
        yield [*_placement(count, machine, dtype, 2, activation_checkpointing=True), *quantization]
    yield _placement(count, machine, dtype, 3, activation_checkpointing=True)
    yield _placement(count, machine, dtype, 3, activation_checkpointing=True, offload="all")


def _placement(workers: int, machine: Machine, dtype: str, zero_stage: int, **group: Any) -> list[Choice]:
    return [*_dtypes(dtype, machine), *_groups(workers, machine, zero_stage, group)]


def _dtypes(dtype: str, machine: Machine) -> Iterable[Choice]:
    why = (
        "the GPU computes in it" if machine.gpus else "many CPUs lack bfloat16" if dtype == "float32" else "less memory"
    )
    return [Choice(f"params.{stage}.dtype", dtype, why) for stage in ("reference", "train", "evaluate", "export")]


def _groups(workers: int, machine: Machine, zero_stage: int, group: dict[str, Any]) -> Iterator[Choice]:
    cpus = max(1, machine.cores // workers)
    for name in ("reference", "actor_train", *(["inference"] if machine.gpus else [])):
        if machine.gpus:
            yield Choice(f"cluster.{name}.gpus_per_worker", 1, str(machine))
        yield Choice(
            f"cluster.{name}.num_workers", workers, "one per GPU" if machine.gpus else f"{machine.cores} cores"
        )
        yield Choice(f"cluster.{name}.cpus_per_worker", cpus, "the cores, shared by the workers")
        yield Choice(f"cluster.{name}.row_tokens", 8192 if machine.gpus else 1024, "tokens that are computed at once")
    if not machine.gpus:
        why = "progress is shown, and kept if the run is stopped, after each such shard"
        yield Choice("cluster.reference.shard_pairs", SHARD_PAIRS, why)
    why = "shards the model over the workers" if zero_stage == 3 else "every worker holds the whole model"
    for name in ("reference", "actor_train", "inference") if zero_stage == 3 else ("actor_train",):
        yield Choice(f"cluster.{name}.zero_stage", zero_stage, why)
    for key, value in group.items():
        yield Choice(f"cluster.actor_train.{key}", value, f"{machine.worker_memory / GIB:.0f} GiB per worker need it")
