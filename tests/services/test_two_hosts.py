"""Two hosts with their own addresses and disks, and a cable that is cut.

Results must equal those of one host: reference values, losses of DeepSpeed ZeRO-2 over both, and the weights of a run
that lost a node in the middle.
"""

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tasks.artifacts.pairs import read_rows
from tests.support.infrastructure.two_hosts import ADDRESSES, CABLE, HEAD, ONLY_B, Hosts, skip_reason, two_hosts
from tests.support.workspaces import wait_for, write_cluster

SKIP_REASON = skip_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))]


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that host b does not see, like the disk of another machine."""
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def hosts(private: Path) -> Iterator[Hosts]:
    with two_hosts(private) as pair:
        yield pair


@pytest.fixture(scope="module")
def workspace(private: Path, referenced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On host a's own disk, with the base model; only output_dir is on storage that both hosts see."""
    root = Path(shutil.copytree(referenced, private / "workspace"))
    shutil.rmtree(root / ".scratch")
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["source"]["model"] = str(shutil.copytree(params["source"]["model"], private / "base"))
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    configure(root, tmp_path_factory.mktemp("shared"))
    return root


def configure(workspace: Path, shared: Path) -> None:
    spread = {"num_workers": 2, "placement": "STRICT_SPREAD"}
    groups = {f"{group}.{key}": value for group in ("reference", "actor_train") for key, value in spread.items()}
    ray = {"ray.address": HEAD, "ray.interface": CABLE}
    write_cluster(workspace, {**ray, **groups, "actor_train.zero_stage": 2, "output_dir": str(shared)})


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def logps(workspace: Path) -> dict[str, list[float]]:
    rows = [row for split in ("train", "eval") for row in read_rows(workspace / f"data/reference/{split}.arrow")]
    return {row["id"]: row["chosen_logps"] + row["rejected_logps"] for row in rows}


def test_the_reference_group_on_two_hosts_computes_the_values_of_one(hosts, workspace, referenced):
    workspace = Path(shutil.copytree(workspace, workspace.parent / "reference"))
    shutil.rmtree(workspace / "data/reference")
    driver = hosts.open(["-m", "tasks", "reference"], workspace)
    wait_for(
        lambda: driver.poll() is not None or all(hosts.is_running(host, "ReferenceScorer") for host in ADDRESSES), 120
    )
    output = finish(driver)
    assert f"Not every node sees {workspace.parent / 'base'}; copying the workers' input to" in output
    ours, theirs = logps(workspace), logps(referenced)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == pytest.approx(theirs[name], abs=1e-6) for name in ours)


def test_a_training_that_loses_a_node_ends_with_the_same_weights(hosts, workspace, trained):
    driver = hosts.open(["-u", "-m", "tasks", "train"], workspace)
    lines: list[str] = []

    def read_until(text: str) -> None:
        """Read the driver's output until a line has the text."""
        assert driver.stdout is not None
        for line in driver.stdout:
            lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(lines))

    read_until("starts as the reference")
    shared = Path(yaml.safe_load((workspace / "infra/cluster.yaml").read_text())["output_dir"])
    wait_for(lambda: list(shared.glob("train/*/step-*")), 60)
    assert all(hosts.is_running(host, "RayTrainWorker") for host in ADDRESSES)
    hosts.cable("down")
    read_until(f"train: node {ADDRESSES['b']} is lost")
    hosts.cable("up")
    hosts.end("b")  # Ray ends on a node that was declared dead, and a service manager restarts it
    hosts.start("b")
    read_until(f"train: node {ADDRESSES['b']} has joined")
    read_until("train: restarting the workers from the last checkpoint")
    finish(driver)
    for name in ("data/metrics/train.csv", "data/metrics/train.json", "data/policy/adapter_model.safetensors"):
        assert (workspace / name).read_bytes() == (trained / name).read_bytes(), name


OLDER = "import ray; ray.__version__ = '2.59.0'; from tasks.run_stage import main; main(['reference'])"


PLACED = f"""
import ray
from tasks.cluster.placement import actor_class, reserve_placement_group
from tasks.cluster.ray_cluster import ray_cluster
from tasks.config.cluster import load_cluster


class Worker:
    def address(self):
        return ray.util.get_node_ip_address()


cluster = load_cluster()
with ray_cluster(cluster.ray, 1):
    group = cluster.reference.model_copy(update={{"resources": {{"{ONLY_B}": 1}}}})
    with reserve_placement_group(cluster.ray, group, 1) as placement_group:
        print("placed on", ray.get(actor_class(group, Worker, placement_group, 0).remote().address.remote()))
"""


def test_a_group_that_needs_a_custom_resource_runs_on_the_host_that_offers_it(hosts, workspace):
    assert f"placed on {ADDRESSES['b']}" in finish(hosts.open(["-c", PLACED], workspace))


def test_errors_of_a_cluster_are_reported_before_work_starts(hosts, workspace, private):
    unshared = Path(shutil.copytree(workspace, private / "unshared"))
    configure(unshared, private / "output")
    others = [Path(shutil.copytree(unshared, private / name)) for name in ("token", "older")]
    processes = {
        "good": hosts.open(["-m", "cli", "doctor"], workspace),
        "storage": hosts.open(["-m", "tasks", "reference"], unshared),
        "token": hosts.open(["-m", "tasks", "reference"], others[0], RAY_AUTH_TOKEN="0" * 64),
        "version": hosts.open(["-c", OLDER], others[1]),
    }
    output = {name: process.communicate(timeout=900)[0] for name, process in processes.items()}
    assert [processes[name].returncode for name in ("storage", "token", "version")] == [2, 2, 2], output
    for address in ADDRESSES.values():
        assert f"ok     Ray node {address}: python {platform.python_version()}, ray {version('ray')}," in output["good"]
    assert f"error: Ray node {ADDRESSES['b']} does not see {private / 'output'}." in output["storage"]
    assert (
        f"error: The Ray head at {HEAD} (ray.address in infra/cluster.yaml) does not accept our token."
        in output["token"]
    )
    assert f"error: Ray or Python differ between the head at {HEAD} and this machine" in output["version"]
    assert "2.59.0" in output["version"]
