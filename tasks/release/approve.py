"""A person's word for a version that passed the gate and waits: `python -m tasks.release.approve 3 NAME`.

It names a version and not a workspace, so that what was judged is what becomes champion, however much later.
"""

import sys

from tasks.access import check_push, configured
from tasks.errors import UserError
from tasks.output import as_command
from tasks.params import load_cluster, load_params
from tasks.promote import to_champion
from tasks.release import outbox
from tasks.release.stored import require_stored
from tasks.tracking.registry import registry


def approve(number: str, name: str) -> str:
    params = load_params().promote
    address = params.push and check_push(params.push, configured())
    with registry(load_cluster(), params.model_name) as found:
        left = outbox.complete(found, address)  # of an approval that was interrupted, too
        asked = found.version(number)
        if asked is not None and asked.tags.get("waiting") == "true":
            require_stored(found, asked)  # without the lock: it may be a download
        with found.exclusively() as held:
            version, champion = found.version(number), found.at(params.alias)
            if version is None:
                raise UserError(f"{params.model_name} has no version {number}: {[v.number for v in found.versions()]}.")
            if champion is not None and champion.number == number and version.tags.get("approved_by"):
                done = f"{params.model_name} version {number} is {params.alias} already"
                return f"{done}, approved by {version.tags['approved_by']}{_copied(left)}"
            if version.tags.get("waiting") != "true":
                why = version.tags.get("reasons") or "it does not wait for anyone"
                raise UserError(f"Version {number} of {params.model_name} cannot be approved: {why}.")
            if (champion.number if champion else "") != version.tags.get("champion_before", ""):
                now = f"version {champion.number}" if champion else "nobody"
                raise UserError(f"{params.alias} is {now} by now: run the pipeline again, to compare with it.")
            found.tag(version, {"approved_by": name})
            promotion = outbox.add(found.name, number, params.alias, f"approved by {name}", version.tags.get("run", ""))
            found.move(to_champion(params.alias, version, champion, promotion.id), held)
        copies = outbox.complete(found, address)
    return f"{params.model_name} version {number} is now {params.alias}, approved by {name}{_copied(copies)}"


def _copied(copies: list[str]) -> str:
    return "".join(f"; copied to {copy}" for copy in copies)


@as_command
def main() -> None:
    if len(sys.argv) != 3 or not all(sys.argv):
        raise UserError("Say which and who: `make approve VERSION=3 BY=name`.")
    print(approve(sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    main()
