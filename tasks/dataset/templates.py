"""The chat template of a run: the base model's tokenizer with the settings of `prepare`."""

import os

from tasks.config.params import Params
from tasks.dataset.tokenization import ChatTemplate, choose_template
from tasks.models import source_folder


def load_template(params: Params) -> ChatTemplate:
    from training.models.tokenizer import load_tokenizer  # heavy: transformers

    # Processes share the work, not threads: the tokenizer's threads would not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(source_folder(params.source.model))
    options = params.prepare
    return choose_template(tokenizer, options.template, options.chat_template_kwargs, options.loss_on)
