"""Back to the champion before: moves the aliases and says what it did.

One that was interrupted is completed by the next, which goes no further: a note says what it was about to do.

python -m tasks.release.rollback (or `make rollback`)
"""

from datetime import datetime
from pathlib import Path

from tasks.errors import UserError
from tasks.files import home, read_json, write_json
from tasks.machines.process import is_alive, this_process
from tasks.output import as_command
from tasks.params import load_cluster, load_params
from tasks.release.stored import require_stored
from tasks.tracking.registry import PREVIOUS, Moves, Registry, Version, registry


def rollback() -> str:
    params = load_params().promote
    with registry(load_cluster(), params.model_name) as found:
        champion = found.at(params.alias)
        if champion is None:
            raise UserError(f"{params.model_name} has no {params.alias} to go back from.")
        if _was_interrupted(found.name, champion.number):
            return (
                f"{params.model_name}: {params.alias} is version {champion.number} ({_hash(champion)}). A rollback was "
                "interrupted, and is complete now. Run `make rollback` again to go back one more."
            )
        target = _before(found, champion) or found.at(PREVIOUS)  # an alias moved by hand has no tags
        if target is None or target.number == champion.number:
            raise UserError(f"Version {champion.number} is the first {params.alias} of {params.model_name}.")
        require_stored(found, target)
        earlier = _before(found, target)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        aliases = {params.alias: target.number, PREVIOUS: earlier.number if earlier else None}
        with found.exclusively() as held:
            current = found.at(params.alias)
            if current is None or current.number != champion.number:
                raise UserError(f"{params.alias} changed meanwhile. Nothing was moved. Run `make rollback` again.")
            write_json(_note(), {"model": found.name, "to": target.number, "by": this_process()})
            found.move(Moves(aliases, {champion.number: {"rolled_back": now, "promoted": "false"}}), held)
    return (
        f"{params.model_name}: {params.alias} was version {champion.number} ({_hash(champion)}) and is version "
        f"{target.number} ({_hash(target)}) again. Version {champion.number} stays in the registry, marked as rolled "
        "back: the pipeline does not promote it by itself."
    )


def _was_interrupted(model: str, champion: str) -> bool:
    """Whether a rollback to the champion of now ended before it could say so."""
    if not _note().exists():
        return False
    noted = read_json(_note())
    return (noted["model"], noted["to"]) == (model, champion) and not is_alive(noted["by"])


def _note() -> Path:
    return home() / ".scratch" / "rollback.json"


def _before(found: Registry, version: Version) -> Version | None:
    """The champion that a version replaced, passing over those that were rolled back themselves."""
    seen = {version.number}
    number = version.tags.get("promoted_over")
    while number and number not in seen:
        seen.add(number)
        candidate = found.version(number)
        if candidate is None:
            return None
        if not candidate.tags.get("rolled_back"):
            return candidate
        number = candidate.tags.get("promoted_over")
    return None


def _hash(version: Version) -> str:
    return f"manifest {version.tags['manifest_sha256'][:12]}"


@as_command
def main() -> None:
    print(rollback(), flush=True)
    _note().unlink(missing_ok=True)


if __name__ == "__main__":
    main()
