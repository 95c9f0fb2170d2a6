"""`dpo chat` and `dpo generate`: use the champion, a version, a run's export, the base model or any model folder."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.models import HUB, REGISTRY, base_folder, hub_address, hub_snapshot, plain_folder
from tasks.config.addresses import local_path
from tasks.config.params import load_params
from tasks.config.paths import BASE, MODEL, SFT, main_checkout
from tasks.errors import UserError
from tasks.runs.named_model import HERE, NamedModel, manifest_of, named_model
from tasks.runs.open_run import open_run, weights_of
from tasks.source.fetch import errors_of_stores
from tasks.system.progress import Bar
from tasks.tracking.model_names import BASE_MODEL, FOLDER, HUB_MODEL, registered_version
from tasks.tracking.verify import require_intact, require_intact_version

if TYPE_CHECKING:
    from training.evaluation.chat import ChatModel
    from training.models.prompt_tokens import PromptTokens

BATCH = 16  # prompts whose answers are written to the file together
HELP = "Enter sends, /reset starts a new conversation, Ctrl-D ends."


def model_folder(name: str | None) -> Path:
    """The folder with a model's weights. Without a name: this workspace's export, or else the champion."""
    if name is None and not any(MODEL.glob("*.safetensors")):
        name = "champion"
    return weights_folder(named_model(name))


def weights_folder(found: NamedModel) -> Path:
    """The folder with a model's weights; what this pipeline exported is verified against its signed manifest."""
    if found.kind == FOLDER:
        return plain_folder(found.folder)
    if found.kind == HUB_MODEL:
        with errors_of_stores(f"{found.name} could not be fetched from the hub", "Check the name and your network."):
            folder = hub_snapshot(*hub_address(found.name))
        return plain_folder(folder)
    if found.kind == BASE_MODEL:
        is_here = not (found.version or found.run)
        return plain_folder(base_folder(load_params().source.model) if is_here else _base_of(found))
    if found.kind == HERE:
        return found.folder
    if found.version:
        with registered_version(f"{found.model}/{found.version}") as (_, models, version):
            require_intact_version(models, version)
            return weights_of(models, version)
    worktree = main_checkout() / ".scratch" / "worktrees" / found.run / MODEL
    folder = worktree if any(worktree.glob("*.safetensors")) else open_run(found.run) / MODEL
    require_intact(folder)
    return folder


def _base_of(found: NamedModel) -> Path:
    """The folder of the base model of a version or run; with source.adapter, the one with the merged adapter."""
    manifest = manifest_of(found)
    if "sft" in manifest:
        return open_run(found.run) / SFT
    address, made_by_source = manifest["base"]["model"], manifest["params"]["source"]["adapter"] is not None
    if address == "demo" or address.startswith(REGISTRY) or made_by_source:
        return open_run(found.run) / BASE
    if address.startswith(HUB):
        return hub_snapshot(hub_address(address)[0], manifest["base"]["revision"], local_files_only=True)
    return local_path(address)


def chat(names: list[str], system: str | None, max_new_tokens: int, temperature: float, top_p: float) -> None:
    """A conversation on the terminal. Several models answer the same messages one below the other."""
    models = _load(names or [None])
    print(HELP)
    conversations = {name: _opening(system) for name in models}
    while (text := _read()) is not None:
        if text == "/reset":
            conversations = {name: _opening(system) for name in models}
        elif text:
            for name, model in models.items():
                conversation = [*conversations[name], {"role": "user", "content": text}]
                answer = _show(name, model.stream(conversation, max_new_tokens, temperature, top_p))
                conversations[name] = [*conversation, {"role": "assistant", "content": answer}]


def _load(names: Sequence[str | None]) -> "dict[str, ChatModel]":
    folders = {name or "model": model_folder(name) for name in names}
    print("Loading", ", ".join(f"{name} ({folder})" for name, folder in folders.items()), flush=True)
    return {name: load_chat_model(folder) for name, folder in folders.items()}


def load_chat_model(folder: Path) -> "ChatModel":
    from training.evaluation.chat import ChatModel  # torch: only once an answer is needed

    try:
        return ChatModel(folder)
    except ValueError as error:
        raise UserError(f"The model in {folder} cannot be used: {error}.") from error


def load_prompt_tokens(folder: Path) -> "PromptTokens":
    from training.models.prompt_tokens import PromptTokens

    return PromptTokens(folder)


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _read() -> str | None:
    try:
        return input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _show(name: str, pieces: Iterator[str]) -> str:
    """Print an answer as it comes. Ctrl-C ends the answer, not the conversation."""
    print(f"{name}: ", end="", flush=True)
    answer: list[str] = []
    try:
        for piece in pieces:
            answer.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return "".join(answer)


def generate(
    file: Path, name: str | None, out: Path | None, max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> Path:
    """Answers to the prompts of a file, one JSON line each. An interrupted run continues with the same command."""
    prompts = read_prompts(file)
    out = out or file.with_name(f"{file.stem}.answers.jsonl")
    done = _done(out, prompts)
    (model,) = _load([name]).values()
    with Bar("generate", len(prompts), "answers") as bar, out.open("a") as written:
        bar.update(done)
        for start in range(done, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            answers = model.answers([as_messages(prompt) for prompt in batch], max_new_tokens, temperature, top_p, seed)
            for prompt, answer in zip(batch, answers, strict=True):
                written.write(json.dumps({"prompt": prompt, "response": answer}, ensure_ascii=False) + "\n")
            written.flush()
            bar.update(start + len(batch))
    return out


def read_prompts(file: Path) -> list[Any]:
    """One prompt a line: plain text, a JSON string, or an object with `prompt` or `messages`."""
    if not file.exists():
        raise UserError(f"{file} does not exist. Give a file with one prompt a line (text, or JSON with `prompt`).")
    lines = enumerate(file.read_text().split("\n"), 1)
    prompts = [_prompt(line.strip(), f"{file}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{file} has no prompts.")
    return prompts


def _prompt(line: str, location: str) -> Any:
    try:
        content = json.loads(line) if line.startswith(("{", '"')) else line
    except ValueError as error:
        raise UserError(f"{location}: not valid JSON ({error}). Correct that line.") from None
    prompt = content.get("prompt", content.get("messages")) if isinstance(content, dict) else content
    if not (isinstance(prompt, str) or _is_conversation(prompt)):
        raise UserError(f"{location}: no `prompt` or `messages` (it has {', '.join(content)}).")
    return prompt


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all({"role", "content"} <= set(turn) for turn in prompt)


def as_messages(prompt: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _done(out: Path, prompts: list[Any]) -> int:
    """How many answers an earlier call wrote; UserError if the file has answers to other prompts."""
    lines = out.read_text().splitlines(keepends=True) if out.exists() else []
    if lines and not lines[-1].endswith("\n"):  # killed while writing
        lines = lines[:-1]
        out.write_text("".join(lines))
    if [json.loads(line).get("prompt") for line in lines] != prompts[: len(lines)]:
        raise UserError(f"{out} exists and has answers to other prompts. Delete it, or choose another --out.")
    return len(lines)
