"""Two answers to the same prompt, to be compared by people: of two models, or two samples of one.

Texts are cached under a content hash of model, prompt and sampling, so a restarted arena computes nothing again. Answer
ids are derived from the same content: an answer that is journaled twice has the same id.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from tasks.chat import load_chat_model, weights_folder
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.feedback.answer_cache import cache_folder
from tasks.feedback.events import Answer, Messages
from tasks.runs.named_model import RUN, named_model
from tasks.system.files import known_sha256, read_json_or_empty, write_json
from tasks.tracking.model_names import VERSION

ARENA = "arena"  # the parameter that marks answers of an arena
WEIGHTS = (".safetensors", ".json", ".jinja")  # files that determine an answer


@dataclass(frozen=True)
class Prompt:
    messages: Messages
    user: str = ""  # the person to whom it belongs


@dataclass(frozen=True)
class Side:
    """The model and the sampling behind one of the two answers."""

    role: str
    name: str  # as on the command line
    folder: Path
    sampling: dict[str, Any]  # max_new_tokens, temperature, top_p, seed
    model: str
    version: str = ""
    run: str = ""


def stable_id(*content: Any) -> str:
    """A UUID in hex that is a function of the content."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    return UUID(bytes=digest[:16], version=4).hex


def sides(
    champion: str, challenger: str | None, sampling: dict[str, Any], unregistered: str | None = None
) -> tuple[Side, Side]:
    """Champion and challenger; without a challenger two samples of one model.

    Feedback on a model that is not registered is kept under the name `unregistered`, or else promote.model_name.
    """
    if challenger is None:
        if sampling["temperature"] == 0:
            raise UserError("Two samples of one model at temperature 0 are equal. Name a CHALLENGER, or raise it.")
        side = _side("sample", champion, sampling, unregistered)
        return side, replace(side, sampling={**sampling, "seed": sampling["seed"] + 1})
    first = _side("champion", champion, sampling, unregistered)
    second = _side("challenger", challenger, sampling, unregistered)
    if second.model != first.model:  # feedback on a pair is kept with the champion's model
        second = replace(second, model=first.model, version="", run="")
    return first, second


def _side(role: str, name: str, sampling: dict[str, Any], unregistered: str | None) -> Side:
    found = named_model(name)
    folder, default = weights_folder(found), unregistered or load_params().promote.model_name
    if found.kind == VERSION:
        return Side(role, name, folder, sampling, found.model, found.version, found.run)
    return Side(role, name, folder, sampling, default, run=found.run if found.kind == RUN else "")


class ModelAnswers:
    """Answers of models in this process. A model is loaded when the first answer is missing from the cache."""

    def __init__(self, first: Side, second: Side, cache: Path | None = None) -> None:
        self.sides = first, second
        self.cache = cache or cache_folder()
        self.hashes = {side.folder: _model_hash(side.folder) for side in self.sides}
        self.models: dict[Path, Any] = {}

    def pairs(self, prompts: Sequence[Prompt]) -> list[tuple[Answer, Answer]]:
        """The first (champion) and the second (challenger) answer to each prompt."""
        first, second = (self._answers(side, prompts) for side in self.sides)
        return list(zip(first, second, strict=True))

    def _answers(self, side: Side, prompts: Sequence[Prompt]) -> list[Answer]:
        files = [self._file(side, prompt) for prompt in prompts]
        missing = [number for number, file in enumerate(files) if not read_json_or_empty(file)]
        if missing:
            texts = self._model(side.folder).answers([prompts[n].messages for n in missing], **side.sampling)
            for number, text in zip(missing, texts, strict=True):
                valid = text.encode(errors="replace").decode().replace("\0", "")  # the journal takes no other text
                write_json(files[number], {"text": valid, "time": time.time(), "user": prompts[number].user})
        return [_answer(side, prompt, file) for prompt, file in zip(prompts, files, strict=True)]

    def _file(self, side: Side, prompt: Prompt) -> Path:
        key = stable_id(self.hashes[side.folder], prompt.messages, side.sampling, prompt.user)
        return self.cache / key[:2] / f"{key}.json"

    def _model(self, folder: Path) -> Any:
        if folder not in self.models:
            self.models[folder] = load_chat_model(folder)
        return self.models[folder]


def _answer(side: Side, prompt: Prompt, file: Path) -> Answer:
    cached = read_json_or_empty(file)
    return Answer(
        id=stable_id(file.stem, side.role, side.model, side.version),
        time=cached["time"],
        messages=prompt.messages,
        text=cached["text"],
        model=side.model,
        version=side.version,
        run=side.run,
        role=side.role,
        user=prompt.user,
        parameters={ARENA: side.name, **side.sampling},
    )


def _model_hash(folder: Path) -> dict[str, str]:
    return {path.name: known_sha256(path) for path in sorted(folder.iterdir()) if path.suffix in WEIGHTS}
