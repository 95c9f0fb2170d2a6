"""The configuration of a run, resolved once: params.yaml and infra/cluster.yaml with the site, a recipe and overrides.

What a run starts with is in `RunConfig`. Its stages read two files that are made of it in the run's worktree:
params.yaml as a whole, and infra/overrides.yaml with the run's own cluster settings. Those of the site stay out: they
do not belong in a run's commit, and a run that is resumed on another machine gets that machine's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config.cluster import (
    CLUSTER,
    OVERRIDES,
    RENAMED,
    SITE,
    Cluster,
    groups,
    load_cluster,
    operator_layers,
    refuse_renamed,
    rename_groups,
    run_layers,
    validated,
)
from tasks.config.params import Params, read_recipe
from tasks.config.paths import ROOT
from tasks.config.strict import Layer, Value, changed, dotted, merge, overlay, read_yaml, validate
from tasks.config.train import with_whole_loss
from tasks.errors import UserError
from tasks.runs import older_code

ConfigFiles = dict[str, dict[str, Any]]  # content by path, of the files that differ from the checkout's


@dataclass(frozen=True)
class RunConfig:
    recipe: str | None
    overrides: dict[str, Any]
    content: dict[str, Any]  # of params.yaml
    params: Params
    cluster: Cluster
    files: ConfigFiles  # what a worktree needs, beyond the files of its commit
    origins: dict[str, Value]  # of each value that is not the default; cluster settings begin with `cluster.`

    def values(self) -> dict[str, Any]:
        """All of params.yaml, validated, as JSON."""
        return self.params.model_dump(mode="json")


def resolve(recipe: str | None, overrides: dict[str, Any] | None, root: Path = ROOT) -> RunConfig:
    """Of a new run. UserError if the values of the checkout, or those with the recipe and the overrides, are wrong."""
    params_layers, of_run = _layers(recipe, overrides, root)
    before = validate(Params, dict(params_layers[0].content), root / "params.yaml")
    content, changes = merge(params_layers, Params), " and ".join(layer.origin for layer in params_layers[1:])
    params = validate(Params, content, Path(f"params.yaml with {changes}")) if changes else before

    of_operator, of_checkout = operator_layers(root), run_layers(root)  # the latter in a folder of `dpo open`
    cluster_layers = [*of_operator, *of_checkout, *of_run]
    cluster = validated(cluster_layers, root)
    files: ConfigFiles = {"params.yaml": content} if params != before else {}
    if cluster != validated([*of_operator, *of_checkout], root):
        files[str(OVERRIDES)] = merge([*of_checkout, *of_run], Cluster)

    # The defaults of params.yaml are the values in the file, those of the cluster settings the schema's.
    origins = {f"cluster.{name}": value for name, value in changed(cluster_layers, Cluster).items()}
    origins = {**changed(params_layers, Params), **origins}
    return RunConfig(recipe, overrides or {}, content, params, cluster, files, origins)


def changed_on_resume(root: Path, overrides: dict[str, Any]) -> ConfigFiles:
    """The configuration files of a run's worktree that overrides change, validated."""
    before = read_yaml(root / "params.yaml")
    nested, cluster = _split(overrides, before)
    files: ConfigFiles = {}
    if nested:
        files["params.yaml"] = overlay(before, nested, Params)
        validate(Params, files["params.yaml"], Path(f"{root / 'params.yaml'} with overrides"))
    if cluster:
        resumed = rename_groups(read_yaml(root / OVERRIDES), RENAMED) if (root / OVERRIDES).exists() else {}
        files[str(OVERRIDES)] = older_code.group_names(root, overlay(resumed, cluster, Cluster))
        load_cluster(root, cluster)
    return files


def _layers(recipe: str | None, overrides: dict[str, Any] | None, root: Path) -> tuple[list[Layer], list[Layer]]:
    """Of params.yaml: the file, the recipe, the overrides. Of the cluster settings: the recipe and the overrides."""
    params = [Layer("params.yaml", read_yaml(root / "params.yaml"))]
    params += [Layer(f"the recipe {recipe}", read_recipe(recipe))] if recipe else []
    nested, cluster = _split(overrides or {}, merge(params, Params))
    params += [Layer("overrides", nested)] if nested else []
    from_recipe = read_recipe(recipe, "cluster") if recipe else {}
    return params, [Layer(f"the recipe {recipe}", from_recipe), Layer("overrides", cluster)]


def _split(overrides: dict[str, Any], params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Overrides of params.yaml, whose values so far are `params`, and of the cluster settings; both nested."""
    nested = dotted(with_whole_loss(overrides, params))
    cluster = nested.pop("cluster", {})
    refuse_renamed(cluster, "the override of `cluster`")
    if refused := [name for name in cluster if name not in groups()]:
        raise UserError(
            f"An override cannot set `cluster.{refused[0]}`, only keys of {', '.join(groups())}. "
            f"Set it in {CLUSTER} or the site's overlay ({SITE})."
        )
    return nested, cluster
