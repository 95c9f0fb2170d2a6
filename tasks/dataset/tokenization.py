"""Preferences to tokens: one prompt and two responses. Prompt + response are the tokens of the whole templated text.

No tokenizer merges across an added token such as `<|im_start|>`, so the prompt is cut at its last added token. The part
before the cut is encoded once for both responses, the rest together with each response. That gives the same tokens as
encoding the whole texts, for little more than half the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.dataset.rows.messages import Message
from tasks.dataset.rows.preference import Preference
from tasks.dataset.rows.reject_reasons import RejectedRow
from tasks.dataset.templates import ChatTemplate, encode, render, render_all


@dataclass(frozen=True)
class TokenizedPair:
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_mask: list[int]  # loss mask: 1 for tokens in the loss
    rejected_mask: list[int]
    prompt_mask: tuple[int, ...] | list[int] = ()  # empty if no token of the prompt is in the loss
    merged: bool = False  # the tokenizer merged prompt and response, so the response was tokenized alone
    truncated: bool = False

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longer response."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


def tokenize(template: ChatTemplate, preferences: Sequence[Preference]) -> list[TokenizedPair | RejectedRow]:
    """The tokens of each preference, or the reason why there are none. Answers of a single turn are done in bulk."""
    in_bulk = iter(_tokenize_bulk(template, list(filter(_is_single_turn, preferences))))
    return [next(in_bulk) if _is_single_turn(pair) else _tokenize_turns(template, pair) for pair in preferences]


def _is_single_turn(preference: Preference) -> bool:
    sides = (preference.chosen, preference.rejected)
    return all(len(side) == 1 for side in sides) and preference.tools is None and sides[0][0]["role"] == "assistant"


def _tokenize_bulk(template: ChatTemplate, preferences: Sequence[Preference]) -> list[TokenizedPair | RejectedRow]:
    prompts = render_all(template, [pair.prompt for pair in preferences], generation=True)
    chosen = render_all(template, [pair.prompt + pair.chosen for pair in preferences])
    rejected = render_all(template, [pair.prompt + pair.rejected for pair in preferences])
    triples = [_check_prefix(texts) for texts in zip(prompts, chosen, rejected, strict=True)]
    rendered = [texts for texts in triples if isinstance(texts, tuple)]
    if rendered and not _cut_keeps_tokens(template, rendered[0]):
        template = replace(template, added_tokens=())
    parts = [part for texts in rendered for part in _cut(template, *texts)]
    ids = iter(encode(template.tokenizer, parts))
    return [
        texts
        if isinstance(texts, RejectedRow)
        else _tokens(template, texts, next(ids), next(ids), next(ids), next(ids))
        for texts in triples
    ]


def _check_prefix(texts: tuple[Any, Any, Any]) -> tuple[str, str, str] | RejectedRow:
    """Prompt, chosen and rejected, if all of them are text and both conversations start with the prompt."""
    if refused := next((text for text in texts if isinstance(text, RejectedRow)), None):
        return refused
    return texts if all(text.startswith(texts[0]) for text in texts) else RejectedRow("template_rewrites")


def _cut_keeps_tokens(template: ChatTemplate, texts: tuple[str, str, str]) -> bool:
    """Checked on the first of many texts: encoded in two parts, it gives the tokens of the whole text."""
    head, _, rest, _ = _cut(template, *texts)
    apart, whole = encode(template.tokenizer, [head, rest]), encode(template.tokenizer, [texts[1]])
    return apart[0] + apart[1] == whole[0]


def _cut(template: ChatTemplate, prompt: str, chosen: str, rejected: str) -> tuple[str, str, str, str]:
    """The prompt up to its last added token, the rest of the prompt, and that rest with each response."""
    at = max((0, *(prompt.rfind(token) for token in template.added_tokens)))
    return prompt[:at], prompt[at:], chosen[at:], rejected[at:]


def _tokens(
    template: ChatTemplate, texts: tuple[str, str, str], head: list[int], tail: list[int], *wholes: list[int]
) -> TokenizedPair | RejectedRow:
    merged = any(whole[: len(tail)] != tail for whole in wholes)
    if merged:
        responses = encode(template.tokenizer, [text[len(texts[0]) :] for text in texts[1:]])
    else:
        responses = [whole[len(tail) :] for whole in wholes]
    chosen, rejected = (cut_after_end(template, response) for response in responses)
    return _make_pair(template, head + tail, (chosen, [1] * len(chosen)), (rejected, [1] * len(rejected)), merged)


def _tokenize_turns(template: ChatTemplate, preference: Preference) -> TokenizedPair | RejectedRow:
    """Answers of several turns, or with tools: encoded in pieces, so that the loss mask covers the assistant alone."""
    try:
        generation = preference.chosen[0]["role"] == preference.rejected[0]["role"] == "assistant"
        start = render(template, preference.prompt, preference.tools, generation)
        (prompt,) = encode(template.tokenizer, [start])
        sides, merged = [], False
        for answer in (preference.chosen, preference.rejected):
            pieces = _pieces(template, preference, answer, start)
            ids, mask = _encode_pieces(template, pieces)
            sides.append((ids, mask))
            (whole,) = encode(template.tokenizer, [start + "".join(text for text, _ in pieces)])
            merged |= prompt + ids != whole[: len(prompt) + len(ids)]
        return _make_pair(template, prompt, sides[0], sides[1], merged)
    except RejectedRow as rejected:
        return rejected


def _pieces(
    template: ChatTemplate, preference: Preference, answer: list[Message], start: str
) -> list[tuple[str, bool]]:
    """The text of an answer in pieces, each with whether it is in the loss. Only the assistant's text can be."""
    whole, end, pieces = render(template, preference.prompt + answer, preference.tools), len(start), []
    turns = [n for n, turn in enumerate(answer) if turn["role"] == "assistant"]
    for n in turns:
        before = render(template, preference.prompt + answer[:n], preference.tools, generation=True)
        after = render(template, preference.prompt + answer[: n + 1], preference.tools)
        if not (whole.startswith(start) and whole.startswith(before) and whole.startswith(after)):
            raise RejectedRow("template_rewrites")
        in_loss = n == turns[-1] or template.loss_on == "all"
        pieces += [(whole[end : len(before)], False), (whole[len(before) : len(after)], in_loss)]
        end = len(after)
    return [piece for piece in pieces if piece[0]]


def _encode_pieces(template: ChatTemplate, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of an answer, which ends with the last turn's end token."""
    ids: list[int] = []
    loss_mask: list[int] = []
    encoded = encode(template.tokenizer, [text for text, _ in pieces])
    for number, (piece, (_, in_loss)) in enumerate(zip(encoded, pieces, strict=True)):
        turn = cut_after_end(template, piece) if in_loss else piece
        kept = turn if number == len(pieces) - 1 else piece
        ids += kept
        loss_mask += [int(in_loss)] * len(turn) + [0] * (len(kept) - len(turn))
    return ids, loss_mask


def _make_pair(
    template: ChatTemplate,
    prompt: list[int],
    chosen: tuple[list[int], list[int]],
    rejected: tuple[list[int], list[int]],
    merged: bool,
) -> TokenizedPair | RejectedRow:
    """From the prompt's ids and (ids, loss mask) of both responses."""
    bos_id = template.tokenizer.bos_token_id
    while len(prompt) > 1 and prompt[0] == prompt[1] == bos_id:
        prompt = prompt[1:]  # some templates write BOS twice
    if not prompt or not any(chosen[1]) or not any(rejected[1]):
        return RejectedRow("nothing_left")
    return TokenizedPair(prompt, chosen[0], rejected[0], chosen[1], rejected[1], merged=merged)


def cut_after_end(template: ChatTemplate, response: list[int]) -> list[int]:
    """Without what a template writes after the end of a turn (ChatML's newline): a model never generates that."""
    for end_ids in ({template.tokenizer.eos_token_id}, template.end_ids):
        last = next((n for n in range(len(response) - 1, -1, -1) if response[n] in end_ids), None)
        if last is not None:
            break
    else:
        return response
    # A turn may end with another token than EOS (Gemma's <end_of_turn>), but only white space may follow it.
    if response[last] != template.tokenizer.eos_token_id and template.tokenizer.decode(response[last + 1 :]).strip():
        return response
    return response[: last + 1]


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
