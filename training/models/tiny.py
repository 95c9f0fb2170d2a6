"""A tiny Llama for the demo and the tests, trained from scratch: tokenizer, chat template, model.

make(Path("models/tiny"), [("Where is the cup?", "On the table.")], seed=0)
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()  # it would appear for a small file

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
VOCABULARY = 520
BATCH = 16
LEARNING_RATE = 1.5e-3
WARMUP = 0.1  # of the steps
IGNORED = -100

# Special tokens surround each answer, so that the prompt's tokens are a prefix of the conversation's tokens.
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' ~ message.role) }}"
    "{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make(
    folder: Path,
    conversations: list[tuple[str, str]],
    seed: int,
    steps: int = 125,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> None:
    """Train a tokenizer and a model of 2.0M parameters on (prompt, answer) texts and save both into `folder`."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer([text for pair in conversations for text in pair])
    model = _model(tokenizer)
    _train(model, [_encode(tokenizer, *pair) for pair in conversations], steps, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which other users cannot read


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text can be encoded, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, extra_special_tokens=special[3:]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,  # tied embeddings collapsed in the demo's preference training
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def _encode(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a conversation, and the number of prompt tokens."""
    messages = [{"role": "user", "content": prompt}]
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    messages.append({"role": "assistant", "content": answer})
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert isinstance(prompt_ids, list)
    return cast(list[int], ids), len(prompt_ids)


def _train(
    model: LlamaForCausalLM,
    examples: list[tuple[list[int], int]],
    steps: int,
    report: Callable[[int, int, float], None],
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=max(steps, 2), pct_start=WARMUP, cycle_momentum=False
    )
    pad = model.config.pad_token_id
    assert pad is not None
    epochs = -(-steps * BATCH // len(examples))
    order = torch.cat([torch.randperm(len(examples)) for _ in range(epochs)]).split(BATCH)
    model.train()
    for step in range(1, steps + 1):
        inputs, labels = _batch([examples[index] for index in order[step - 1]], pad)
        # No attention mask is needed: padding follows the tokens, so no token attends to it.
        logits = model(input_ids=inputs).logits  # (batch, tokens, vocabulary)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            report(step, steps, loss.item())
    model.eval()


def _batch(examples: list[tuple[list[int], int]], pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded token ids and labels, both (batch, tokens); labels of prompt tokens and padding are ignored."""
    inputs = pad_sequence([torch.tensor(ids) for ids, _ in examples], batch_first=True, padding_value=pad)
    targets = [torch.tensor([IGNORED] * prompt + ids[prompt:]) for ids, prompt in examples]
    labels = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    return inputs, labels
