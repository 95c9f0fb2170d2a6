"""Stage `train`: preference optimization of the policy, on the worker group `actor_train`."""

import shutil
from pathlib import Path

from tasks.artifacts.models import base_folder, base_hash
from tasks.artifacts.pairs import check_inputs
from tasks.artifacts.training_data import PREFERENCES
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.config.paths import METRICS, PAIRS, POLICY, REFERENCE
from tasks.system.files import fingerprint, hash_files, publish, read_json, write_json
from tasks.tracking import plots
from tasks.tracking.journal import StageJournal
from tasks.train.driver import Training, check_options, train_locked
from tasks.train.progress import metrics_by_step, write_table
from tasks.train.worker import JOURNAL


def train(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    check_options("train", params.train, cluster)
    check_inputs()
    inputs = {
        "base": base_hash(),
        "pairs": fingerprint(hash_files(PAIRS)),
        "reference": fingerprint(read_json(REFERENCE / "manifest.json")),
    }
    training = Training("train", params, cluster, base_folder(params.source.model), PREFERENCES, inputs)
    with train_locked(training, run) as folder:
        _publish(run, folder)


def _publish(run: StageJournal, folder: Path) -> None:
    """Write the policy, its curves and its final metrics as DVC outputs."""
    steps = metrics_by_step(folder / JOURNAL)
    with publish(POLICY) as out:
        shutil.copytree(folder / "policy", out, dirs_exist_ok=True)
    METRICS.mkdir(parents=True, exist_ok=True)
    write_table(METRICS / "train.csv", steps)
    final = {name: value for row in steps.values() for name, value in row.items() if name not in ("pairs", "tokens")}
    write_json(METRICS / "train.json", final)
    plots.curves(steps, run.folder / "curves.png")
    run.artifact(run.folder / "curves.png")
    run.summary({name: value for name, value in final.items() if not name.startswith("eval/")})
