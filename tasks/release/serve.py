"""How to serve an export: an Ollama Modelfile, and the commands that a model card shows."""

from training.chat import Pieces


def modelfile(gguf: str, pieces: Pieces | None) -> str:
    lines = [f"FROM ./{gguf}"]
    if pieces and not _unsafe(pieces):
        lines += [f'TEMPLATE """{_template(pieces)}"""']
        lines += [f'PARAMETER stop "{end}"' for end in pieces.ends]
    else:
        lines += ["# The chat template could not be put into Ollama's words: the one in the GGUF file applies."]
    return "\n".join(lines) + "\n"


def commands(name: str, folder: str, gguf: list[str]) -> str:
    """As a block for a shell."""
    lines = [f"vllm serve {folder} --served-model-name {name}"]
    if gguf:
        lines += [f"ollama create {name} -f {folder}/Modelfile && ollama run {name}"]
        lines += [f"llama-server -m {folder}/{gguf[0]}"]
    return "\n".join(lines)


def _template(pieces: Pieces) -> str:
    asked = f"{{{{ .Prompt }}}}{pieces.after}{{{{ .Response }}}}"
    if pieces.before_system is None:
        return f"{pieces.start}{asked}"
    system = f"{pieces.before_system}{{{{ .System }}}}{pieces.after_system}"
    return f"{{{{ if .System }}}}{system}{{{{ else }}}}{pieces.start}{{{{ end }}}}{asked}"


def _unsafe(pieces: Pieces) -> bool:
    """Text that would end the template's quotes or begin a command in it."""
    texts = (pieces.start, pieces.after, pieces.before_system or "", pieces.after_system or "", *pieces.ends)
    return any(mark in text for text in texts for mark in ("{{", '"""')) or any('"' in end for end in pieces.ends)
