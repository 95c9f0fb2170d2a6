"""OpenAssistant's trees: a row is a prompt with replies, which have replies of their own.

Each message with ranked replies is a ranking. Where each row is a single message, a row alone does not tell the other
answers: advice.py refuses such files.
"""

from collections.abc import Iterator
from typing import Any

from tasks.prepare.rows.messages import ROLES, Message, require_number, require_text
from tasks.prepare.rows.preference import MaybePreference, Preference, RowLayout
from tasks.prepare.rows.rankings import expand
from tasks.source.reject_reasons import RawRow, RejectedRow


def is_tree(row: RawRow) -> bool:
    return isinstance(row.get("prompt"), dict) and isinstance(row["prompt"].get("replies"), list)


def is_message_of_a_tree(row: RawRow) -> bool:
    return {"message_id", "parent_id", "role", "text"} <= row.keys()


def from_tree(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
    """Pairs of the ranked replies to each message of the tree; rank 0 is the best."""
    if not is_tree(row):
        raise RejectedRow("not_text", "prompt is not a message with replies")
    pairs: list[MaybePreference] = []
    for conversation, answers in _rankings(row["prompt"], []):
        order = expand(range(len(answers)), layout.expand)
        pairs += [Preference(conversation, [answers[better]], [answers[worse]]) for better, worse in order]
    return pairs or [RejectedRow("no_comparison", "no message has two ranked replies")]


def _rankings(node: dict[str, Any], before: list[Message]) -> Iterator[tuple[list[Message], list[Message]]]:
    """(conversation, answers from best to worst) of each message with several ranked answers."""
    conversation = [*before, _turn(node)]
    listed = node.get("replies")
    replies = [reply for reply in listed if isinstance(reply, dict)] if isinstance(listed, list) else []
    replies = [reply for reply in replies if not reply.get("deleted")]
    ranked = [reply for reply in replies if reply.get("rank") is not None]
    answers = [_turn(reply) for reply in sorted(ranked, key=lambda reply: require_number(reply["rank"], "rank"))]
    if len(answers) > 1 and answers[0]["role"] == "assistant":
        yield conversation, answers
    for reply in replies:
        yield from _rankings(reply, conversation)


def _turn(node: dict[str, Any]) -> Message:
    role = node.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RejectedRow("wrong_role", f"{role!r} in the tree")
    return {"role": ROLES[role], "content": require_text(node.get("text"), "text")}
