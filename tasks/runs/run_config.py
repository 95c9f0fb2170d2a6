"""The configuration of a run: the checkout's params.yaml and infra/cluster.yaml with a recipe and overrides applied."""

from pathlib import Path
from typing import Any

from tasks.config.cluster import (
    CLUSTER,
    OVERRIDES,
    RECIPE,
    RENAMED,
    SITE,
    Cluster,
    changed_values,
    groups,
    load_cluster,
    refuse_renamed,
    rename_groups,
)
from tasks.config.params import Params, read_recipe
from tasks.config.paths import ROOT
from tasks.config.strict import Layer, Value, changed, dotted, merge, overlay, read_yaml, validate
from tasks.errors import UserError
from tasks.runs import older_code

ConfigFiles = dict[str, dict[str, Any]]  # content by path, of the files that differ from the checkout's


def changed_files(recipe: str | None, overrides: dict[str, Any] | None) -> ConfigFiles:
    """The configuration files that a recipe and overrides change, validated: params.yaml as a whole, cluster
    settings as overlays, so that the site's values apply below them on any machine that resumes the run."""
    params, cluster = _layers(recipe, overrides)
    origin = " and ".join(layer.origin for layer in params[1:])
    files: ConfigFiles = {}
    unchanged = validate(Params, dict(params[0].content), ROOT / "params.yaml")
    content = merge(params, Params)
    if validate(Params, content, Path(f"params.yaml with {origin}")) != unchanged:
        files["params.yaml"] = content
    from_recipe, from_overrides = (dict(layer.content) for layer in cluster)
    with_recipe = load_cluster(ROOT, from_recipe)
    if with_recipe != load_cluster(ROOT):
        files[str(RECIPE)] = from_recipe
    if load_cluster(ROOT, from_recipe, from_overrides) != with_recipe:
        files[str(OVERRIDES)] = from_overrides
    return files


def changed_on_resume(root: Path, overrides: dict[str, Any]) -> ConfigFiles:
    """The configuration files of a run's worktree that overrides change, validated."""
    nested, cluster = _split(overrides)
    files: ConfigFiles = {}
    if nested:
        files["params.yaml"] = overlay(read_yaml(root / "params.yaml"), nested, Params)
        validate(Params, files["params.yaml"], Path(f"{root / 'params.yaml'} with overrides"))
    if cluster:
        before = rename_groups(read_yaml(root / OVERRIDES), RENAMED) if (root / OVERRIDES).exists() else {}
        files[str(OVERRIDES)] = older_code.group_names(root, overlay(before, cluster, Cluster))
        load_cluster(root, cluster)
    return files


def non_default_values(recipe: str | None, overrides: dict[str, Any] | None) -> dict[str, Value]:
    """Each value that is not the default, and its origin. Names of cluster settings begin with `cluster.`.

    The defaults of params.yaml are the values in the file, those of the cluster settings the schema's.
    """
    params, cluster = _layers(recipe, overrides)
    values = {f"cluster.{name}": value for name, value in changed_values(ROOT, *cluster).items()}
    return {**changed(params, Params), **values}


def _layers(recipe: str | None, overrides: dict[str, Any] | None) -> tuple[list[Layer], list[Layer]]:
    """Of params.yaml: the file, the recipe, the overrides. Of the cluster settings: the recipe and the overrides."""
    nested, cluster = _split(overrides or {})
    params = [Layer("params.yaml", read_yaml(ROOT / "params.yaml"))]
    params += [Layer(f"the recipe {recipe}", read_recipe(recipe))] if recipe else []
    params += [Layer("overrides", nested)] if nested else []
    from_recipe = read_recipe(recipe, "cluster") if recipe else {}
    return params, [Layer(f"the recipe {recipe}", from_recipe), Layer("overrides", cluster)]


def _split(overrides: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Overrides of params.yaml and of the cluster settings, nested."""
    nested = dotted(overrides)
    cluster = nested.pop("cluster", {})
    refuse_renamed(cluster, "the override of `cluster`")
    if refused := [name for name in cluster if name not in groups()]:
        raise UserError(
            f"An override cannot set `cluster.{refused[0]}`, only keys of {', '.join(groups())}. "
            f"Set it in {CLUSTER} or the site's overlay ({SITE})."
        )
    return nested, cluster
