"""Versions and aliases in MLflow's registry; with forward.py the only code that talks to MLflow."""

from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.files import read_json
from tasks.params import Cluster
from tasks.tracking import Run

LARGEST_UPLOAD = 2**30  # weights above it stay where they are, named by hash


def register(run: Run, cluster: Cluster, model: Path, decision: dict[str, Any]) -> str:
    """The version of this export (made once), with the alias on it where the decision says so."""
    from mlflow.exceptions import MlflowException

    from tasks.forward import store

    try:
        with store(run.folder) as client:
            return _register(client, run, model, decision)
    except (MlflowException, OSError) as error:
        raise UserError(
            f"The registry at {cluster.tracking_uri} could not be used: {str(error).splitlines()[0]} "
            "Start it or mend tracking_uri in infra/cluster.yaml, then run this again."
        ) from error


def _register(client: Any, run: Run, model: Path, decision: dict[str, Any]) -> str:
    name, digest = decision["model"], decision["manifest_sha256"]
    if not client.search_registered_models(filter_string=f"name = '{name}'"):
        client.create_registered_model(name)
    known = [v for v in client.search_model_versions(f"name = '{name}'") if v.tags.get("manifest_sha256") == digest]
    version = known[0] if known else _new_version(client, run, model, decision)
    client.set_registered_model_alias(name, "challenger", version.version)
    if decision["promoted"]:
        client.set_registered_model_alias(name, decision["alias"], version.version)
    return str(version.version)


def _new_version(client: Any, run: Run, model: Path, decision: dict[str, Any]) -> Any:
    run_id = read_json(run.folder / "run.json")["run_id"]
    small = sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) <= LARGEST_UPLOAD
    for path in sorted(model.iterdir()):
        if small or path.suffix != ".safetensors":
            client.log_artifact(run_id, str(path), "model")
    tags = {"manifest_sha256": decision["manifest_sha256"], "promoted": str(decision["promoted"]).lower()}
    tags |= {"reasons": "; ".join(decision["reasons"])} if decision["reasons"] else {}
    source = f"{client.get_run(run_id).info.artifact_uri}/model"
    return client.create_model_version(decision["model"], source, run_id, tags=tags)
