"""Conversations to tokens: one prompt and two responses, so that prompt + response is the whole templated text.

An added token (`<|im_start|>`) is a border that no tokenizer merges across, so a prompt is cut at its last one: what
stands before is encoded once for both responses, and the rest together with each response, which gives the same tokens
as the whole text would at little more than half the work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.dataset.conversations import Conversation
from tasks.dataset.messages import Message
from tasks.dataset.violations import BadRow
from tasks.errors import UserError
from training.limits import bounded

# For a model without a chat template.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# For a model that knows these two tokens and comes without a template.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}
RENDER_SECONDS = 60.0  # for the conversations of a chunk, which take a fraction of one
RENDER_BYTES = 1 << 30


@dataclass(frozen=True)
class Tokens:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_mask: list[int]  # 1 where a token counts
    rejected_mask: list[int]
    merged: bool = False  # the tokenizer merged across a border, so a response was tokenised on its own
    truncated: bool = False


@dataclass(frozen=True)
class Template:
    """A tokenizer with its chat template set, and what a run does with them."""

    tokenizer: Any
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_on: str = "last"
    borders: tuple[str, ...] = ()  # added tokens at which a text may be cut
    ends: frozenset[int] = frozenset()  # tokens that may end a turn


def choose_template(
    tokenizer: Any, wanted: str, kwargs: dict[str, Any] | None = None, loss_on: str = "last"
) -> Template:
    """Set the template on the tokenizer: the model's own, one of ours by name, or the text of one."""
    name = f"the built-in {wanted}" if wanted in BUILT_IN else "the text in prepare.template"
    if wanted == "auto":
        name = "the model's chat template" if tokenizer.chat_template else "the built-in plain"
        tokenizer.chat_template = tokenizer.chat_template or PLAIN
    else:
        tokenizer.chat_template = BUILT_IN.get(wanted, wanted)
    if wanted == "chatml" and len(encode(tokenizer, ["<|im_end|>"])[0]) != 1:
        raise UserError("prepare.template: this tokenizer has no <|im_end|>, so chatml is not for it. Take plain.")
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()  # a tokenizer.json may carry both
        backend.no_padding()
    added = tokenizer.added_tokens_decoder
    borders = tuple(token.content for token in added.values() if not token.lstrip and not token.single_word)
    ends = frozenset({number for number, token in added.items() if token.special} | {tokenizer.eos_token_id})
    return Template(tokenizer, name, kwargs or {}, loss_on, borders, ends)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids, and nothing added: what a template wants at either end it writes itself."""
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def tokenise(template: Template, conversations: Sequence[Conversation]) -> list[Tokens | BadRow]:
    """Tokens of each conversation, or why it has none. The usual kind, one answer each, goes through in bulk."""
    usual = iter(_in_bulk(template, [one for one in conversations if _is_usual(one)]))
    return [next(usual) if _is_usual(one) else _by_turns(template, one) for one in conversations]


def _is_usual(one: Conversation) -> bool:
    return len(one.chosen) == len(one.rejected) == 1 and one.tools is None and one.chosen[0]["role"] == "assistant"


def _in_bulk(template: Template, conversations: Sequence[Conversation]) -> list[Tokens | BadRow]:
    prompts = _render_all(template, [one.prompt for one in conversations], generation=True)
    chosen = _render_all(template, [one.prompt + one.chosen for one in conversations])
    rejected = _render_all(template, [one.prompt + one.rejected for one in conversations])
    triples = [_agree(*triple) for triple in zip(prompts, chosen, rejected, strict=True)]
    if not _cuts_well(template, next((texts for texts in triples if isinstance(texts, tuple)), None)):
        template = replace(template, borders=())
    parts = [_cut(template, *texts) for texts in triples if isinstance(texts, tuple)]
    ids = iter(encode(template.tokenizer, [text for four in parts for text in four]))
    return [
        texts if isinstance(texts, BadRow) else _tokens(template, texts, next(ids), next(ids), next(ids), next(ids))
        for texts in triples
    ]


def _agree(prompt: str | BadRow, chosen: str | BadRow, rejected: str | BadRow) -> tuple[str, str, str] | BadRow:
    """The three texts, where both conversations begin with the prompt."""
    if isinstance(prompt, BadRow) or isinstance(chosen, BadRow) or isinstance(rejected, BadRow):
        return next(text for text in (prompt, chosen, rejected) if isinstance(text, BadRow))
    if not (chosen.startswith(prompt) and rejected.startswith(prompt)):
        return BadRow("template_rewrites")
    return prompt, chosen, rejected


def _cuts_well(template: Template, texts: tuple[str, str, str] | None) -> bool:
    """Proof on the first of many: cut at a border, a text gives the tokens that it gives whole."""
    if texts is None:
        return True
    head, _, rest, _ = _cut(template, *texts)
    apart, whole = encode(template.tokenizer, [head, rest]), encode(template.tokenizer, [texts[1]])
    return apart[0] + apart[1] == whole[0]


def _cut(template: Template, prompt: str, chosen: str, rejected: str) -> tuple[str, str, str, str]:
    """The prompt up to its last border, the rest of it, and the rest with each response."""
    at = max((0, *(prompt.rfind(border) for border in template.borders)))
    return prompt[:at], prompt[at:], chosen[at:], rejected[at:]


def _tokens(
    template: Template, texts: tuple[str, str, str], head: list[int], tail: list[int], *wholes: list[int]
) -> Tokens | BadRow:
    merged = any(whole[: len(tail)] != tail for whole in wholes)
    if merged:
        responses = encode(template.tokenizer, [text[len(texts[0]) :] for text in texts[1:]])
    else:
        responses = [whole[len(tail) :] for whole in wholes]
    chosen, rejected = (until_end(template, response) for response in responses)
    return _checked(template, head + tail, (chosen, [1] * len(chosen)), (rejected, [1] * len(rejected)), merged)


def _by_turns(template: Template, one: Conversation) -> Tokens | BadRow:
    """An answer of several turns, or with tools: piece by piece, to know which tokens the assistant wrote."""
    try:
        generation = one.chosen[0]["role"] == one.rejected[0]["role"] == "assistant"
        start = _render(template, one.prompt, one.tools, generation)
        (prompt,) = encode(template.tokenizer, [start])
        sides, merged = [], False
        for answer in (one.chosen, one.rejected):
            pieces = _pieces(template, one, answer, start)
            sides.append(_masked(template, pieces))
            (whole,) = encode(template.tokenizer, [start + "".join(text for text, _ in pieces)])
            merged |= (prompt + sides[-1][0]) != whole[: len(prompt) + len(sides[-1][0])]
        return _checked(template, prompt, sides[0], sides[1], merged)
    except BadRow as bad:
        return bad


def _pieces(template: Template, one: Conversation, answer: list[Message], start: str) -> list[tuple[str, bool]]:
    """The text of an answer in pieces, each with whether it counts: only what the assistant wrote can."""
    whole, place, pieces = _render(template, one.prompt + answer, one.tools), len(start), []
    turns = [n for n, turn in enumerate(answer) if turn["role"] == "assistant"]
    for n in turns:
        before = _render(template, one.prompt + answer[:n], one.tools, generation=True)
        after = _render(template, one.prompt + answer[: n + 1], one.tools)
        if not (whole.startswith(start) and whole.startswith(before) and whole.startswith(after)):
            raise BadRow("template_rewrites")
        counts = n == turns[-1] or template.loss_on == "all"
        pieces += [(whole[place : len(before)], False), (whole[len(before) : len(after)], counts)]
        place = len(after)
    return [piece for piece in pieces if piece[0]]


def _masked(template: Template, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    mask: list[int] = []
    encoded = encode(template.tokenizer, [text for text, _ in pieces])
    for number, (piece, (_, counts)) in enumerate(zip(encoded, pieces, strict=True)):
        said = until_end(template, piece) if counts else piece
        kept = said if number == len(pieces) - 1 else piece
        ids += kept
        mask += [int(counts)] * len(said) + [0] * (len(kept) - len(said))
    return ids, mask


def _checked(
    template: Template,
    prompt: list[int],
    chosen: tuple[list[int], list[int]],
    rejected: tuple[list[int], list[int]],
    merged: bool,
) -> Tokens | BadRow:
    bos = template.tokenizer.bos_token_id
    while len(prompt) > 1 and prompt[0] == prompt[1] == bos:
        prompt = prompt[1:]  # a template that writes it twice
    if not prompt or not any(chosen[1]) or not any(rejected[1]):
        return BadRow("nothing_left")
    return Tokens(prompt, chosen[0], rejected[0], chosen[1], rejected[1], merged)


def until_end(template: Template, response: list[int]) -> list[int]:
    """Without what a template writes after the end of the turn (ChatML's newline): the model never says that."""
    end = template.tokenizer.eos_token_id
    if response and response[-1] == end:
        return response
    last = next((n for n in range(len(response) - 1, -1, -1) if response[n] == end), None)
    if last is None:  # a turn may end with another token than the text: Gemma's <end_of_turn>
        last = next((n for n in range(len(response) - 1, -1, -1) if response[n] in template.ends), None)
        if last is None or template.tokenizer.decode(response[last + 1 :]).strip():
            return response
    return response[: last + 1]


def _render_all(template: Template, chats: list[list[Message]], generation: bool = False) -> list[str | BadRow]:
    """All at once; where the template refuses one, each by itself."""
    if not chats:
        return []
    try:
        return _apply(template, chats, None, generation)
    except UserError:
        raise
    except Exception:  # a template raises what it likes
        return [_render_or_refuse(template, chat, generation) for chat in chats]


def _render_or_refuse(template: Template, chat: list[Message], generation: bool) -> str | BadRow:
    try:
        return _render(template, chat, None, generation)
    except BadRow as bad:
        return bad


def _render(template: Template, chat: list[Message], tools: list[Any] | None, generation: bool = False) -> str:
    try:
        return _apply(template, chat, tools, generation)
    except UserError:
        raise
    except Exception as error:
        raise BadRow("template_refused", (str(error) or type(error).__name__).splitlines()[0]) from None


def _apply(template: Template, chats: Iterable[Any], tools: list[Any] | None, generation: bool) -> Any:
    """Jinja's sandbox bounds neither loops nor memory."""
    try:
        with bounded(RENDER_SECONDS, RENDER_BYTES):
            return template.tokenizer.apply_chat_template(
                chats, tools=tools, add_generation_prompt=generation, tokenize=False, **template.kwargs
            )
    except TimeoutError:
        raise UserError(
            f"prepare.template: {template.name} was not done with a few conversations after {RENDER_SECONDS:g} s: it "
            "may loop for ever. Set prepare.template to plain, chatml or a text of your own, or take another model."
        ) from None
