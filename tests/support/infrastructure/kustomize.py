"""The part of `kustomize build` that our folders use; unknown features are rejected. pip cannot install kustomize.

Patches are JSON patches (RFC 6902), which need no schema: for unknown kinds such as KubeRay's, kustomize's strategic
merge would treat lists differently.
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
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(settings) <= KNOWN, set(settings) - KNOWN
    documents: list[Document] = []
    for name in settings["resources"]:
        path = (folder / name).resolve()
        assert not folder.resolve().is_relative_to(path), f"{name}: kustomize refuses a base that holds its overlay"
        documents += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generator in settings.get("configMapGenerator", []):
        documents = _generated(documents, generator, folder)
    for patch in settings.get("patches", []):
        documents = _patched(documents, patch, folder)
    for document in documents:
        if document["kind"] not in CLUSTER_WIDE:
            document["metadata"]["namespace"] = settings["namespace"]
    identities = [*map(_identity, documents)]
    assert len(identities) == len(set(identities)), "kustomize refuses two resources with one name"
    return documents


def _generated(documents: list[Document], generator: dict[str, Any], folder: Path) -> list[Document]:
    assert set(generator) <= {"name", "namespace", "behavior", "files"}
    name, replaces = generator["name"], generator.get("behavior") == "replace"
    others = [entry for entry in documents if _identity(entry) != ("ConfigMap", name)]
    assert (len(others) < len(documents)) == replaces, (
        f"ConfigMap {name}: `replace` needs an existing one, anything else a new one"
    )
    data = {file: (folder / file).read_text() for file in generator["files"]}
    return [*others, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}]


def _patched(documents: list[Document], patch: dict[str, Any], folder: Path) -> list[Document]:
    assert set(patch) == {"target", "path"}
    target = (patch["target"]["kind"], patch["target"]["name"])
    operations = yaml.safe_load((folder / patch["path"]).read_text())
    assert target in map(_identity, documents), f"{patch['path']}: there is no {' '.join(target)}"
    return [jsonpatch.apply_patch(entry, operations) if _identity(entry) == target else entry for entry in documents]


def _identity(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]
