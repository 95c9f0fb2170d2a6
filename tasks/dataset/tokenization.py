"""Preferences to tokens: one prompt and two responses. Prompt + response are the tokens of the whole templated text.

No tokenizer merges across an added token such as `<|im_start|>`, so the prompt is cut at its last added token. The part
before the cut is encoded once for both responses, the rest together with each response. That gives the same tokens as
encoding the whole texts, for little more than half the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.dataset.rows.messages import Message
from tasks.dataset.rows.preference import Preference
from tasks.dataset.rows.reject_reasons import RejectedRow
from tasks.errors import UserError
from training.limits import bounded

# For a model without a chat template.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# For a model that has these two tokens and no template.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}
RENDER_SECONDS = 60.0  # for the conversations of a chunk, which usually take less than a second
RENDER_BYTES = 1 << 30


@dataclass(frozen=True)
class TokenizedPair:
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_mask: list[int]  # loss mask: 1 for tokens in the loss
    rejected_mask: list[int]
    merged: bool = False  # the tokenizer merged prompt and response, so the response was tokenized alone
    truncated: bool = False

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longer response."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its chat template set, and the options of `prepare` for it."""

    tokenizer: Any
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_on: str = "last"
    added_tokens: tuple[str, ...] = ()  # a text may be cut before any of them
    end_ids: frozenset[int] = frozenset()  # tokens that may end a turn


def choose_template(
    tokenizer: Any, wanted: str, kwargs: dict[str, Any] | None = None, loss_on: str = "last"
) -> ChatTemplate:
    """Set the tokenizer's template: the model's own, a built-in one by name, or the template text in `wanted`."""
    name = f"the built-in {wanted}" if wanted in BUILT_IN else "the text in prepare.template"
    if wanted == "auto":
        name = "the model's chat template" if tokenizer.chat_template else "the built-in plain"
        tokenizer.chat_template = tokenizer.chat_template or PLAIN
    else:
        tokenizer.chat_template = BUILT_IN.get(wanted, wanted)
    if wanted == "chatml" and len(encode(tokenizer, ["<|im_end|>"])[0]) != 1:
        raise UserError("prepare.template: chatml needs the token <|im_end|>, which this tokenizer lacks. Use plain.")
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()  # tokenizer.json may set both
        backend.no_padding()
    added = tokenizer.added_tokens_decoder
    cuts = tuple(token.content for token in added.values() if not token.lstrip and not token.single_word)
    end_ids = frozenset({number for number, token in added.items() if token.special} | {tokenizer.eos_token_id})
    return ChatTemplate(tokenizer, name, kwargs or {}, loss_on, cuts, end_ids)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids without added special tokens: the template has written those that it needs."""
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def tokenize(template: ChatTemplate, preferences: Sequence[Preference]) -> list[TokenizedPair | RejectedRow]:
    """The tokens of each preference, or the reason why there are none. Answers of a single turn are done in bulk."""
    in_bulk = iter(_tokenize_bulk(template, [one for one in preferences if _is_single_turn(one)]))
    return [next(in_bulk) if _is_single_turn(one) else _tokenize_turns(template, one) for one in preferences]


def _is_single_turn(preference: Preference) -> bool:
    sides = (preference.chosen, preference.rejected)
    return all(len(side) == 1 for side in sides) and preference.tools is None and sides[0][0]["role"] == "assistant"


def _tokenize_bulk(template: ChatTemplate, preferences: Sequence[Preference]) -> list[TokenizedPair | RejectedRow]:
    prompts = _render_all(template, [one.prompt for one in preferences], generation=True)
    chosen = _render_all(template, [one.prompt + one.chosen for one in preferences])
    rejected = _render_all(template, [one.prompt + one.rejected for one in preferences])
    triples = [_check_prefix(*triple) for triple in zip(prompts, chosen, rejected, strict=True)]
    if not _cut_keeps_tokens(template, next((texts for texts in triples if isinstance(texts, tuple)), None)):
        template = replace(template, added_tokens=())
    parts = [_cut(template, *texts) for texts in triples if isinstance(texts, tuple)]
    ids = iter(encode(template.tokenizer, [text for four in parts for text in four]))
    return [
        texts
        if isinstance(texts, RejectedRow)
        else _tokens(template, texts, next(ids), next(ids), next(ids), next(ids))
        for texts in triples
    ]


def _check_prefix(
    prompt: str | RejectedRow, chosen: str | RejectedRow, rejected: str | RejectedRow
) -> tuple[str, str, str] | RejectedRow:
    """The three texts, if both conversations start with the prompt."""
    if isinstance(prompt, RejectedRow) or isinstance(chosen, RejectedRow) or isinstance(rejected, RejectedRow):
        return next(text for text in (prompt, chosen, rejected) if isinstance(text, RejectedRow))
    if not (chosen.startswith(prompt) and rejected.startswith(prompt)):
        return RejectedRow("template_rewrites")
    return prompt, chosen, rejected


def _cut_keeps_tokens(template: ChatTemplate, texts: tuple[str, str, str] | None) -> bool:
    """Checked on the first of many texts: encoded in two parts, it gives the tokens of the whole text."""
    if texts is None:
        return True
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
        start = _render(template, preference.prompt, preference.tools, generation)
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
    whole, place, pieces = _render(template, preference.prompt + answer, preference.tools), len(start), []
    turns = [n for n, turn in enumerate(answer) if turn["role"] == "assistant"]
    for n in turns:
        before = _render(template, preference.prompt + answer[:n], preference.tools, generation=True)
        after = _render(template, preference.prompt + answer[: n + 1], preference.tools)
        if not (whole.startswith(start) and whole.startswith(before) and whole.startswith(after)):
            raise RejectedRow("template_rewrites")
        in_loss = n == turns[-1] or template.loss_on == "all"
        pieces += [(whole[place : len(before)], False), (whole[len(before) : len(after)], in_loss)]
        place = len(after)
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
    return TokenizedPair(prompt, chosen[0], rejected[0], chosen[1], rejected[1], merged)


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


def _render_all(
    template: ChatTemplate, chats: list[list[Message]], generation: bool = False
) -> list[str | RejectedRow]:
    """All at once; if the template raises an error for one of them, each alone."""
    if not chats:
        return []
    try:
        return _render(template, chats, None, generation)
    except RejectedRow as rejected:
        if len(chats) == 1:
            return [rejected]
        return [text for chat in chats for text in _render_all(template, [chat], generation)]


def _render(template: ChatTemplate, chat: list[Any], tools: list[Any] | None, generation: bool = False) -> Any:
    """The text of a chat, or of each chat of a list, within limits of time and memory: Jinja's sandbox has none."""
    try:
        with bounded(RENDER_SECONDS, RENDER_BYTES):
            return template.tokenizer.apply_chat_template(
                chat, tools=tools, add_generation_prompt=generation, tokenize=False, **template.kwargs
            )
    except TimeoutError:
        raise UserError(
            f"prepare.template: {template.name} did not render a few conversations within {RENDER_SECONDS:g} s; it may "
            "loop forever. Set prepare.template to plain, chatml or the text of a template, or use another model."
        ) from None
    except Exception as error:  # a template may raise anything
        raise RejectedRow("template_refused", (str(error) or type(error).__name__).splitlines()[0]) from None
