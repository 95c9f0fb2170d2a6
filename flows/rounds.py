"""The flow `rounds`: on-policy rounds of sample, train, gate and promote, one run of the pipeline after the other.

    dpo rounds 3 --recipe demo

Each round starts from the champion as it is then, samples and judges that model's answers, and trains on them. The
start of a round is pinned to a version before its run begins, so that a resumed round is the same round. The same
command again continues where it stopped; a larger number adds rounds.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows import cancellation, terminal
from flows.artifacts import table
from flows.child_runs import execute, resume_command, run_command
from flows.parameters import NO_NAME, NO_RECIPE, Name, Overrides, Recipe
from tasks.artifacts.models import REGISTRY, registered_name
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.reports import rounds_table
from tasks.reports.summary import RunSummary
from tasks.runs import records, run_config
from tasks.runs.names import check_name
from tasks.source.start_model import start_version
from tasks.system.files import fingerprint, read_json_or_empty, write_json

FOLDER = ROOT / ".scratch" / "rounds"
SAMPLING = {"sample.answers": 4}  # if params.yaml has no section `sample`


@flow
@cancellation.ends_cancelled
def rounds(
    count: int = 3,
    reference: Literal["champion", "base"] = "champion",
    keep_going: bool = False,
    recipe: Recipe = NO_RECIPE,
    overrides: Overrides = {},  # noqa: B006 (None would make a form that asks for a type)
    name: Name = NO_NAME,
) -> dict[str, Any]:
    """Rounds of sampling from the champion, judging, training and promoting.

    Args:
        count: number of rounds, finished ones included.
        reference: the reference model of each round: the champion that it starts from, or always the base model.
        keep_going: go on after a round whose model was not promoted.
        recipe: a named overlay of params.yaml, for all rounds.
        overrides: values of params.yaml by dotted name, for all rounds.
        name: name of the rounds; by default made from their parameters.
    """
    work = plan(count, reference, recipe, overrides, name)
    result = work.run(count, keep_going)
    text = table([*rounds_table.COLUMNS.values()], rounds_table.cells(result["rows"]))
    create_markdown_artifact(f"{text}\n\n{result['ended']}", key="dpo-rounds", description="The rounds")
    return result


def plan(
    count: int, reference: str, recipe: str | None, overrides: dict[str, Any] | None, name: str | None
) -> "Rounds":
    """The rounds with their validated parameters; a mistake is reported before anything starts."""
    if count < 1:
        raise UserError(f"`dpo rounds {count}`: there must be at least 1 round.")
    config = run_config.resolve(recipe, overrides)
    params = config.params
    values = {**({} if params.sample else SAMPLING), **(overrides or {})}
    base = registered_name(params.source.model)[1] if params.source.model.startswith(REGISTRY) else params.source.model
    if reference == "base" and base is None:
        raise UserError(
            f"`--reference base` needs the base model, and source.model is {params.source.model}: write it behind a "
            f"bar, as in {params.source.model}|hub:owner/name@revision."
        )
    champion = f"{params.promote.model_name}/{params.promote.alias}"
    digest = fingerprint([config.values(), reference])
    name = name or f"rounds-{digest[:6]}"
    path = FOLDER / name / "rounds.json"
    if (saved := read_json_or_empty(path)) and saved["content"] != digest:
        raise UserError(f"There are other rounds named {name}: their parameters differ. Choose another --name.")
    seed = params.sample.seed if params.sample else 0
    check_name(f"{name}-{count}")  # of the last round
    work = Rounds(name, digest, champion, base, reference, recipe, values, seed, saved.get("starts", {}))
    run_config.resolve(recipe, {**values, **work.values(1, f"{REGISTRY}{champion}|{base or 'demo'}")})
    return work


@dataclass
class Rounds:
    """The rounds under one name, and the model that each started from."""

    name: str
    content: str
    champion: str  # MODEL/ALIAS
    base: str | None
    reference: str
    recipe: str | None
    overrides: dict[str, Any]
    seed: int
    starts: dict[str, str]  # source.model by round
    log: Any = field(init=False)  # of the flow

    def values(self, number: int, address: str) -> dict[str, Any]:
        """The parameters of a round. Its own seed lets a round draw other answers if the model is the same."""
        other = self.reference == "base" and address.startswith(REGISTRY)
        reference = {"train.reference_model": "base"} if other else {}
        return {"source.model": address, "sample.seed": self.seed + number - 1, **reference}

    def run(self, count: int, keep_going: bool) -> dict[str, Any]:
        self.log = get_run_logger()
        rows: list[dict[str, Any]] = []
        ended = f"All {count} rounds are done."
        for number in range(1, count + 1):
            rows.append(self._round(number, count))
            self.log.info("rounds: round %d: %s", number, rows[-1]["why"])
            if not rows[-1]["promoted"] and not keep_going and number < count:
                ended = f"Stopped after round {number} of {count}: its model was not promoted. --keep-going goes on."
                break
        return {"rounds": self.name, "rows": rows, "ended": ended}

    def _round(self, number: int, count: int) -> dict[str, Any]:
        """Run a round, or continue it; its row of the table."""
        run = self._run_name(number)
        record = records.read_record(run)
        if record and record.state == records.FINISHED:
            self.log.info("rounds: %s finished before", run)
        else:
            address = self._pin(number)
            self.log.info("rounds: %d/%d rounds, %s starts from %s", number - 1, count, run, address)
            self._execute(run, number, address, resume=record is not None)
        cancellation.stop_if_noticed()
        return rounds_table.row(number, self._summary(number), self.starts[str(number)], self._summary(1))

    def _run_name(self, number: int) -> str:
        return f"{self.name}-{number}"

    def _summary(self, number: int) -> RunSummary:
        return RunSummary.of(records.find_run(self._run_name(number)))

    def _pin(self, number: int) -> str:
        """The model that a round starts from, as it was when the round first began."""
        if str(number) not in self.starts:
            fallback = f"|{self.base}" if self.base else ""
            version = start_version(f"{REGISTRY}{self.champion}{fallback}")
            self.starts[str(number)] = f"{version[0]}{fallback}" if version else str(self.base)
            write_json(FOLDER / self.name / "rounds.json", {"content": self.content, "starts": self.starts})
        return self.starts[str(number)]

    def _execute(self, run: str, number: int, address: str, *, resume: bool) -> None:
        command = run_command(run, self.recipe, {**self.overrides, **self.values(number, address)})
        tags = {"rounds": self.name, "round": str(number)}
        if code := execute(resume_command(run) if resume else command, tags):
            raise UserError(
                f"Round {number} failed: {run} ended with exit code {code}. Its output is above. The same command "
                "again continues at this round."
            )


def run_here(count: int, reference: str, keep_going: bool, **options: Any) -> int:
    """Run the rounds in this process and print their table; the exit code is 1 if the last model was not promoted."""
    plan(count, reference, **options)  # a mistake is reported before a server is started
    with terminal.attached():
        result: dict[str, Any] = rounds(count=count, reference=reference, keep_going=keep_going, **options)
    head = tuple(rounds_table.COLUMNS.values())
    print(f"\n{records.text_table(rounds_table.cells(result['rows']), head)}\n{result['ended']}")
    return 0 if result["rows"][-1]["promoted"] else 1
