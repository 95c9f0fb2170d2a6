"""Fixtures of the arena's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def challenger(once, tiny_base: Path, adapter: Path) -> Path:
    """The tiny model with the adapter merged into it."""
    from peft import PeftModel

    from training.models.loading import load_model
    from training.models.tokenizer import load_tokenizer

    def make(folder: Path) -> None:
        PeftModel.from_pretrained(load_model(tiny_base, "float32"), adapter).merge_and_unload().save_pretrained(folder)
        load_tokenizer(tiny_base).save_pretrained(folder)

    return once("challenger", make)
