"""Check within seconds that a model folder can be trained: configuration, weights, tokenizer, chat template.

Reads headers, no weights. What is wrong is a ValueError with one sentence that says what to do.
"""

import re
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from training.models.chat import render
from training.models.loading import load_config
from training.models.tokenizer import load_tokenizer
from training.models.weights import read_shapes

EMBEDDINGS = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_folder(folder: Path, template: str = "auto") -> None:
    """ValueError with one sentence if the model cannot be trained; reads headers and the tokenizer, no weights."""
    try:
        config = load_config(folder)
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"its config.json cannot be used: {_first_line(error)}") from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"`{config.model_type}` is no causal language model. Choose one that generates text")
    shapes = read_shapes(folder)
    rows = next((shape[0] for name, shape in shapes.items() if EMBEDDINGS.search(name)), None)
    tokenizer = _checked_tokenizer(folder)
    _check_ids(tokenizer, rows or config.get_text_config().vocab_size)
    if template == "auto" and tokenizer.chat_template:
        _check_template(tokenizer)


def _checked_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise ValueError(
            f"it has no tokenizer (none of {', '.join(VOCABULARIES)}). Copy the tokenizer's files into the folder, or "
            "write them with `tokenizer.save_pretrained`"
        )
    try:
        tokenizer = load_tokenizer(folder)
    except Exception as error:
        raise ValueError(f"its tokenizer does not load: {_first_line(error)}. Save or fetch it again") from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "its tokenizer has no EOS token, so no answer could end. Set `eos_token` in tokenizer_config.json"
        )
    return tokenizer


def _check_ids(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Some models have special tokens beyond their embeddings that no text contains, such as those of images."""
    needed = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    text = str(tokenizer.chat_template or "")
    unused = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in text}
    beyond = {n: token for token, n in tokenizer.get_vocab().items() if n >= rows and n not in unused - needed}
    if beyond:
        raise ValueError(
            f"its tokenizer has {len(beyond)} tokens beyond the {rows} rows of its embeddings, such as "
            f"{beyond[min(beyond)]!r} ({min(beyond)}). Use the model's own tokenizer, or resize the embeddings with "
            "`model.resize_token_embeddings` and save the model again"
        )


def _check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
    try:
        render(tokenizer, chat[:1], add_generation_prompt=True)
        whole = render(tokenizer, chat)
        problem = "" if all(turn["content"] in whole for turn in chat) else "the text of a turn is missing"
    except Exception as error:
        problem = _first_line(error)
    if problem:
        raise ValueError(
            f"its chat template cannot render a question and an answer: {problem}. Set prepare.template to plain, "
            "chatml or the text of a template"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
