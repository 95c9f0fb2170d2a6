"""The search space of a sweep: a grid of values of params.yaml, or values drawn at random."""

import itertools
import math
import random
import re
from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.config.strict import parse_value
from tasks.errors import UserError

RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^.,\[{][^,\[{]*?)\.\.(?P<high>[^,\[{]+)")


class Range(BaseModel):
    """Numbers to draw from, uniformly on a linear or a logarithmic scale."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _is_not_empty(self) -> "Range":
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"the range from {self.low:g} to {self.high:g} is empty")
        return self

    def draw(self, generator: random.Random) -> float:
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        return float(f"{value:.3g}")


Values = Range | Annotated[list[Any], Field(min_length=1)]
Space = dict[str, Values]


def parse(text: str) -> tuple[str, Values]:
    """Values `train.beta=0.05,0.1`, or a range `train.beta=0.05..0.5` or `train.learning_rate=log:1.0e-6..1.0e-4`."""
    key, equals, choices = text.partition("=")
    if not key or not equals or not choices:
        raise UserError(f"--space '{text}' is not KEY=VALUE,VALUE. Example: --space train.beta=0.05,0.1")
    try:
        if match := RANGE.fullmatch(choices.strip()):
            return key, Range(low=float(match["low"]), high=float(match["high"]), log=bool(match["log"]))
        values = parse_value(f"[{choices}]")
    except ValidationError as error:
        raise UserError(f"--space {key}: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"--space {key}: '{choices}' is neither values nor a range LOW..HIGH ({reason}).") from None
    return key, values


def combinations(space: Mapping[str, Values], draws: int | None, seed: int) -> list[dict[str, Any]]:
    """Every combination, or a number of random ones without repetition; the same seed draws the same ones."""
    if not space:
        raise UserError("A sweep needs a search space. Example: --space train.beta=0.05,0.1")
    if draws is not None and draws < 1:
        raise UserError(f"--random {draws}: a sweep needs at least one run.")
    generator = random.Random(seed)
    if ranges := [key for key, values in space.items() if isinstance(values, Range)]:
        if draws is None:
            raise UserError(f"--space {ranges[0]}: a range needs --random N, the number of draws. Or list values.")
        return _unique([{key: _draw(values, generator) for key, values in space.items()} for _ in range(draws)])
    grid = _unique([dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())])
    return grid if draws is None else generator.sample(grid, min(draws, len(grid)))


def _draw(values: Values, generator: random.Random) -> Any:
    return values.draw(generator) if isinstance(values, Range) else generator.choice(values)


def _unique(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for number, trial in enumerate(trials) if trial not in trials[:number]]
