"""Pairs above `prepare.max_tokens`. Both responses keep the same prompt, and no part is emptied silently."""

from dataclasses import replace

from tasks.dataset.rows.reject_reasons import RejectedRow
from tasks.dataset.tokenization import TokenizedPair


def truncate(tokens: TokenizedPair, limit: int, policy: str, bos_id: int | None) -> TokenizedPair | RejectedRow:
    """The pair within `limit` tokens by `prepare.over_length`, or the reason why that is impossible."""
    excess = tokens.length - limit
    if excess <= 0:
        return tokens
    if policy == "truncate_prompt":
        return _truncate_prompt(tokens, excess, bos_id)
    if policy == "truncate_response":
        return _truncate_responses(tokens, limit - len(tokens.prompt_ids))
    return RejectedRow("over_length", f"{tokens.length} tokens")


def _truncate_prompt(tokens: TokenizedPair, excess: int, bos_id: int | None) -> TokenizedPair | RejectedRow:
    """Cut the start of the prompt, but keep the BOS token."""
    kept = 1 if tokens.prompt_ids[0] == bos_id else 0
    if excess + kept >= len(tokens.prompt_ids):
        return RejectedRow("over_length", "a response alone fills max_tokens")
    prompt_ids = tokens.prompt_ids[:kept] + tokens.prompt_ids[kept + excess :]
    return replace(tokens, prompt_ids=prompt_ids, truncated=True)


def _truncate_responses(tokens: TokenizedPair, room: int) -> TokenizedPair | RejectedRow:
    if room < 1 or not any(tokens.chosen_mask[:room]) or not any(tokens.rejected_mask[:room]):
        return RejectedRow("over_length", "the prompt leaves no room for the responses")
    differ = tokens.chosen_ids != tokens.rejected_ids  # those of an unpaired row do not
    if differ and tokens.chosen_ids[:room] == tokens.rejected_ids[:room]:
        return RejectedRow("over_length", "the responses differ only after the cut")
    fields = ("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
    return replace(tokens, **{name: getattr(tokens, name)[:room] for name in fields}, truncated=True)
