"""The space of a sweep: which values of params.yaml are tried, all of them or some drawn at random."""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.errors import UserError

RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^.,\[{][^,\[{]*?)\.\.(?P<high>[^,\[{]+)")


class Range(BaseModel):
    """Numbers to draw from, evenly or, over orders of magnitude, evenly on a logarithmic scale."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _has_an_inside(self) -> "Range":
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"from {self.low:g} to {self.high:g} there is nothing to draw from")
        return self

    def draw(self, dice: random.Random) -> float:
        if self.log:
            value = math.exp(dice.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = dice.uniform(self.low, self.high)
        return float(f"{value:.3g}")  # what a person would write


Values = Range | Annotated[list[Any], Field(min_length=1)]
Space = dict[str, Values]


def parse(text: str) -> tuple[str, Values]:
    """`train.beta=0.05,0.1`, or of numbers `train.beta=0.05..0.5` and `train.learning_rate=log:1.0e-6..1.0e-4`."""
    key, equals, given = text.partition("=")
    if not key or not equals or not given:
        raise UserError(f"--space takes KEY=VALUE,VALUE, as in --space train.beta=0.05,0.1, and it got '{text}'.")
    try:
        if match := RANGE.fullmatch(given.strip()):
            return key, Range(low=float(match["low"]), high=float(match["high"]), log=bool(match["log"]))
        values = yaml.safe_load(f"[{given}]")
    except ValidationError as error:
        raise UserError(f"--space {key}: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"--space {key}: '{given}' is neither values nor a range low..high ({reason}).") from None
    return key, values


def combinations(space: Mapping[str, Values], draws: int | None, seed: int) -> list[dict[str, Any]]:
    """What is tried: every combination, or so many drawn from them, each once, always the same for a seed."""
    if not space:
        raise UserError("A sweep needs something to vary: --space train.beta=0.05,0.1")
    for key, values in space.items():
        if draws is None and isinstance(values, Range):
            raise UserError(f"--space {key}: a range is drawn from. Say how often with --random 8, or give values.")
    if draws is None:
        return _grid({key: list(values) for key, values in space.items() if not isinstance(values, Range)})
    return _drawn(space, draws, random.Random(seed))


def _grid(space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return _once([dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())])


def _drawn(space: Mapping[str, Values], draws: int, dice: random.Random) -> list[dict[str, Any]]:
    if draws < 1:
        raise UserError(f"--random {draws}: a sweep needs at least one run.")
    lists = {key: values for key, values in space.items() if not isinstance(values, Range)}
    if len(lists) == len(space):
        grid = _grid(lists)
        return dice.sample(grid, min(draws, len(grid)))
    return _once([{key: _one(values, dice) for key, values in space.items()} for _ in range(draws)])


def _one(values: Values, dice: random.Random) -> Any:
    return values.draw(dice) if isinstance(values, Range) else dice.choice(values)


def _once(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for number, trial in enumerate(trials) if trial not in trials[:number]]
