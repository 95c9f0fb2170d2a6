"""The private parts of Ray that tasks/cluster/ray_internals.py uses; these tests fail where an upgrade changes them."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import create_scaling_policy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tasks.cluster.ray_internals import HELPERS, EmbeddedTrainer, FixedSize

PROJECT = Path(__file__).resolve().parents[2]
ALWAYS = {"DashboardAgent", "RuntimeEnvAgent", "IDLE"}  # of every Ray
NEEDED = {"TrainController", "SynchronizationActor", "RayTrainWorker"}  # the second is the workers' barrier
# A training whose worker prints the names of Ray's processes.
TRAINING = """
import sys
from pathlib import Path
from tasks.cluster.ray_cluster import ray_cluster
from tasks.config.cluster import load_cluster

def train(config):
    import psutil
    titles = (" ".join(process.cmdline()) for process in psutil.Process().parent().children(recursive=True))
    Path(config["titles"]).write_text("".join(f"{title}\\n" for title in titles if title.startswith("ray::")))

with ray_cluster(load_cluster(Path(sys.argv[1])).ray, 2) as session:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from tasks.cluster.ray_internals import EmbeddedTrainer
    from tasks.cluster.rendezvous import Rendezvous
    (EmbeddedTrainer if sys.argv[2] == "ours" else DataParallelTrainer)(
        train,
        train_loop_config={"titles": str(Path("titles").resolve())},
        backend_config=Rendezvous(session=str(session)),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="one", storage_path=str(Path("ray").resolve())),
    ).fit()
"""


def test_ray_still_has_the_callbacks_that_we_leave_out():
    everything, ours = (
        [type(callback) for callback in trainer(lambda: None)._create_default_callbacks()]
        for trainer in (DataParallelTrainer, EmbeddedTrainer)
    )
    assert set(HELPERS) < set(everything)
    assert ours == [kind for kind in everything if kind not in HELPERS]


def test_the_controller_gets_our_policy_which_never_asks_for_nodes(monkeypatch):
    monkeypatch.setattr(DataParallelTrainer, "_initialize_and_run_controller", lambda self, **given: given)
    scaling = ScalingConfig(num_workers=2)
    theirs = create_scaling_policy(scaling)
    given = EmbeddedTrainer(lambda: None, scaling_config=scaling)._initialize_and_run_controller(scaling_policy=theirs)
    policy = given["scaling_policy"]
    assert type(policy) is FixedSize
    assert type(theirs) is FixedSize.__base__
    policy.after_controller_start(None)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    policy.make_decision_for_running_worker_group(None, None)
    policy.before_controller_abort()
    assert policy._coordinator_client is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "helpers"),
    [
        ("ours", set()),
        pytest.param(
            "theirs",
            {"DatasetManager", "PlacementGroupCleaner", "_AutoscalingCoordinatorActor"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_an_embedded_training_starts_no_process_that_it_does_not_need(tmp_path, trainer, helpers):
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}  # ordinary interpreters, whose titles Ray sets
    command = [sys.executable, "-c", TRAINING, str(PROJECT), trainer]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    titles = re.findall(r"(?m)^ray::(\w+)", (tmp_path / "titles").read_text())
    assert {title for title in titles if title not in ALWAYS} == NEEDED | helpers


def private_imports(path: Path) -> Iterator[str]:
    """Names of Ray with a part that begins with an underscore."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in getattr(node, "names", ())] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *parts = name.split(".")
            if package == "ray" and any(part.startswith("_") for part in parts):
                yield name


def test_no_other_file_imports_private_parts_of_ray():
    files = [
        path for layer in ("cli", "flows", "services", "tasks", "training") for path in (PROJECT / layer).rglob("*.py")
    ]
    assert {path.name for path in files if any(private_imports(path))} == {"ray_internals.py"}
