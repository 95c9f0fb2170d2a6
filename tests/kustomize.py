"""What `kustomize build` makes of a folder, as far as ours use it; what is not known here is refused.

No kustomize comes with pip. Patches are JSON patches (RFC 6902), whose meaning needs no schema of the patched kind: for
kinds that it does not know, as KubeRay's, kustomize merges lists in its own way.
"""

from pathlib import Path
from typing import Any

import jsonpatch
import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "secretGenerator", "configMapGenerator", "generatorOptions"}
KNOWN |= {"images", "patches"}
CLUSTER_WIDE = {"Namespace"}
Document = dict[str, Any]


def build(folder: Path) -> list[Document]:
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(asked) <= KNOWN, set(asked) - KNOWN
    found: list[Document] = []
    for name in asked["resources"]:
        path = (folder / name).resolve()
        assert not folder.resolve().is_relative_to(path), f"{name}: kustomize refuses a base that holds its overlay"
        found += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generator in asked.get("configMapGenerator", []):
        found = _generated(found, generator, folder)
    for patch in asked.get("patches", []):
        found = _patched(found, patch, folder)
    for document in found:
        if document["kind"] not in CLUSTER_WIDE:
            document["metadata"]["namespace"] = asked["namespace"]
    identities = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert len(identities) == len(set(identities)), "kustomize refuses two resources with one name"
    return found


def _generated(found: list[Document], generator: dict[str, Any], folder: Path) -> list[Document]:
    assert set(generator) <= {"name", "namespace", "behavior", "files"}
    name, replaces = generator["name"], generator.get("behavior") == "replace"
    others = [one for one in found if (one["kind"], one["metadata"]["name"]) != ("ConfigMap", name)]
    assert (len(others) < len(found)) == replaces, f"ConfigMap {name}: to replace one, there must be one"
    data = {file: (folder / file).read_text() for file in generator["files"]}
    return [*others, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}]


def _patched(found: list[Document], patch: dict[str, Any], folder: Path) -> list[Document]:
    assert set(patch) == {"target", "path"}
    target = (patch["target"]["kind"], patch["target"]["name"])
    operations = yaml.safe_load((folder / patch["path"]).read_text())
    hit = [(one["kind"], one["metadata"]["name"]) == target for one in found]
    assert any(hit), f"{patch['path']}: there is no {' '.join(target)}"
    return [jsonpatch.apply_patch(one, operations) if it else one for one, it in zip(found, hit, strict=True)]
