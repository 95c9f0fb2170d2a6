"""The section `source` of params.yaml."""

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from tasks.config.strict import Positive, Section

RUN = "run:"  # an address of data: the pairs of an earlier run


class Mixed(Section):
    """One source of a mixture."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # of its folder below data/raw
    data: str
    weight: Positive  # of each pair in the loss
    share: Annotated[float, Field(gt=0.0, le=1.0)]  # of the rows, which are sampled


Data = Annotated[
    Annotated[str, Tag("address")] | Annotated[list[Mixed], Tag("mixture")],
    Discriminator(
        lambda value: "mixture" if isinstance(value, list) else "address"
    ),  # so that an error names one alternative
]


class Source(Section):
    data: Data
    eval: str | None
    sft: str | None = None
    exclude: str | None = None
    model: str
    adapter: str | None
    seed: int

    def check(self) -> None:
        names = [source.name for source in self.data] if isinstance(self.data, list) else ["data"]
        if not names or len(set(names)) < len(names) or {"eval", "sample"}.intersection(names):
            raise ValueError("a mixture needs at least one source; each name must be unique and not `eval` or `sample`")
        if self.adapter and self.model.startswith("registry:"):
            raise ValueError("`adapter` belongs to another model than the registered one: set it to null")

    def addresses(self) -> list[str]:
        return [self.data] if isinstance(self.data, str) else [source.data for source in self.data]

    def is_demo(self) -> bool:
        """Whether all prompts are the demo's, also those of pairs that earlier runs sampled."""
        return all(address == "demo" or address.startswith(RUN) for address in self.addresses())
