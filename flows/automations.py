"""What Prefect's server does by itself: takes a silent run for dead, and calls a webhook when a run fails, or a model
becomes champion or is refused.

A run that dies with its worker stays `Running` for ever otherwise, and one that never starts keeps its place. The
webhook's address is a secret: it comes from DPO_WEBHOOK_URL and is kept encrypted in a block.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.types import SecretDict
from pydantic import SecretStr

from flows.promote import PROMOTED, REFUSED

BLOCK = "dpo-webhook"
STRANDED = 900  # seconds between a run's submission and its first sign of life
RUN = ResourceSpecification(root={"prefect.resource.id": "prefect.flow-run.*"})
OURS = ResourceSpecification(root={"prefect.resource.role": "flow", "prefect.resource.name": ["dpo", "sweep"]})
DEPLOYED = ResourceSpecification(root={"prefect.resource.id": "prefect.deployment.*"})
OVER = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut", "Cached")}
WAITS = {f"prefect.flow-run.{state}" for state in ("Paused", "Suspended", "AwaitingRetry", "Scheduled", "Pending")}
FAILED = (
    "{{ ('The run ' ~ flow_run.name ~ ' of ' ~ flow.name ~ ' is ' ~ flow_run.state.name ~ '. ' "
    "~ (flow_run.state.message or '')|truncate(600) ~ ' ' ~ (flow_run|ui_url)) | tojson }}"
)
WON = "{{ (event.payload.message ~ ' ' ~ (flow_run|ui_url)) | tojson }}"


def watch(silence: int) -> list[str]:
    """The automations that every server has, `silence` in seconds; what changed."""
    beat = {"prefect.flow-run.heartbeat"}
    dead = ChangeFlowRunState(
        state=StateType.CRASHED,
        name="Crashed",
        message="Its process gave no sign of life and is taken for dead.",
        force=False,
    )
    silent = _absence(beat, beat | OVER | WAITS, silence)
    stranded = _absence({"prefect.flow-run.Pending"}, {"prefect.flow-run.Running"} | OVER | WAITS, STRANDED)
    return [
        *_ensure("dpo: a silent run is dead", silent, dead),
        *_ensure("dpo: a run that does not start is dead", stranded, dead),
    ]


def notify(url: str | None) -> list[str]:
    """Calls to a webhook: made, kept as they are (None), or ended (""); what changed."""
    if url == "":
        return [*_remove("dpo: notify of failure"), *_remove("dpo: notify of promotion")]
    block = _block(url)
    if block is None:
        return []
    failed = _event({"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}, RUN, DEPLOYED)
    promoted = _event({PROMOTED, REFUSED}, ResourceSpecification(root={"prefect.resource.id": "dpo.model.*"}))
    return [
        *_ensure("dpo: notify of failure", failed, _call(block, FAILED)),
        *_ensure("dpo: notify of promotion", promoted, _call(block, WON)),
    ]


def notifies() -> bool:
    return _read("dpo: notify of failure") is not None


def _absence(after: set[str], expect: set[str], seconds: int) -> EventTrigger:
    return EventTrigger(
        after=after,
        expect=expect,
        match=RUN,
        match_related=OURS,
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
    )


def _event(
    expect: set[str], match: ResourceSpecification, related: ResourceSpecification | None = None
) -> EventTrigger:
    return EventTrigger(
        expect=expect,
        match=match,
        match_related=related or ResourceSpecification(root={}),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )


def _call(block: UUID, text: str) -> CallWebhook:
    """What Slack, Mattermost, Teams and Google Chat take alike."""
    return CallWebhook(block_document_id=block, payload=f'{{"text": {text}}}')


def _block(url: str | None) -> UUID | None:
    block: Any = None
    with suppress(ValueError):  # there is none
        block = Webhook.load(BLOCK)
    if url and (block is None or block.url.get_secret_value() != url):
        headers = SecretDict({"Content-Type": "application/json"})
        block = Webhook(url=SecretStr(url), headers=headers)
        block.save(BLOCK, overwrite=True)
    return block._block_document_id if block else None


def _ensure(name: str, trigger: EventTrigger, action: ActionTypes) -> Iterator[str]:
    """As described here, whatever it was; whether it is switched on stays a person's choice."""
    description = f"Made by `make up` ({_digest(trigger, action)})"
    found = _read(name)
    if found is not None and found.description == description:
        return
    made = Automation(name=name, description=description, trigger=trigger, actions=[action])
    if found is None:
        made.create()
    else:
        made.id, made.enabled = found.id, found.enabled
        made.update()
    yield name


def _digest(trigger: EventTrigger, action: ActionTypes) -> str:
    content = [trigger.model_dump(exclude={"id"}), action.model_dump()]
    ordered = json.dumps(
        content, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
    )
    return hashlib.sha256(ordered.encode()).hexdigest()[:12]


def _remove(name: str) -> Iterator[str]:
    if (found := _read(name)) is not None:
        found.delete()
        yield name


def _read(name: str) -> Automation | None:
    found: Any = None
    with suppress(ValueError):  # there is none
        found = Automation.read(name=name)
    return found
