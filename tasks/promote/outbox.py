"""The steps of a promotion that follow once the alias has moved: copy the model to promote.push, notify Prefect.

A promotion is written to disk before its alias moves. Its id becomes a tag of the version in the same move. Every
promote and approve of this checkout completes the promotions that earlier ones left unfinished, so a crash or an
unreachable address loses neither the copy nor the event. The id is also the event's id: Prefect ignores an event
whose id it has already received.
"""

import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tasks.checkout import this_run
from tasks.config.paths import MODEL, main_checkout
from tasks.promote.push import push
from tasks.runs.open_run import weights_of
from tasks.system.files import read_json, sha256, write_json
from tasks.tracking.lease import is_gone, this_process
from tasks.tracking.registry import Registry
from tasks.tracking.verify import problems, require_intact_version

TAG = "promotion"


@dataclass(frozen=True)
class Promotion:
    id: str
    model: str
    version: str
    alias: str
    why: str
    process: str
    event: bool  # promoted by a flow, which notifies Prefect
    run: str = ""  # the run that made the version
    details: str = ""  # how the version compares with the champion it replaces
    copied: bool = False  # only the event is still to be sent

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
    return main_checkout() / ".scratch" / "outbox"


def add(model: str, version: str, alias: str, why: str, run: str = "", details: str = "") -> Promotion:
    """Record a promotion before its alias moves."""
    event = bool(this_run())  # nobody else sends it
    promotion = Promotion(str(uuid.uuid4()), model, version, alias, why, this_process(), event, run, details)
    promotion.write()
    return promotion


def pending() -> list[Promotion]:
    return [Promotion(**read_json(path)) for path in sorted(folder().glob("*.json"))]


def complete(model_registry: Registry, address: str | None) -> list[str]:
    """Copy every promoted model that is not copied yet to `address`; the addresses of the copies."""
    copies = []
    for promotion in pending():
        if promotion.model != model_registry.name or promotion.copied:
            continue
        version = model_registry.version(promotion.version)
        if version is None or version.tags.get(TAG) != promotion.id:
            if is_gone(promotion.process):  # it ended before the alias moved
                promotion.path.unlink(missing_ok=True)
            continue
        if address:
            manifest = MODEL / "manifest.json"
            is_here = manifest.exists() and sha256(manifest) == model_registry.digest(version) and not problems(MODEL)
            if not is_here:
                require_intact_version(model_registry, version)
            copies.append(push(MODEL if is_here else weights_of(model_registry, version), address))
        promotion.finish()
    return copies
