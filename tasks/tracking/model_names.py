"""The names that commands take for a model: `champion`, `3`, `MODEL/champion`, `MODEL/3`, a run, or MODEL alone.

MODEL is a registered model, or a recipe or run that registers one. Without MODEL it is promote.model_name of
params.yaml; MODEL alone is its champion.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.config.params import RECIPES, Promote, load_cluster, load_params, read_recipe
from tasks.config.paths import home
from tasks.system.files import recall
from tasks.tracking.registry import NotRegistered, Registry, Version, is_registered, registry


def promote_params(name: str | None) -> Promote:
    """The section `promote` with the model name, alias and push address of a model."""
    default = load_params().promote
    if name is None:
        return default
    runs = home() / load_cluster().logging_dir
    newest_first = sorted(runs.glob("*/params.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    sections = [recall(path).get("promote", {}) for path in (runs / name / "params.json", *newest_first[:100])]
    section: dict[str, Any] = sections[0] or next((other for other in sections if other.get("model_name") == name), {})
    if not section and (RECIPES / f"{name}.yaml").exists():
        section = read_recipe(name).get("promote", {})
    known = {key: value for key, value in section.items() if key in ("model_name", "alias", "push")}
    return default.model_copy(update={"model_name": name, **known})


@contextmanager
def registered_version(name: str) -> Iterator[tuple[Promote, Registry, Version]]:
    """The version that a name means, with its registry and the section `promote` of its model."""
    params, version_name = _resolve(name)
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
    if (home() / cluster.logging_dir / name / "params.json").exists():
        return promote_params(name), name
    if (RECIPES / f"{name}.yaml").exists() or is_registered(cluster, name):
        params = promote_params(name)
        return params, params.alias
    return load_params().promote, name


def _find(models: Registry, name: str) -> Version | None:
    return models.version(name) if name.isdecimal() else models.at(name) or models.of_run(name)
