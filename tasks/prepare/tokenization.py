"""Preferences to tokens: one prompt and two responses. Prompt + response are the tokens of the whole templated text.

No tokenizer merges across an added token such as `<|im_start|>`, so the prompt is cut at its last added token. The part
before the cut is encoded once for both responses, the rest together with each response. That gives the same tokens as
encoding the whole texts, for little more than half the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.prepare.rendering import check_frames, end_of_turn, explained, handed
from tasks.prepare.rows.preference import Preference
from tasks.prepare.sides import Note, clear, notes_of, pieces_of, prompt_of, side_of, start_of, whole_texts
from tasks.prepare.templates import ChatTemplate, encode, render_all
from tasks.source.reject_reasons import RejectedRow


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
    notes: int = 0  # of Note

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longer response."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


def tokenize(template: ChatTemplate, preferences: Sequence[Preference]) -> list[TokenizedPair | RejectedRow]:
    """The tokens of each preference, or the reason why there are none. Answers of a single turn are done in bulk."""
    cleared = [clear(template, preference) for preference in preferences]
    in_bulk = iter(_tokenize_bulk(template, [pair for pair, _ in cleared if _is_single_turn(pair)]))
    made = [next(in_bulk) if _is_single_turn(pair) else _tokenize_turns(template, pair) for pair, _ in cleared]
    return [
        _explained(template, tokens, pair) if isinstance(tokens, RejectedRow) else _checked(tokens, preference, note)
        for tokens, preference, (pair, note) in zip(made, preferences, cleared, strict=True)
    ]


def _is_single_turn(preference: Preference) -> bool:
    sides = (preference.chosen, preference.rejected)
    return all(len(side) == 1 for side in sides) and sides[0][0]["role"] == sides[1][0]["role"] == "assistant"


def _explained(template: ChatTemplate, rejected: RejectedRow, pair: Preference) -> RejectedRow:
    return explained(template, rejected, [*pair.prompt, *pair.chosen, *pair.rejected], pair.tools)


def _checked(tokens: TokenizedPair, preference: Preference, note: Note) -> TokenizedPair | RejectedRow:
    if tokens.chosen_ids == tokens.rejected_ids and preference.chosen != preference.rejected:
        return RejectedRow("equal_answers", "as they are trained")
    return replace(tokens, notes=tokens.notes | note) if note else tokens


def _tokenize_bulk(template: ChatTemplate, preferences: Sequence[Preference]) -> list[TokenizedPair | RejectedRow]:
    sides = [[side_of(template, pair, answer) for answer in (pair.chosen, pair.rejected)] for pair in preferences]
    tools = [pair.tools for pair in preferences]
    contexts = [handed(template, chosen.frame.form, chosen.context) for chosen, _ in sides]
    prompts = render_all(template, contexts, tools, generation=True)
    wholes = [render_all(template, [pair[n].chat(template) for pair in sides], tools) for n in (0, 1)]
    made = [whole_texts(*texts) for texts in zip(sides, tools, prompts, *wholes, strict=True)]
    rendered = [texts for texts in made if isinstance(texts, tuple)]
    if rendered and not _cut_keeps_tokens(template, rendered[0]):
        template = replace(template, added_tokens=())
    parts = [part for texts in rendered for part in _cut(template, *texts)]
    ids = iter(encode(template.tokenizer, parts))
    return [
        texts
        if isinstance(texts, RejectedRow)
        else _tokens(template, texts, notes_of(pair), next(ids), next(ids), next(ids), next(ids))
        for texts, pair in zip(made, sides, strict=True)
    ]


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
    template: ChatTemplate,
    texts: tuple[str, str, str],
    notes: Note,
    head: list[int],
    tail: list[int],
    *wholes: list[int],
) -> TokenizedPair | RejectedRow:
    merged = any(whole[: len(tail)] != tail for whole in wholes)
    if merged:
        responses = encode(template.tokenizer, [text[len(texts[0]) :] for text in texts[1:]])
    else:
        responses = [whole[len(tail) :] for whole in wholes]
    chosen, rejected = (cut_after_end(template, response) for response in responses)
    sides = (chosen, [1] * len(chosen)), (rejected, [1] * len(rejected))
    return _make_pair(template, head + tail, *sides, merged, notes)


def _tokenize_turns(template: ChatTemplate, preference: Preference) -> TokenizedPair | RejectedRow:
    """Answers of several turns: encoded in pieces, so that the loss mask covers the assistant alone."""
    try:
        sides = [side_of(template, preference, answer) for answer in (preference.chosen, preference.rejected)]
        check_frames(*(side.frame for side in sides))
        prompts = [prompt_of(template, side, preference.tools) for side in sides]
        start = start_of(template, preference, sides, prompts)
        both = zip(sides, prompts, strict=True)
        pieces = [pieces_of(template, preference, side, start, prompt) for side, prompt in both]
        (prompt,) = encode(template.tokenizer, [start])
        chosen, rejected = encoded = [_encode_pieces(template, piece) for piece in pieces]
        wholes = encode(template.tokenizer, [start + "".join(text for text, _ in piece) for piece in pieces])
        merged = any(
            prompt + ids != whole[: len(prompt) + len(ids)] for (ids, _), whole in zip(encoded, wholes, strict=True)
        )
        return _make_pair(template, prompt, chosen, rejected, merged, notes_of(sides))
    except RejectedRow as reason:
        return reason


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
    notes: Note,
) -> TokenizedPair | RejectedRow:
    """From the prompt's ids and (ids, loss mask) of both responses."""
    bos_id = template.tokenizer.bos_token_id
    while len(prompt) > 1 and prompt[0] == prompt[1] == bos_id:
        prompt = prompt[1:]  # some templates write BOS twice
    if not prompt or not any(chosen[1]) or not any(rejected[1]):
        return RejectedRow("nothing_left")
    return TokenizedPair(prompt, chosen[0], rejected[0], chosen[1], rejected[1], merged=merged, notes=notes)


def cut_after_end(template: ChatTemplate, response: list[int]) -> list[int]:
    """Without what a template writes after the end of a turn (ChatML's newline): a model never generates that."""
    return response[: end_of_turn(template, response)]


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
