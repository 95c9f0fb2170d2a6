"""Stage `promote`: put the export into MLflow's registry and, where the gate lets it, move the alias to it.

A model that does not pass is a finished stage with reasons, not a crash. The same export twice is one version.
"""

from pathlib import Path
from typing import Any

from tasks import stage
from tasks.files import read_json, sha256, write_json
from tasks.params import Promote, load_cluster, load_params
from tasks.paths import METRICS, MODEL
from tasks.registry import register
from tasks.tracking import Run, flatten


def promote(run: Run) -> None:
    params = load_params().promote
    manifest = read_json(MODEL / "manifest.json")
    reasons = gate(params, manifest["metrics"], manifest["merge"])
    decision = {
        "model": params.model_name,
        "manifest_sha256": sha256(MODEL / "manifest.json"),
        "alias": params.alias,
        "promoted": not reasons,
        "reasons": reasons,
    }
    version = register(run, load_cluster(), Path(MODEL), decision)
    write_json(METRICS / "promote.json", decision)
    run.tags({"model_version": f"{params.model_name} {version}", "promoted": str(not reasons).lower()})
    run.summary({"promoted": float(not reasons)})
    if reasons:
        print(f"promote: {params.model_name} version {version} is registered and not promoted: {'; '.join(reasons)}")
    else:
        print(f"promote: {params.model_name} version {version} is now {params.alias}")


def gate(params: Promote, metrics: dict[str, Any], merge: dict[str, Any]) -> list[str]:
    """Why the model may not become the alias; empty when it may."""
    values = {name.replace(".", "/"): value for name, value in flatten(metrics).items()}
    reasons = [] if merge["same_greedy_text"] else ["the merged model's greedy text is not the policy's"]
    for name, least in params.require.items():
        if name not in values:
            reasons.append(f"{name} was not measured (there are {', '.join(values)})")
        elif not values[name] >= least:
            reasons.append(f"{name} is {values[name]:.4g}, below {least:g}")
    return reasons


if __name__ == "__main__":
    stage.main(promote)
