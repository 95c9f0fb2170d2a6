"""Talk to a model: stream one answer, or sample answers to many prompts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import torch
from transformers import TextIteratorStreamer

from training.evaluation.sampling import sample
from training.models.chat import render
from training.models.ends import end_ids
from training.models.loading import best_device, load_model
from training.models.tokenizer import load_tokenizer

Messages = list[dict[str, str]]


class ChatModel:
    """A model on the best device of this machine: bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, folder: Path) -> None:
        device = best_device()
        self.tokenizer = load_tokenizer(folder)
        self.model = load_model(folder, "bfloat16" if device.type == "cuda" else "float32", device).eval()

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids up to the start of the answer; without a chat template those of the texts, a line each."""
        if not self.tokenizer.chat_template:
            return list(self.tokenizer("\n".join(message["content"] for message in messages) + "\n")["input_ids"])
        text = render(self.tokenizer, messages, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def stream(self, messages: Messages, max_new_tokens: int, temperature: float, top_p: float) -> Iterator[str]:
        """Pieces of the answer as they are sampled."""
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = torch.tensor([self.prompt_ids(messages)], device=self.model.device)
        draw = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
        ends = end_ids(self.tokenizer, self.model.generation_config.eos_token_id, self.model.config)
        tokens = {"pad_token_id": self.tokenizer.pad_token_id, "eos_token_id": ends}
        options = {"max_new_tokens": max_new_tokens, **tokens, **draw}
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options)
            except BaseException as error:  # the reader would wait for ever
                errors.append(error)
                streamer.end()

        thread = Thread(target=generate, daemon=True)
        thread.start()
        yield from streamer
        thread.join()
        if errors:
            raise errors[0]

    def answers(
        self, conversations: Sequence[Messages], max_new_tokens: int, temperature: float, top_p: float, seed: int
    ) -> list[str]:
        """One answer for each conversation. The same seed gives the same answers."""
        prompts = [self.prompt_ids(messages) for messages in conversations]
        answers = sample(self.model, self.tokenizer, prompts, max_new_tokens, temperature, top_p, seed)
        return [answer.text for answer in answers]
