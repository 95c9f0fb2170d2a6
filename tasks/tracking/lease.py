"""A lock on a registered model that works across machines: `with hold_lease(client, name) as lease:`.

MLflow has no compare-and-set, but its tags are registers that every client reads and writes whole. So this is Lamport's
bakery algorithm on tags of the registered model, one tag per claimant: take a number above all others, then wait until
there is no lower number. It excludes two holders without any clock.

A process that dies leaves its claim behind, and the other claimants remove it: at once if it ran on their machine,
otherwise after its text has not changed for LEASE seconds, by their own clock. A holder starts no write later than HOLD
seconds after its last renewal (`check`). So a holder whose claim is removed has started none for LEASE - HOLD seconds;
only a single write that takes longer than that could still arrive afterwards.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tasks.errors import UserError
from tasks.system.processes import boot_id, start_time

PREFIX = "dpo.claim."
LEASE, HOLD = 120.0, 60.0  # seconds
BEAT = 20.0  # seconds after which a waiting claimant renews its claim
POLL = 0.2  # seconds


class Claim(NamedTuple):
    number: int  # 0: still choosing one
    process: str
    text: str  # of the tag; it changes with each renewal


class Lease:
    """A claim on the lock, and the lock itself once no lower number is before it."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        self.key, self.process = f"{PREFIX}{uuid.uuid4().hex}", this_process()
        self.number, self.beat, self.written = 0, 0, 0.0
        self.tags: dict[str, str] = {}  # of the model, read when the lock was free

    def check(self) -> None:
        """Call before each write: UserError if others may consider this holder dead."""
        if time.monotonic() - self.written > HOLD:
            raise UserError(
                f"The registry needed more than {HOLD:.0f} s for a few calls, so another promotion of {self.name} may "
                "have begun. Nothing more was written. Run this again: it completes what is half done."
            )

    def renew(self, number: int) -> bool:
        """Write the claim; returns False if others may have removed it as dead meanwhile."""
        before, self.written = self.written, time.monotonic()
        self.number, self.beat = number, self.beat + 1
        self.client.set_registered_model_tag(self.name, self.key, f"{number} {self.beat} {self.process}")
        return self.beat == 1 or time.monotonic() - before < LEASE

    def claims(self) -> dict[str, Claim]:
        self.tags = dict(self.client.get_registered_model(self.name).tags)
        return {key: _parse(value) for key, value in self.tags.items() if key.startswith(PREFIX)}

    def release(self) -> None:
        with suppress(Exception):  # no answer: the next claimant notices that this process has ended
            self.client.delete_registered_model_tag(self.name, self.key)


@contextmanager
def hold_lease(client: Any, name: str) -> Iterator[Lease]:
    while not (lease := _claim(client, name)):
        pass
    try:
        yield lease
    finally:
        lease.release()


def _claim(client: Any, name: str) -> Lease | None:
    """The lease, once no claim is before ours; None where ours may have been removed while we waited."""
    mine, seen = Lease(client, name), dict[str, tuple[str, float]]()
    try:
        mine.renew(0)
        number = 1 + max((claim.number for claim in mine.claims().values()), default=0)
        is_valid = mine.renew(number)
        while is_valid and (before := _before(mine, mine.claims())):
            for key, claim in before.items():
                if _is_dead(key, claim, seen):
                    client.delete_registered_model_tag(name, key)
            time.sleep(POLL)
            if time.monotonic() - mine.written > BEAT:
                is_valid = mine.renew(number)
        if is_valid:
            return mine
    except BaseException:
        mine.release()
        raise
    mine.release()
    return None


def _before(mine: Lease, claims: dict[str, Claim]) -> dict[str, Claim]:
    """The claims that go first. A claimant that still chooses (0) may choose a number below ours."""
    ours = (mine.number, mine.key)
    return {key: claim for key, claim in claims.items() if key != mine.key and (claim.number, key) < ours}


def _parse(text: str) -> Claim:
    try:
        number, _, process = text.split(" ", 2)
        return Claim(int(number), process, text)
    except ValueError:  # not written by us: removed after it has not changed for LEASE seconds
        return Claim(0, text, text)


def _is_dead(key: str, claim: Claim, seen: dict[str, tuple[str, float]]) -> bool:
    """`seen` has the last text of each claim and when it appeared."""
    now = time.monotonic()
    text, since = seen.get(key, ("", now))
    if text != claim.text:
        seen[key], since = (claim.text, now), now
    return is_gone(claim.process) or now - since > LEASE


def this_process() -> str:
    """Enough for another process of the same machine to tell whether this one lives."""
    return f"{boot_id()} {os.getpid()} {start_time(os.getpid())}"


def is_gone(process: str) -> bool:
    """Whether a process of this machine has ended; False for one of another machine, of which only time tells."""
    machine, _, rest = process.partition(" ")
    pid, _, since = rest.partition(" ")
    return machine == boot_id() and str(start_time(int(pid))) != since
