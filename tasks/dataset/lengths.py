"""Pairs above `prepare.max_tokens`. Both responses of a pair keep the same prompt, and nothing is emptied silently."""

from dataclasses import replace

from tasks.dataset.templates import Tokens
from tasks.dataset.violations import BadRow


def excess(tokens: Tokens, most: int) -> int:
    """By how many tokens the prompt with its longer response is too long."""
    return len(tokens.prompt) + max(len(tokens.chosen), len(tokens.rejected)) - most


def fit(tokens: Tokens, most: int, policy: str, bos: int | None) -> Tokens | BadRow:
    """The pair within `most` tokens by the policy, or that it cannot be."""
    over = excess(tokens, most)
    if over <= 0:
        return tokens
    if policy == "truncate_prompt":
        return _without_start(tokens, over, bos)
    if policy == "truncate_response":
        return _without_end(tokens, most)
    return BadRow("over_length", f"{over + most} tokens")


def _without_start(tokens: Tokens, over: int, bos: int | None) -> Tokens | BadRow:
    """The prompt loses its start, but for the token that every text begins with."""
    kept = 1 if tokens.prompt[0] == bos else 0
    if over + kept >= len(tokens.prompt):
        return BadRow("over_length", "a response alone fills max_tokens")
    return replace(tokens, prompt=tokens.prompt[:kept] + tokens.prompt[kept + over :], truncated=True)


def _without_end(tokens: Tokens, most: int) -> Tokens | BadRow:
    room = most - len(tokens.prompt)
    if room < 1 or not any(tokens.chosen_mask[:room]) or not any(tokens.rejected_mask[:room]):
        return BadRow("over_length", "the prompt leaves no room for the responses")
    if tokens.chosen[:room] == tokens.rejected[:room]:
        return BadRow("over_length", "the responses differ only in what would be cut off")
    return replace(
        tokens,
        chosen=tokens.chosen[:room],
        rejected=tokens.rejected[:room],
        chosen_mask=tokens.chosen_mask[:room],
        rejected_mask=tokens.rejected_mask[:room],
        truncated=True,
    )
