"""`dpo init DATA MODEL`: examine both and this machine, write flows/recipes/NAME.yaml, and say what to do next."""

import re
import shlex
from pathlib import Path
from typing import Any

from tasks.artifacts import adapters
from tasks.artifacts.models import HUB, REGISTRY
from tasks.config.addresses import as_path
from tasks.config.cluster import groups
from tasks.config.params import RECIPES, Params, overlay
from tasks.config.paths import ROOT
from tasks.config.strict import dotted, read_yaml, to_yaml, validate
from tasks.errors import UserError
from tasks.init.choices import Choice, Plan, choose, limits
from tasks.init.data_facts import DataFacts
from tasks.init.facts import Facts, examine
from tasks.init.machine import GIB
from tasks.init.times import measured_speed, run_seconds, short_trial
from tasks.prepare import unpaired
from tasks.source.fetch import source_name
from tasks.source.reject_reasons import REJECT_REASONS
from tasks.source.stage import DATA_KEY, MODEL_KEY, check_addresses, model_folder
from tasks.system.files import write_text

NAME = re.compile(r"\w[\w.-]*")
ARGUMENTS = {DATA_KEY: "DATA", MODEL_KEY: "MODEL"}  # of the command, as its --help and its errors call them
LONG = 30 * 60.0  # seconds; before a longer run, a short trial is worth its time


def init(data: str, model: str, name: str | None, full: bool, overrides: dict[str, Any], force: bool) -> None:
    if "demo" in (data, model):
        raise UserError("The demo has a recipe of its own: `dpo run --recipe demo`.")
    if model.startswith(REGISTRY):
        raise UserError(
            f"MODEL: `dpo init` examines the files of a model, and {model} may be another one tomorrow. Name the model "
            f"that it was trained from, and add `--set source.model={model}`."
        )
    data, model = _from_checkout(data), _from_checkout(model)
    name = name or f"{source_name(data)}-{source_name(model)}".lower()
    path = _recipe_path(name, force)
    params = _params(data, model, overrides)
    check_addresses(params.source, params.prepare.template, ARGUMENTS)
    folder = model_folder(model, params.prepare.template, key=ARGUMENTS[MODEL_KEY])
    facts = examine(params, folder, ARGUMENTS)
    with adapters.errors_of("train"):
        plan = choose((data, model), name, facts, full, overrides)
    trained = adapters.check(folder, plan.params)
    options = " --full" if full else ""
    options += "".join(f" --set {shlex.quote(f'{key}={to_yaml(value)}')}" for key, value in overrides.items())
    write_text(path, render(plan.choices, f"dpo init {data} {model}{options}", name))
    _show(facts, plan.params.prepare.max_tokens)
    if "train" in trained:
        print(f"Adapter  {trained['train']}")
    _show_next(plan, facts, name)


def _from_checkout(address: str) -> str:
    """An address as the recipe writes it: runs look up relative paths in the checkout."""
    path = as_path(address)
    if address.startswith(HUB) or not path.exists():
        return address
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _recipe_path(name: str, force: bool) -> Path:
    if not NAME.fullmatch(name):
        raise UserError(f"A recipe cannot be named '{name}'. Use letters, digits, dots and dashes: --name NAME.")
    path = RECIPES / f"{name}.yaml"
    if path.exists() and not force:
        raise UserError(
            f"flows/recipes/{name}.yaml exists. Choose another name with --name, or replace it with --force."
        )
    return path


def _params(data: str, model: str, overrides: dict[str, Any]) -> Params:
    changes = dotted({"source.data": data, "source.model": model, "source.eval": None, "source.adapter": None})
    of_params = {key: value for key, value in overrides.items() if not key.startswith("cluster.")}
    content = overlay(overlay(read_yaml(ROOT / "params.yaml"), changes), dotted(of_params))
    return validate(Params, content, Path("params.yaml with overrides" if overrides else "params.yaml"))


def render(choices: list[Choice], command: str, name: str) -> str:
    """The recipe as YAML, each value with its reason."""
    lines = [f"# Written by `{command}`. Change what you like: `dpo check-config {name}` checks it."]
    sections = [*(f"params.{name}" for name in Params.model_fields), *(f"cluster.{name}" for name in groups())]
    above: list[str] = []
    for key, value, why in sorted(choices, key=lambda choice: sections.index(".".join(choice.key.split(".")[:2]))):
        *path, last = key.split(".")
        new = next((depth for depth in range(len(path)) if path[: depth + 1] != above[: depth + 1]), len(path))
        lines += [f"{'  ' * depth}{path[depth]}:" for depth in range(new, len(path))]
        lines.append(f"{'  ' * len(path)}{last}: {to_yaml(value)}".ljust(44) + f"  # {why}")
        above = path
    return "\n".join(lines) + "\n"


def _show(facts: Facts, max_tokens: int) -> None:
    data, model = facts.data, facts.model
    sample = f", of which {len(data.lengths)} were examined" if len(data.lengths) < data.pairs else ""
    print(f"\nData     {data.rows} rows of the shape {data.shape}, {data.pairs} usable pairs{sample}")
    for reason, count in data.reject_reasons.most_common(4):
        if reason != "not_sampled":
            print(f"         left out {count}: {reason}, {REJECT_REASONS[reason]}")
    for note in data.notes:
        print(f"         {note}")
    if data.languages:
        print("         " + ", ".join(f"{name} {share:.0%}" for name, share in data.languages.items()))
    kept = ", ".join(f"{limit}: {data.share_within(limit):.1%}" for limit in sorted({*limits(model), max_tokens}))
    print(f"         pairs that each max_tokens keeps: {kept}")
    context = f", up to {model.context} tokens" if model.context else ""
    print(f"Model    {model.millions} parameters, stored in {model.dtype}{context}; {facts.template}")
    print(f"Machine  {facts.machine}")


def _show_next(plan: Plan, facts: Facts, name: str) -> None:
    print(f"\nWrote flows/recipes/{name}.yaml, with a reason for each value.")
    if not facts.model.has_template:
        print(_base_model_note(plan.params, facts.data))
    workers = plan.cluster.actor_train.num_workers
    needs = f"{plan.memory / GIB:.1f} GiB on each of {workers} training workers"
    if not plan.fits:
        ways = f"{'--lora, ' if plan.params.train.adapter is None else ''}a smaller model, or a cluster"
        print(f"warning: this needs about {needs}, more than this machine has. Use {ways}.")
    speed = measured_speed(plan.params, facts.machine)
    seconds = run_seconds(plan.params, plan.cluster, facts, speed)
    print(f"Next: `dpo run --recipe {name}` (about {_in_words(seconds)} if nothing else runs here, {needs}).")
    trial, options = short_trial(plan)
    if seconds > LONG and options:
        command, shorter = f"dpo run --recipe {name}{options}", run_seconds(trial.params, trial.cluster, facts, speed)
        print(f"A short trial first, to see that everything works: `{command}` (about {_in_words(shorter)}).")


def _base_model_note(params: Params, data: DataFacts) -> str:
    """What a model without a chat template needs, and what the recipe does about it."""
    base = "The model has no chat template: it is a base model, which continues text and has not learnt to answer."
    answers = "desirable" if data.shape == unpaired.SHAPE else "chosen"
    if params.sft is None:
        return (
            f"warning: {base} The recipe has no stage `sft`, so DPO starts from a model that does not answer. Leave "
            f"out `--set sft=null`, and the run fine-tunes it on the {answers} answers first (docs/sft.md)."
        )
    learns = f"the {answers} answers" if params.source.sft is None else f"the answers of {params.source.sft}"
    return (
        f"{base} The run therefore begins with supervised fine-tuning on {learns} (`sft` in the recipe, docs/sft.md), "
        "and DPO continues from its result. For demonstrations of your own add `--set source.sft=FILE --set "
        f"sft.learning_rate={to_yaml(params.sft.learning_rate)}`; if the model has learnt to answer, `--set sft=null` "
        "leaves the stage out."
    )


def _in_words(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}" if minutes < 120 else f"{minutes / 60:.1f} hours"
