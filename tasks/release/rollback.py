"""Back to the champion before: moves the aliases and says what it did.

python -m tasks.release.rollback (or `make rollback`)
"""

import sys
from datetime import datetime

from tasks.errors import UserError
from tasks.params import load_cluster, load_params
from tasks.release.stored import require_stored
from tasks.tracking.registry import PREVIOUS, Moves, Registry, Version, registry


def rollback() -> str:
    params = load_params().promote
    with registry(load_cluster(), params.model_name) as found:
        champion = found.at(params.alias)
        if champion is None:
            raise UserError(f"{params.model_name} has no {params.alias} to go back from.")
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
            found.move(Moves(aliases, {champion.number: {"rolled_back": now, "promoted": "false"}}), held)
    return (
        f"{params.model_name}: {params.alias} was version {champion.number} ({_hash(champion)}) and is version "
        f"{target.number} ({_hash(target)}) again. Version {champion.number} stays in the registry, marked as rolled "
        "back: the pipeline does not promote it by itself."
    )


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


def main() -> None:
    try:
        print(rollback())
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
