"""The files of a model folder that are read: hashes, copies and loading take their names from here.

transformers and peft follow names inside files (another configuration, weights in other folders), and pick up
adapters, pickles and folders that happen to lie there. They get a folder of links to these files and find nothing else.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"\w[\w.-]*\.safetensors")  # a plain name: no folder, no hidden file
CONFIGURATION = ("config.json", "generation_config.json")
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tiktoken.model",
    "tekken.json",
)
OF_TOKENIZERS = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "bpe.codes",
    "emoji.json",
    "normalizer.json",
    "prophetnet.tokenizer",
    "word_pronunciation.json",
    "word_shape.json",
    "chat_template.jinja",
    "chat_template.json",
)
OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MORE_TEMPLATES = "additional_chat_templates"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
LARGEST_TEXT = 256 << 20  # bytes of a file other than weights: the tokenizer of a million tokens has a fifth


def model_files(folder: Path) -> list[str]:
    """The names of a model's files, sorted. ValueError if weights that its index names cannot be among them."""
    templates = (f"{MORE_TEMPLATES}/{path.name}" for path in (folder / MORE_TEMPLATES).glob("[!.]*.jinja"))
    texts = [name for name in (*CONFIGURATION, *OF_TOKENIZERS, *OF_PROCESSORS, *templates) if (folder / name).is_file()]
    weights = weight_files(folder)
    texts += [INDEX] if weights and weights != [SINGLE] else []
    for name in texts:
        _check_size(folder / name)
    return sorted([*texts, *weights])


def embedded_adapter(folder: Path) -> str | None:
    """A file of an adapter beside the model's own, which transformers would load and an export would leave out."""
    found = [path.name for path in (folder / ADAPTER[0], *sorted(folder.glob("adapter_model*"))) if path.exists()]
    return next(iter(found), None)


def weight_files(folder: Path) -> list[str]:
    """Like transformers, ignores the index beside a single file; empty if there are no weights."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    files = sorted(set(read_index(folder).values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ValueError(
            f"{len(missing)} of its {len(files)} files of weights are missing, such as {missing[0]}. Fetch it again"
        )
    return files


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, all beside the index; empty if there is none."""
    if not (folder / INDEX).is_file():
        return {}
    try:
        files: dict[str, Any] = read_object(folder / INDEX)["weight_map"]
        names = {str(name) for name in files.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is damaged ({error!r}). Fetch it again") from None
    if strange := sorted(name for name in names if not SHARD.fullmatch(name)):
        raise ValueError(
            f"{INDEX} names the file {strange[0]!r}, and weights are read only from .safetensors files beside it. Move "
            "the files there, and write the index again"
        )
    return files


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError for anything else."""
    _check_size(path)
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def _check_size(path: Path) -> None:
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"{path.name} has {size >> 20} MiB, and at most {LARGEST_TEXT >> 20} are read. Fetch it again")


@contextmanager
def loadable(folder: Path) -> Iterator[Path]:
    """A folder with links to the model's files and nothing else. What is loaded from it may outlive it."""
    with _links(folder, model_files(folder)) as files:
        yield files


@contextmanager
def loadable_adapter(folder: Path) -> Iterator[Path]:
    """The same for an adapter."""
    with _links(folder, ADAPTER) as files:
        yield files


@contextmanager
def _links(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    with TemporaryDirectory(prefix="dpo-model-") as temporary:
        files = Path(temporary) / (folder.resolve().name or "model")  # messages of transformers name the folder
        files.mkdir()
        for name in names:
            (files / name).parent.mkdir(exist_ok=True)
            (files / name).symlink_to((folder / name).absolute())
        yield files
