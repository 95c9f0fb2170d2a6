"""Schemas of the KubeRay 1.6 fields (ray.io/v1) that our manifests use.

No package contains KubeRay's CRDs, so this list is our own and shorter: a field that is missing here is rejected,
whether misspelt or just not used yet. Pod templates are validated against Kubernetes' own schema.
"""

from collections.abc import Iterator
from typing import Any

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0}
YES: dict[str, Any] = {"type": "boolean"}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": TEXT}
ANY: dict[str, Any] = {"type": "object"}


def fields(required: tuple[str, ...] = (), **known: Any) -> dict[str, Any]:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


HEAD = fields(("template",), template=ANY, rayStartParams=TEXTS, serviceType=TEXT, headService=ANY, enableIngress=YES)
WORKERS = fields(
    ("groupName", "template"),
    groupName={"type": "string", "minLength": 1},
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    idleTimeoutSeconds=NUMBER,
    numOfHosts=NUMBER,
    rayStartParams=TEXTS,
    template=ANY,
)
CLUSTER = fields(
    ("headGroupSpec", "workerGroupSpecs"),
    rayVersion=TEXT,
    suspend=YES,
    authOptions=fields(mode={"enum": ["token", "disabled"]}, secretName=TEXT, enableK8sTokenAuth=YES),
    enableInTreeAutoscaling=YES,
    autoscalerOptions=fields(
        idleTimeoutSeconds=NUMBER,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        version={"enum": ["v1", "v2"]},
        resources=ANY,
        securityContext=ANY,
        image=TEXT,
    ),
    headServiceAnnotations=TEXTS,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
JOB = fields(
    ("entrypoint",),
    entrypoint={"type": "string", "minLength": 1},
    clusterSelector=TEXTS,
    rayClusterSpec=CLUSTER,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    runtimeEnvYAML=TEXT,
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    backoffLimit=NUMBER,
    submitterConfig=fields(backoffLimit=NUMBER),
    submitterPodTemplate=ANY,
    shutdownAfterJobFinishes=YES,
    ttlSecondsAfterFinished=NUMBER,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    entrypointResources=TEXT,
    suspend=YES,
)


def kind(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": name}, "metadata": ANY}
    return fields(("apiVersion", "kind", "metadata", "spec"), **head, spec=spec)


SCHEMAS = {"RayCluster": kind("RayCluster", CLUSTER), "RayJob": kind("RayJob", JOB)}


def pods(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of a manifest as pods, for validation against Kubernetes' schema."""
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if "headGroupSpec" in spec else []
    more = [spec["submitterPodTemplate"]] if "submitterPodTemplate" in spec else []
    for template in [group["template"] for group in groups] + more:
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": template.get("metadata", {}), "spec": template["spec"]}
