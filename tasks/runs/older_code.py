"""Settings for the stages of a run from before a worker group got another name.

A run's worktree keeps the code of its stages, which refuses the new name. The flow around it reads both
(tasks/config/cluster.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.config.cluster import CLUSTER, RENAMED, SITE, rename_groups, site_overlay
from tasks.config.strict import read_yaml
from tasks.system.files import write_text


def group_names(root: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Cluster settings with the names that the code in `root` knows: those in its infra/cluster.yaml."""
    known = read_yaml(root / CLUSTER)
    return rename_groups(content, {new: old for old, new in RENAMED.items() if old in known})


def site_variable(root: Path) -> dict[str, str]:
    """DPO_CLUSTER for the stages in `root`: a converted copy of the site's overlay if their code needs one."""
    overlay = site_overlay()
    if not overlay or (content := group_names(root, overlay)) == overlay:
        return {}
    path = root / ".scratch" / "site.yaml"
    write_text(path, yaml.safe_dump(content, sort_keys=False))
    return {SITE: str(path.resolve())}
