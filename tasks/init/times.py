"""How long a run will take, from the number of tokens and the machine's measured speed; earlier runs are not needed."""

from tasks.init.choices import Plan
from tasks.init.data_facts import DataFacts
from tasks.init.machine import Machine, ModelFacts
from training.evaluation.hardware import operations_per_second

EFFICIENCY = {"cpu": 0.45, "cuda": 0.4}  # of training and scoring, relative to a large matrix product
SAMPLING = {"cpu": 0.12, "cuda": 0.02}  # of generating: it reads all weights for each token
STARTS = 90.0  # seconds: processes of six stages, loading, export
EVALUATIONS = 5  # of the held-out pairs: during training, and by the stage evaluate


def run_seconds(plan: Plan, data: DataFacts, model: ModelFacts, machine: Machine) -> float:
    params, cluster = plan.params, plan.cluster
    device, limit = "cuda" if machine.gpus else "cpu", params.prepare.max_tokens
    speed = operations_per_second(params.train.dtype, machine.cores) * (len(machine.gpus) or 1)
    pairs, fraction = data.pairs * data.share_within(limit), params.prepare.eval_fraction or 0.0
    forward = 2.0 * model.sizes.parameters  # operations per token
    backward = forward * (1 if params.train.adapter else 2)  # frozen weights have no gradients
    recomputed = forward if cluster.actor_train.activation_checkpointing else 0.0
    passes = pairs * (1 - fraction) * params.train.epochs * (forward + backward + recomputed)
    if params.sft:  # of a pair, prompt and chosen answer
        passes += 0.6 * pairs * (1 - fraction) * params.sft.epochs * (forward + backward + recomputed)
    passes += pairs * forward + pairs * fraction * EVALUATIONS * forward  # the reference, and held-out pairs
    answers = 2 * params.evaluate.prompts * params.evaluate.max_new_tokens * forward  # of both models
    scoring = data.tokens_within(limit) * passes / (EFFICIENCY[device] * speed)
    return STARTS + scoring + answers / (SAMPLING[device] * speed)
