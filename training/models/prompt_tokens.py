"""How many tokens a conversation has for a model, and how many the model can read."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from training.models.chat import as_read
from training.models.model_files import loadable
from training.models.tokenizer import load_tokenizer


class PromptTokens:
    """Thread-safe, since a tokenizer changes its settings on its first call alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer, self.context = load_tokenizer(folder), context_length(folder)
        self.tokenizer("x")

    def count(self, messages: Sequence[dict[str, str]]) -> int:
        """ValueError if the template refuses the messages."""
        try:
            given = as_read(self.tokenizer, list(messages))
            ids = self.tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template may raise any
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return len(ids)


def context_length(folder: Path) -> int | None:
    """The longest text that the model was made for; None if its configuration names none, as of a recurrent model."""
    with loadable(folder) as files:
        config = AutoConfig.from_pretrained(files, local_files_only=True, trust_remote_code=False).get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    stretched = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 0)  # YaRN, Llama 3
    return longest and max(longest, int(stretched))
