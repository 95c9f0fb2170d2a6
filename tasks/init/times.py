"""Estimates how long a run takes, from the number of tokens and the machine's measured speed."""

import math
from dataclasses import replace

from tasks.init.choices import Plan
from tasks.init.data_facts import DataFacts
from tasks.init.machine import Machine, ModelFacts

EFFICIENCY = {"cpu": 0.45, "cuda": 0.4}  # of training and scoring, relative to a large matrix product
SAMPLING = {"cpu": 0.12, "cuda": 0.02}  # of generating: it reads all weights for each token
START_SECONDS = 90.0  # of the processes of six stages, loading and export included
TRIAL = {"prepare.max_pairs": 100, "train.epochs": 1, "evaluate.prompts": 8}  # enough to see that everything works
EVALUATIONS = 5  # of the held-out pairs: during training, and by the stage evaluate


def run_seconds(plan: Plan, data: DataFacts, model: ModelFacts, machine: Machine, speed: float) -> float:
    """`speed` is in operations per second, of all GPUs or cores together."""
    params, cluster = plan.params, plan.cluster
    device, limit = "cuda" if machine.gpus else "cpu", params.prepare.max_tokens
    fraction, batch = params.prepare.eval_fraction or 0.0, params.train.global_batch_size
    pairs = min(data.pairs * data.share_within(limit), params.prepare.max_pairs or math.inf)
    trained = min(pairs * (1 - fraction) * params.train.epochs, (params.train.max_steps or math.inf) * batch)
    forward = 2.0 * model.sizes.parameters  # operations per token
    backward = forward * (1 if params.train.adapter else 2)  # frozen weights have no gradients
    recomputed = forward if cluster.actor_train.activation_checkpointing else 0.0
    passes = trained * (forward + backward + recomputed)
    if params.sft:  # of a pair, prompt and chosen answer
        passes += 0.6 * pairs * (1 - fraction) * params.sft.epochs * (forward + backward + recomputed)
    passes += pairs * forward + pairs * fraction * EVALUATIONS * forward  # the reference, and held-out pairs
    answers = 2 * params.evaluate.prompts * params.evaluate.max_new_tokens * forward  # of both models
    scoring = data.tokens_within(limit) * passes / (EFFICIENCY[device] * speed)
    return START_SECONDS + scoring + answers / (SAMPLING[device] * speed)


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
