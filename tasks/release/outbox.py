"""What a promotion still has to do once the alias has moved: copy the model to promote.push, tell Prefect.

A promotion is written down here before its alias moves, with an id that the version gets as a tag in the same move.
Every promote and approve of this checkout completes what an earlier one left, so a crash or an address that does not
answer loses neither the copy nor the event. The id is also the event's id: Prefect drops an id that it has seen.
"""

import os
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tasks.files import home, read_json, sha256, write_json
from tasks.paths import MODEL
from tasks.release.push import push
from tasks.release.stored import require_stored
from tasks.release.verify import problems
from tasks.tracking.lease import is_gone, this_process
from tasks.tracking.registry import Registry

TAG = "promotion"


@dataclass(frozen=True)
class Promotion:
    id: str
    model: str
    version: str
    alias: str
    why: str
    process: str
    event: bool  # a flow promotes: Prefect is told
    run: str = ""  # that made the version
    details: str = ""  # how it compares with the champion before, in words
    copied: bool = False  # nothing is left to do but to tell Prefect

    @property
    def path(self) -> Path:
        return folder() / f"{self.id}.json"

    def write(self) -> None:
        write_json(self.path, asdict(self))

    def finish(self) -> None:
        """The alias has moved and the copy is made."""
        if self.event:
            replace(self, copied=True).write()
        else:
            self.path.unlink(missing_ok=True)


def folder() -> Path:
    return home() / ".scratch" / "outbox"


def add(model: str, version: str, alias: str, why: str, run: str = "", details: str = "") -> Promotion:
    """Before the alias moves; its id goes onto the version with the move."""
    flow = "DPO_RUN" in os.environ
    promotion = Promotion(str(uuid.uuid4()), model, version, alias, why, this_process(), flow, run, details)
    promotion.write()
    return promotion


def pending() -> list[Promotion]:
    return [Promotion(**read_json(path)) for path in sorted(folder().glob("*.json"))]


def complete(found: Registry, address: str | None) -> list[str]:
    """Copy what was promoted and not copied yet to `address`; the addresses of the copies."""
    copies = []
    for promotion in pending():
        if promotion.model != found.name or promotion.copied:
            continue
        version = found.version(promotion.version)
        if version is None or version.tags.get(TAG) != promotion.id:
            if is_gone(promotion.process):  # it ended before the alias moved
                promotion.path.unlink(missing_ok=True)
            continue
        if address:
            here = MODEL / "manifest.json"
            same = here.exists() and sha256(here) == found.digest(version) and not problems(MODEL)
            copies.append(push(MODEL if same else require_stored(found, version), address))
        promotion.finish()
    return copies
