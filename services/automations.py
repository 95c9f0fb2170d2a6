"""Prefect automations: mark runs without heartbeats as crashed, and call a webhook on failures and promotions.

Without them a run that dies with its worker would stay `Running` for ever, and one that never starts would keep its
concurrency slot. The webhook's address is a secret: it comes from DPO_WEBHOOK_URL and is stored encrypted in a block.
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

PROMOTED, REFUSED = "dpo.promoted", "dpo.refused"  # events that flows/promote.py sends
NOTIFY_FAILURE, NOTIFY_PROMOTION = "dpo: notify of failure", "dpo: notify of promotion"
BLOCK = "dpo-webhook"
START_TIMEOUT = 900  # seconds between a run's submission and its first heartbeat
RUN = ResourceSpecification(root={"prefect.resource.id": "prefect.flow-run.*"})
OUR_FLOWS = ResourceSpecification(
    root={"prefect.resource.role": "flow", "prefect.resource.name": ["dpo", "sweep", "rounds"]}
)
DEPLOYMENT = ResourceSpecification(root={"prefect.resource.id": "prefect.deployment.*"})
MODEL = ResourceSpecification(root={"prefect.resource.id": "dpo.model.*"})
ENDED = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut", "Cached")}
WAITING = {f"prefect.flow-run.{state}" for state in ("Paused", "Suspended", "AwaitingRetry", "Scheduled", "Pending")}
ANY = ResourceSpecification(root={})
EACH: dict[str, Any] = {"for_each": {"prefect.resource.id"}, "threshold": 1}
FAILURE_TEXT = (
    "{{ ('The run ' ~ flow_run.name ~ ' of ' ~ flow.name ~ ' is ' ~ flow_run.state.name ~ '. ' "
    "~ (flow_run.state.message or '')|truncate(600) ~ ' ' ~ (flow_run|ui_url)) | tojson }}"
)
PROMOTION_TEXT = "{{ (event.payload.message ~ ' ' ~ (flow_run|ui_url)) | tojson }}"


def watch_runs(heartbeat_timeout: int) -> list[str]:
    """Mark runs as crashed that send no heartbeat for this many seconds, or never start. Returns what changed."""
    heartbeat = {"prefect.flow-run.heartbeat"}
    crash = ChangeFlowRunState(
        state=StateType.CRASHED,
        name="Crashed",
        message="Its process sent no heartbeat and counts as dead.",
        force=False,
    )
    silent = _absence(heartbeat, heartbeat | ENDED | WAITING, heartbeat_timeout)
    stuck = _absence({"prefect.flow-run.Pending"}, {"prefect.flow-run.Running"} | ENDED | WAITING, START_TIMEOUT)
    return [
        *_ensure("dpo: a silent run is dead", silent, crash),
        *_ensure("dpo: a run that does not start is dead", stuck, crash),
    ]


def notify(url: str | None) -> list[str]:
    """Send notifications to a webhook; None keeps them as they are, "" removes them. Returns what changed."""
    if url == "":
        return [*_remove(NOTIFY_FAILURE), *_remove(NOTIFY_PROMOTION)]
    block = _block(url)
    if block is None:
        return []
    failures = {f"prefect.flow-run.{state}" for state in ("Failed", "Crashed", "TimedOut")}
    return [
        *_ensure(NOTIFY_FAILURE, _occurrence(failures, RUN, DEPLOYMENT), _call(block, FAILURE_TEXT)),
        *_ensure(NOTIFY_PROMOTION, _occurrence({PROMOTED, REFUSED}, MODEL), _call(block, PROMOTION_TEXT)),
    ]


def has_notifications() -> bool:
    return _read(NOTIFY_FAILURE) is not None


def _absence(after: set[str], expect: set[str], seconds: int) -> EventTrigger:
    """Fires if none of the expected events follows within this time."""
    watch: dict[str, Any] = {"after": after, "within": timedelta(seconds=seconds), "posture": Posture.Proactive}
    return EventTrigger(expect=expect, match=RUN, match_related=OUR_FLOWS, **EACH, **watch)


def _occurrence(expect: set[str], match: ResourceSpecification, related: ResourceSpecification = ANY) -> EventTrigger:
    return EventTrigger(expect=expect, match=match, match_related=related, posture=Posture.Reactive, **EACH)


def _call(block: UUID, text: str) -> CallWebhook:
    """A payload that Slack, Mattermost, Teams and Google Chat all accept."""
    return CallWebhook(block_document_id=block, payload=f'{{"text": {text}}}')


def _block(url: str | None) -> UUID | None:
    block: Any = None
    with suppress(ValueError):  # it does not exist
        block = Webhook.load(BLOCK)
    if url and (block is None or block.url.get_secret_value() != url):
        block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
        block.save(BLOCK, overwrite=True)
    return block._block_document_id if block else None


def _ensure(name: str, trigger: EventTrigger, action: ActionTypes) -> Iterator[str]:
    """Create or update an automation and yield its name if it changed. A person's on/off switch stays as it is."""
    description = f"Made by `dpo up` ({_digest(trigger, action)})"
    existing = _read(name)
    if existing is not None and existing.description == description:
        return
    automation = Automation(name=name, description=description, trigger=trigger, actions=[action])
    if existing is None:
        automation.create()
    else:
        automation.id, automation.enabled = existing.id, existing.enabled
        automation.update()
    yield name


def _digest(trigger: EventTrigger, action: ActionTypes) -> str:
    content = [trigger.model_dump(exclude={"id"}), action.model_dump()]
    ordered = json.dumps(
        content, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
    )
    return hashlib.sha256(ordered.encode()).hexdigest()[:12]


def _remove(name: str) -> Iterator[str]:
    if (automation := _read(name)) is not None:
        automation.delete()
        yield name


def _read(name: str) -> Automation | None:
    try:
        automation: Any = Automation.read(name=name)
    except ValueError:  # it does not exist
        return None
    return automation
