"""The names that commands take for a model: `champion`, `3`, `MODEL/champion`, `MODEL/3`, a run, or MODEL alone.

MODEL is a registered model, or a recipe or run that registers one. Without MODEL it is promote.model_name of
params.yaml; MODEL alone is its champion. Names that are no version's: a folder, `hub:owner/name`, `base`, `MODEL/base`
(tasks/runs/named_model.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.artifacts.models import HUB, REGISTRY
from tasks.config.addresses import as_path
from tasks.config.cluster import load_cluster
from tasks.config.params import RECIPES, load_params, read_recipe
from tasks.config.paths import main_checkout
from tasks.config.promote import Promote
from tasks.errors import UserError
from tasks.system.files import read_json_or_empty
from tasks.tracking.registry import NotRegistered, Registry, Version, is_registered, registry

VERSION, FOLDER, HUB_MODEL, BASE_MODEL = "a registered version", "a folder", "a model of the hub", "a base model"
BRANCH = "runs/"  # of a run: runs/NAME


def read_name(name: str) -> tuple[str, str]:
    """What kind of model a name means; of a version or base model also the name of the version, or of its model."""
    if name.startswith(HUB):
        return HUB_MODEL, name
    if (as_path(name) / "config.json").exists():
        return FOLDER, name
    if name.startswith(("/", "./", "../", "~")):
        raise UserError(f"There is no model in {name} (no config.json). Name the folder of a model.")
    plain = plain_name(name)
    if plain == "base" or plain.endswith("/base"):
        return BASE_MODEL, plain.removesuffix("base").rstrip("/")
    return VERSION, plain


def plain_name(name: str) -> str:
    """A run by its branch and a version by its address are the run and the version."""
    name = name.removeprefix(REGISTRY)
    run = name.removeprefix(BRANCH)
    if run == name or not (main_checkout() / load_cluster().logging_dir / run.partition("/")[0]).is_dir():
        return name
    return run


def promote_params(name: str | None) -> Promote:
    """The section `promote` with the model name, alias and push address of a model."""
    default = load_params().promote
    if name is None:
        return default
    runs = main_checkout() / load_cluster().logging_dir
    newest_first = sorted(runs.glob("*/params.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    sections = [
        read_json_or_empty(path).get("promote", {}) for path in (runs / name / "params.json", *newest_first[:100])
    ]
    section: dict[str, Any] = sections[0] or next((other for other in sections if other.get("model_name") == name), {})
    if not section and (RECIPES / f"{name}.yaml").exists():
        section = read_recipe(name).get("promote", {})
    known = {key: value for key, value in section.items() if key in ("model_name", "alias", "push")}
    return default.model_copy(update={"model_name": name, **known})


@contextmanager
def registered_version(name: str) -> Iterator[tuple[Promote, Registry, Version]]:
    """The version that a name means, with its registry and the section `promote` of its model."""
    kind, plain = read_name(name)
    if kind != VERSION:
        raise UserError(
            f"'{name}' is {kind}, and this needs a registered version: champion, 3, a run, MODEL/champion or MODEL/3."
        )
    params, version_name = _resolve(plain)
    with registry(load_cluster(), params.model_name) as models:
        if version := _find(models, version_name):
            yield params, models, version
            return
        versions = ", ".join(f"{version.number} (run {version.run})" for version in models.versions())
        if version_name == params.alias and versions:
            raise NotRegistered(
                f"{models.name} has no {params.alias}: no version passed the gate. Its versions: {versions}. "
                f"Name one of them, as in {models.name}/{models.versions()[-1].number}."
            )
        raise NotRegistered(
            f"There is no model '{name}': {models.name} has no version, alias or run {version_name}. Its versions: "
            f"{versions or 'none'}. {models.others()}".rstrip()
        )


def _resolve(name: str) -> tuple[Promote, str]:
    model, _, version = name.rpartition("/")
    if model:
        return promote_params(model), version
    cluster = load_cluster()
    if (main_checkout() / cluster.logging_dir / name / "params.json").exists():
        return promote_params(name), name
    if (RECIPES / f"{name}.yaml").exists() or is_registered(cluster, name):
        params = promote_params(name)
        return params, params.alias
    return load_params().promote, name


def _find(models: Registry, name: str) -> Version | None:
    return models.version(name) if name.isdecimal() else models.at(name) or models.of_run(name)
