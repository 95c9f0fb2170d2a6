"""infra/k8s, infra/compose.yaml and infra/Dockerfile, as far as a machine without Kubernetes and Docker can check them.

Against the schemas (Kubernetes' own, Compose's own, ours of KubeRay's documented fields), and against this repository:
versions, commands, options, addresses, secrets and paths that they name exist.
"""

import copy
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from infra.lock import read
from services.mlflow_urls import mlflow_link
from tasks.config.cluster import load_cluster
from tasks.config.strict import read_yaml
from tests.support.infrastructure import kuberay, kustomize

ROOT = Path(__file__).resolve().parents[2]
INFRA, K8S = ROOT / "infra", ROOT / "infra" / "k8s"
LOCK = {name: version for name, version, _ in read(ROOT / "requirements.lock")}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"dpo-pipeline:{VERSION}"
KUSTOMIZATION = yaml.safe_load((K8S / "kustomization.yaml").read_text())
NOT_KUBERNETES = {"kustomization.yaml", "cluster.yaml"}
MANIFESTS = [
    (path.name, document)
    for path in sorted(K8S.glob("*.yaml"))
    if path.name not in NOT_KUBERNETES
    for document in yaml.safe_load_all(path.read_text())
]
OVERLAYS = ("k8s", "k8s-cpu", "k8s-gpu")
BIN = Path(sys.executable).parent


@cache
def build(overlay: str) -> list[kustomize.Document]:
    return kustomize.build(INFRA / overlay)


def named(manifest: tuple[str, dict[str, Any]]) -> str:
    return f"{manifest[0]}-{manifest[1]['kind']}"


def check(manifest: dict[str, Any]) -> None:
    """Raise if a field is unknown, missing or has the wrong type."""
    if manifest["apiVersion"].startswith("ray.io/"):
        jsonschema.validate(manifest, kuberay.SCHEMAS[manifest["kind"]])
        for pod in kuberay.pods(manifest):
            kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    else:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=named)
def test_a_manifest_follows_its_schema(manifest):
    check(manifest[1])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_builds_and_every_reference_exists(overlay):
    built = build(overlay)
    for document in built:
        check(document)
    names = {(document["kind"], document["metadata"]["name"]) for document in built} | {("Secret", "dpo")}
    secrets = set(re.findall(r"^(\w+)=", (K8S / "secrets.env.example").read_text(), re.M))
    images = yaml.safe_load((INFRA / overlay / "kustomization.yaml").read_text())["images"]
    images = {
        f"{image['name']}:{image['newTag']}" for image in images
    }  # each can be moved and pinned where it is applied
    known = {"configMap": ("ConfigMap", "name"), "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName")}
    for place, value in (entry for document in built for entry in walk(document)):
        key = place[-1] if place else None
        if key in known and isinstance(value, dict):
            kind, field = known[key]
            assert (kind, value[field]) in names
        elif key == "image":
            assert value in images
        elif key == "secretKeyRef":
            assert ("Secret", value["name"]) in names
            assert value["key"] in secrets


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_worker_of_a_group_fits_into_the_pods_of_its_overlay(overlay):
    built = {(document["kind"], document["metadata"]["name"]): document for document in build(overlay)}
    place = load_cluster(ROOT, yaml.safe_load(built["ConfigMap", "dpo"]["data"]["cluster.yaml"]))
    ray = built["RayCluster", "dpo"]["spec"]["workerGroupSpecs"]
    for name in ("reference", "actor_train", "inference"):
        ours, room = getattr(place, name), 0
        assert ours.resources == {name: 1}
        for group in ray:
            (container,) = group["template"]["spec"]["containers"]
            requests = container["resources"]["requests"]
            offered = json.loads(json.loads(group["rayStartParams"]["resources"])).get(name, 0)
            by_cpu = float(requests["cpu"]) // ours.cpus_per_worker
            gpus = float(requests.get("nvidia.com/gpu", 0))
            by_gpu = gpus // ours.gpus_per_worker if ours.gpus_per_worker else by_cpu
            room += group["maxReplicas"] * int(min(offered, by_cpu, by_gpu))
            assert bool(gpus) == (overlay != "k8s-cpu")
        assert ours.num_workers <= room, f"{name}: {ours.num_workers} workers, room for {room}"
    if overlay == "k8s-gpu":  # one GPU a pod would keep the ranks of a node from NVLink
        assert {
            group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for group in ray
        } == {"8"}


def walk(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield place, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from walk(below, (*place, key))


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("raycluster.yaml", ("spec", "workerGroupSpecs", 0, "maxReplicas")),
        ("raycluster.yaml", ("spec", "headGroupSpec", "template", "spec", "containers", 0, "env")),
        ("rayjob.yaml", ("spec", "submissionMode")),
        ("worker.yaml", ("spec", "template", "spec", "containers", 0, "resources")),
    ],
)
def test_a_misspelt_field_is_rejected(file, place):
    """The checks above do fail for the same manifests with one misspelt name."""
    broken = copy.deepcopy(next(document for name, document in MANIFESTS if name == file))
    inside: Any = broken
    for key in place[:-1]:
        inside = inside[key]
    inside[f"{place[-1]}s"] = inside.pop(place[-1])
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(broken)


def everything(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in MANIFESTS if document["kind"] == kind]


def test_kustomization_names_every_file_and_every_reference_exists():
    files = {path.name for path in K8S.glob("*.yaml")} - NOT_KUBERNETES
    assert set(KUSTOMIZATION["resources"]) == files - {"rayjob.yaml"}
    secrets = {line.partition("=")[0] for line in (K8S / "secrets.env.example").read_text().splitlines() if "=" in line}
    maps = {document["metadata"]["name"] for document in everything("ConfigMap")} | {"dpo"}
    claims = {document["metadata"]["name"] for document in everything("PersistentVolumeClaim")}
    used = set()
    for place, value in (entry for _, document in MANIFESTS for entry in walk(document)):
        match place[-1] if place else None:
            case "secretKeyRef":
                assert value["name"] == "dpo"
                used.add(value["key"])
            case "configMap":
                assert value["name"] in maps
            case "claimName":
                assert value in claims
            case "image":
                assert value in (IMAGE, "postgres:17-alpine")
                assert value.partition(":")[0] in {image["name"] for image in KUSTOMIZATION["images"]}
    (cluster,) = everything("RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "dpo"}
    assert used | {"auth_token"} == secrets
    assert KUSTOMIZATION["images"][0] == {"name": "dpo-pipeline", "newTag": VERSION}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod of our manifests and their overlays."""
    built = [(f"{name}:{one['kind']}", one) for name in ("k8s-cpu", "k8s-gpu") for one in build(name)]
    for file, document in [*MANIFESTS, *built]:
        if document["apiVersion"].startswith("ray.io/"):
            yield from ((f"{file}-{number}", pod["spec"]) for number, pod in enumerate(kuberay.pods(document)))
        elif "template" in document.get("spec", {}):
            yield file, document["spec"]["template"]["spec"]


@pytest.mark.parametrize(("where", "pod"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_pod_has_minimal_privileges(where, pod):
    ask = pod["securityContext"]
    assert ask["runAsNonRoot"]
    assert ask["runAsUser"] > 0
    assert ask["seccompProfile"] == {"type": "RuntimeDefault"}
    # The autoscaler beside Ray's head asks Kubernetes for pods.
    assert pod.get("automountServiceAccountToken") is (
        None if where.endswith(("raycluster.yaml-0", "RayCluster-0")) else False
    )
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}  # the rest is read-only
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
        if "ray" not in where.lower() and not where.endswith("Job"):  # KubeRay makes its own; a job ends
            assert {"readinessProbe", "livenessProbe"} <= set(container)
            for probe in (value for key, value in container.items() if key.endswith("Probe") and "httpGet" in value):
                assert (
                    probe["httpGet"]["httpHeaders"][0]["name"] == "Host"
                )  # the servers answer to their own names alone


def test_network_policies_allow_only_the_needed_connections():
    policies = {document["metadata"]["name"]: document["spec"] for document in everything("NetworkPolicy")}
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    apps = {document["spec"]["selector"]["matchLabels"]["app"] for document in everything("Deployment")} | {"postgres"}
    budgets = [document["spec"] for document in everything("PodDisruptionBudget")]
    kept = [budget["selector"]["matchLabels"] for budget in budgets]
    for app in apps:
        assert policies[app]["podSelector"] == {"matchLabels": {"app": app}}
        assert {"app": app} in kept
    ports = {document["metadata"]["name"]: document["spec"]["ports"][0]["port"] for document in everything("Service")}
    for app, port in ports.items():  # who comes in, comes by the service's port, and is let out there
        (rule,) = policies[app]["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]
        for peer in rule["from"]:
            name = peer["podSelector"]["matchLabels"].get("app", "ray")
            towards = [
                to["podSelector"]["matchLabels"]
                for out in policies[name]["egress"]
                for to in out["to"]
                if "podSelector" in to
            ]
            assert {"app": app} in towards, f"{name} may not reach {app}"
    everywhere = [
        (name, peer)
        for name, spec in policies.items()
        for rule in spec.get("ingress", [])
        for peer in rule.get("from", [{}])
        if not peer or "ipBlock" in peer
    ]
    assert not everywhere


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (f'image: dpo@sha256:{"a" * 64}\n  - image: "pg:17@sha256:{"b" * 64}"\n', 0, "every image is pinned"),
        (f"image: dpo:0.1.0\nimage: pg@sha256:{'b' * 64}\n", 1, "  dpo:0.1.0\n"),
        ("nothing: here\n", 2, "found no image"),
    ],
)
def test_an_image_without_a_digest_is_listed(text, status, message):
    done = subprocess.run([INFRA / "check-images.sh"], input=text, capture_output=True, text=True)
    assert done.returncode == status
    assert message in done.stdout + done.stderr
    assert done.returncode == 0 or "@sha256" not in done.stderr


def test_ray_in_kubernetes_matches_the_code():
    (ray,) = everything("RayCluster")
    assert ray["spec"]["rayVersion"] == LOCK["ray"]
    place = load_cluster(ROOT, read_yaml(K8S / "cluster.yaml"))
    assert place.ray.address == f"{ray['metadata']['name']}-head-svc:6379"  # the service that KubeRay makes
    groups = {group["groupName"]: group for group in ray["spec"]["workerGroupSpecs"]}
    for name in ("reference", "actor_train", "inference"):
        ours = getattr(place, name)
        (container,) = groups[name]["template"]["spec"]["containers"]
        offered = json.loads(json.loads(groups[name]["rayStartParams"]["resources"]))
        assert ours.resources == offered == {name: 1}
        assert ours.num_workers <= groups[name]["maxReplicas"]  # a worker takes the whole of its node's resource
        assert ours.gpus_per_worker == float(container["resources"]["limits"]["nvidia.com/gpu"])
        assert ours.cpus_per_worker <= float(container["resources"]["requests"]["cpu"])
    mounts = {m["mountPath"] for _, c in walk(ray) if isinstance(c, dict) for m in c.get("volumeMounts", [])}
    assert place.output_dir.startswith("/shared/")
    assert "/shared" in mounts
    (job,) = everything("RayJob")
    assert job["spec"]["clusterSelector"]["ray.io/cluster"] == ray["metadata"]["name"]
    entrypoint = shlex.split(shlex.split(job["spec"]["entrypoint"])[2])
    assert importlib.util.find_spec(entrypoint[entrypoint.index("-m") + 1])
    assert (ROOT / "flows" / "recipes" / f"{entrypoint[-1]}.yaml").exists()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_drives_runs_or_serves_has_the_operators_key(overlay):
    """A container makes a key in its home otherwise, which is gone with the pod."""
    built = build(overlay)
    parts = [value for document in built for _, value in walk(document) if isinstance(value, dict)]
    containers = [container for part in parts for container in part.get("containers", [])]
    needed = ["ray-head"]  # it runs the entry points of RayJobs
    needed += [one["name"] for one in containers if {"infra/worker.sh", "dpo"} & set(one.get("args", []))]
    secret = {"name": "DPO_SIGNING_KEY", "valueFrom": {"secretKeyRef": {"name": "dpo", "key": "signing_key"}}}
    assert sorted(one["name"] for one in containers if secret in one.get("env", [])) == sorted(needed)
    assert sorted(needed) == ["ray-head", "serve", "worker"]


COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def commands() -> list[tuple[str, list[str]]]:
    """Every command in Compose and Kubernetes."""
    commands = [(name, service["command"]) for name, service in SERVICES.items() if service["image"].startswith(IMAGE)]
    for file, document in MANIFESTS:
        for _, value in walk(document):
            if isinstance(value, dict) and value.get("image") == IMAGE and "args" in value:
                commands.append((file, value["args"]))
    return commands


@pytest.mark.parametrize(("where", "command"), commands())
def test_a_command_exists_with_its_options(where, command):
    if command[0].endswith(".sh"):
        assert (ROOT / command[0]).stat().st_mode & 0o111
        return
    assert (BIN / command[0]).exists()
    if command[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(command[2])
    options = {word for word in command if word.startswith("--")}
    assert options <= known_options(command), where


def known_options(command: list[str]) -> set[str]:
    if command[0] == "ray":
        from ray.scripts.scripts import start

        return {option for parameter in start.params for option in parameter.opts}
    if "tasks.tracking.mlflow_server" in command:
        from mlflow.cli import server

        return {option for parameter in server.params for option in parameter.opts}
    if "services.metrics_endpoint" in command:  # started with them by tests/services/test_services.py
        return {"--host", "--port"}
    if command[:2] == ["dpo", "serve"]:
        from typer.main import get_command

        from cli.main import app

        return {option for parameter in get_command(app).commands["serve"].params for option in parameter.opts}
    if "services.prefect_sqlite" in command:  # started with them by tests/services/test_postgres_s3.py
        return {"--host", "--port"}
    return set()


@pytest.mark.parametrize("path", sorted((INFRA / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_a_unit_starts_commands_that_exist_with_their_options(path, tmp_path):
    text = path.read_text()
    started = re.findall(r"(?m)^Exec(?:Start|Stop|Reload)=(.+)$", text)
    assert len(started) >= 2
    for line in started:
        program, *words = shlex.split(line)
        if program.endswith("/dpo"):
            assert words[0] in ("up", "down")
            continue
        assert (BIN / Path(program).name).exists()
        assert words[0] == "start" or importlib.util.find_spec(words[1])
        assert {word for word in words if word.startswith("--")} <= known_options(["ray"])
    if not shutil.which("systemd-analyze"):
        return
    runs_here = re.sub(r"/opt/dpo/\.venv/bin", "/bin", text).replace("/bin/ray ", "/bin/true ")
    runs_here = re.sub("/bin/(python|dpo) ", "/bin/true ", runs_here).replace("User=dpo", "User=root")
    (tmp_path / path.name).write_text(runs_here.replace("WorkingDirectory=/opt/dpo", "WorkingDirectory=/"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / path.name], capture_output=True, text=True
    )
    assert path.name not in checked.stdout + checked.stderr  # it also tells of units of this machine


def test_the_shell_scripts_parse():
    for name in ("worker.sh", "backup.sh"):
        subprocess.run(["bash", "-n", INFRA / name], check=True)
    named_files = re.findall(r"infra/[\w.]+", (INFRA / "worker.sh").read_text())
    assert all((ROOT / name).exists() for name in named_files)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_follows_its_schema(name):
    done = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", INFRA / name],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_docker_itself_reads_the_compose_file(tmp_path):
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("the command `docker compose` is not here")
    filled = [
        f"{line}secret" if line.endswith("=") else line for line in (INFRA / "env.example").read_text().split("\n")
    ]
    (tmp_path / "env").write_text("\n".join(filled))
    files = ["-f", INFRA / "compose.yaml", "-f", INFRA / "compose.gpu.yaml"]
    subprocess.run(["docker", "compose", *files, "--env-file", tmp_path / "env", "config", "--quiet"], check=True)
    empty = subprocess.run(
        ["docker", "compose", *files, "--env-file", INFRA / "env.example", "config"], capture_output=True, text=True
    )
    assert empty.returncode
    assert "Copy infra/env.example to infra/.env" in empty.stderr


def test_compose_contains_no_secret_and_publishes_only_on_loopback():
    text = (INFRA / "compose.yaml").read_text()
    needed = set(re.findall(r"\$\{(\w+):\?[^}]*Copy infra/env.example to infra/.env", text))
    assert all(service["image"].endswith("_DIGEST:-}") for service in SERVICES.values())  # the operator's to fill in
    example = {
        line.partition("=")[0]: line.partition("=")[2] for line in (INFRA / "env.example").read_text().split("\n")
    }
    assert needed == {name for name in example if name and not name.startswith("#")}
    assert not any(example[name] for name in needed)
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= needed
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for secret in ("infra/.env", "infra/k8s/secrets.env"):
        assert subprocess.run(["git", "check-ignore", "-q", secret], cwd=ROOT).returncode == 0, secret


def test_compose_services_find_each_other():
    assert all("healthcheck" in SERVICES[name] for name in set(SERVICES) - {"bucket"})
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"], name
        assert name == "ray-worker" or service["deploy"]["resources"]["limits"]["memory"], name
        assert name == "s3" or int(service["user"].partition(":")[0]) > 0, name
        writable = [place.partition(":")[0] for place in service["tmpfs"]]
        assert "/tmp" in writable + service.get("volumes", []), name
    for host, port in re.findall(r"(?://|@)([a-z][a-z0-9-]*):(\d+)", (INFRA / "compose.yaml").read_text()):
        if host == "localhost":
            continue
        assert host in SERVICES
        words = [*SERVICES[host].get("command", []), *{"postgres": ["5432"], "s3": ["7070"]}.get(host, [])]
        assert port in words
    head = SERVICES["ray-head"]["command"]
    address = f"ray-head:{head[head.index('--port') + 1]}"
    assert address in SERVICES["ray-worker"]["command"]
    for name in ("compose.cluster.yaml", "compose.gpu-cluster.yaml"):
        place = load_cluster(ROOT, read_yaml(INFRA / name))
        assert place.ray.address == SERVICES["worker"]["environment"]["RAY_HEAD"] == address
        assert place.tracking_uri == "http://mlflow:5000"
        assert place.output_dir.startswith("/shared/")
    assert all(
        "shared:/shared" in SERVICES[name]["volumes"] for name in ("ray-head", "ray-worker", "worker", "prefect")
    )
    assert SERVICES["worker"]["environment"]["DPO_CLUSTER"] == "/shared/dpo/infra/compose.cluster.yaml"


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_links_use_addresses_that_a_browser_can_reach(where, monkeypatch):
    """Only containers can resolve the name `mlflow`; the operator's browser uses loopback ports."""
    if where == "compose":
        env = SERVICES["worker"]["environment"]
        assert {port.rpartition(":")[0] for name in ("mlflow", "prefect") for port in SERVICES[name]["ports"]} == {
            "127.0.0.1:5000",
            "127.0.0.1:4200",
        }
    else:
        (worker,) = [one for one in everything("Deployment") if one["metadata"]["name"] == "worker"]
        variables = worker["spec"]["template"]["spec"]["containers"][0]["env"]
        env = {one["name"]: one.get("value") for one in variables}
    monkeypatch.setenv("DPO_MLFLOW_UI_URL", env["DPO_MLFLOW_UI_URL"])
    ids = {"tracking_uri": "http://mlflow:5000", "experiment_id": "1", "run_id": "a"}
    assert str(mlflow_link(ids)).startswith("http://127.0.0.1:5000/#/experiments/1/runs/a")
    assert env["PREFECT_UI_URL"] == "http://127.0.0.1:4200"


def test_the_image_installs_the_lock_without_secrets_and_runs_unprivileged():
    text = (INFRA / "Dockerfile").read_text()
    done = subprocess.run([BIN / "hadolint", "--no-color", INFRA / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    base = re.search(r"^FROM python:(\d+)\.(\d+)\.\d+-", text, re.M)
    assert base
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert (int(base[1]), int(base[2])) >= tuple(map(int, requires.removeprefix(">=").split(".")))
    assert text.rindex("\nUSER 1000:1000") < text.index("\nENTRYPOINT")
    assert not re.search(r"(?i)password|secret|token|_key", text)
    ignored = (ROOT / ".dockerignore").read_text().split()
    state = {
        name
        for name in (ROOT / ".gitignore").read_text().split()
        if name.startswith((".s", ".m", ".p", ".r", "prefect"))
    }
    kept_out = {name.rstrip("/") for name in state}
    assert {".pytest_cache", ".mypy_cache", ".ruff_cache"} <= kept_out
    assert {".services", ".prefect", ".mlflow", ".scratch", "prefect.toml"} <= kept_out
    assert kept_out | {".git", ".venv", "**/.env", "**/secrets.env", ".dvc/config.local"} <= set(ignored)
