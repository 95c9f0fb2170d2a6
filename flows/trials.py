"""The runs that a sweep consists of: their values, their whole params, their names."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from flows import ROOT, retrain, workspace
from flows.space import Space, combinations
from tasks.errors import UserError
from tasks.files import fingerprint, read_json, write_json
from tasks.reports import sweeps

FOLDER = ROOT / ".scratch" / "sweeps"


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    number: int
    name: str
    values: dict[str, Any]
    params: dict[str, Any]  # whole, as they will be

    @property
    def group(self) -> str:
        """Trials of one group share everything up to the reference."""
        return fingerprint({section: self.params[section] for section in ("source", "prepare", "reference")})

    def command(self, recipe: str | None, overrides: Mapping[str, Any]) -> list[str]:
        given = ["--recipe", recipe] if recipe else []
        for key, value in {**overrides, **self.values}.items():
            given += ["--set", f"{key}={_as_yaml(value)}"]
        return [sys.executable, "-m", "flows.dpo", "--name", self.name, *given]


def plan(
    space: Space, *, draws: int | None, seed: int, recipe: str | None, overrides: Mapping[str, Any], name: str | None
) -> tuple[list[Trial], str]:
    """Every run with its params, checked: a value that no run could have is told before anything starts."""
    tried: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for values in combinations(space, draws, seed):
        params = retrain.made_of(workspace.plan(recipe, {**overrides, **values}))["params"]
        if params not in [others for _, others in tried]:
            tried.append((values, params))
    content = fingerprint({"params": [params for _, params in tried], "code": retrain.code(ROOT)})
    name = name or f"sweep-{content[:6]}"
    _note(name, content)
    width = len(str(len(tried)))
    trials = [
        Trial(number, f"{name}-{number:0{width}d}-{_slug(values)}", values, params)
        for number, (values, params) in enumerate(tried, start=1)
    ]
    # Of runs that share it, one that needs a reference goes ahead.
    return sorted(trials, key=lambda trial: not sweeps.needs_reference(trial.params)), name


def _note(name: str, content: str) -> None:
    """A sweep goes on under its name only where its runs would be the same."""
    known = FOLDER / name / "sweep.json"
    if known.exists() and read_json(known)["content"] != content:
        raise UserError(
            f"The sweep {name} was another one: its space, params.yaml or code were different. Give another --name."
        )
    write_json(known, {"content": content})


def _slug(values: Mapping[str, Any]) -> str:
    """What a person recognises in a list of branches."""
    text = "-".join(f"{key.split('.')[-1]}-{value}" for key, value in values.items())
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).replace(".-", "-").strip("-.").lower()[:40].rstrip("-.")


def _as_yaml(value: Any) -> str:
    """On one line; not as JSON, whose 5e-07 YAML reads as text."""
    return yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]
