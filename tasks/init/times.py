"""Estimates how long each stage takes, from the number of tokens and the machine's measured speed.

For `dpo init`, and for `dpo plan` where no run on this data and model has measured it.
"""

import math
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from typing import NamedTuple

from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.init.choices import Plan
from tasks.init.facts import Facts, examine
from tasks.init.machine import Machine
from tasks.lifecycle.estimates import model_on_machine
from tasks.source.fetch import data_sources, local_files
from tasks.source.stage import check_addresses
from training.evaluation.hardware import operations_per_second

EFFICIENCY = {"cpu": 0.45, "cuda": 0.4}  # of training and scoring, relative to a large matrix product
SAMPLING = {"cpu": 0.12, "cuda": 0.02}  # of generating: it reads all weights for each token
STAGE_SECONDS = 15.0  # to start the processes of a stage, loading and export included
TRIAL = {"prepare.max_pairs": 100, "train.epochs": 1, "evaluate.prompts": 8}  # enough to see that everything works
EVALUATIONS = 5  # of the held-out pairs: during training, and by the stage evaluate


def stage_seconds(params: Params, cluster: Cluster, facts: Facts, speed: float) -> dict[str, float]:
    """Of each stage that an estimate exists for. `speed` is in operations per second, of all GPUs or cores together."""
    data, device = facts.data, "cuda" if facts.machine.gpus else "cpu"
    limit, fraction = params.prepare.max_tokens, params.prepare.eval_fraction or 0.0
    pairs = min(data.pairs * data.share_within(limit), params.prepare.max_pairs or math.inf)
    most = (params.train.max_steps or math.inf) * params.train.global_batch_size
    trained = min(pairs * (1 - fraction) * params.train.epochs, most)
    forward = 2.0 * facts.model.sizes.parameters  # operations per token
    backward = forward * (1 if params.train.adapter else 2)  # frozen weights have no gradients
    recomputed = forward if cluster.actor_train.activation_checkpointing else 0.0
    step, held_out = forward + backward + recomputed, pairs * fraction * forward
    per_token = data.tokens_within(limit) / (EFFICIENCY[device] * speed)
    sampled = 2 * params.evaluate.prompts * params.evaluate.max_new_tokens * forward  # answers of both models
    work = {
        "reference": pairs * forward * per_token,
        "train": (trained * step + (EVALUATIONS - 1) * held_out) * per_token,
        "evaluate": held_out * per_token + sampled / (SAMPLING[device] * speed),
    }
    if params.sft:  # of a pair, prompt and chosen answer
        work["sft"] = 0.6 * pairs * (1 - fraction) * params.sft.epochs * step * per_token
    return {stage: work.get(stage, 0.0) + STAGE_SECONDS for stage in ("source", "prepare", *work, "export")}


def run_seconds(params: Params, cluster: Cluster, facts: Facts, speed: float) -> float:
    return sum(stage_seconds(params, cluster, facts, speed).values())


def measured_speed(params: Params, machine: Machine) -> float:
    """Operations per second of this machine, of all its GPUs or cores together."""
    return operations_per_second(params.train.dtype, machine.cores) * (len(machine.gpus) or 1)


class Estimate(NamedTuple):
    seconds: dict[str, float]  # by stage
    longest: int  # tokens of the longest pair that is trained


def estimate_here(params: Params, cluster: Cluster) -> Estimate | None:
    """From what is on this machine; None if the data, the model or the workers are not, or do not work."""
    folder = model_on_machine(params.source.model, ROOT)
    source = params.source.model_copy(update={"eval": None, "sft": None})
    here = all(entry["address"] == "demo" or local_files(entry["address"]) for entry in data_sources(source))
    if folder is None or not here or cluster.ray.address != "local":
        return None
    # The run itself says what is wrong with the data or the model.
    with suppress(UserError, OSError, ValueError), redirect_stdout(StringIO()):
        check_addresses(source, params.prepare.template)
        facts = examine(params.model_copy(update={"source": source}), folder)
        if facts.machine.gpus or not cluster.actor_train.gpus_per_worker:
            seconds = stage_seconds(params, cluster, facts, measured_speed(params, facts.machine))
            return Estimate(seconds, facts.data.longest_within(params.prepare.max_tokens))
    return None


def short_trial(plan: Plan) -> tuple[Plan, str]:
    """The plan with less data and fewer answers, and the options of `dpo run` that do this."""
    params, options = plan.params, []
    for key, limit in TRIAL.items():
        section, name = key.split(".")
        values = getattr(params, section)
        value = getattr(values, name)
        if value is None or value > limit:
            params = params.model_copy(update={section: values.model_copy(update={name: limit})})
            options.append(f" --set {key}={limit}")
    return replace(plan, params=params), "".join(options)
