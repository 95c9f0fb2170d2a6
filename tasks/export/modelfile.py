"""The Modelfile with which Ollama serves an exported GGUF file."""

from training.models.chat import ChatPieces


def modelfile(gguf: str, pieces: ChatPieces | None) -> str:
    lines = [f"FROM ./{gguf}"]
    if pieces and not _unsafe(pieces):
        lines += [f'TEMPLATE """{_template(pieces)}"""']
        lines += [f'PARAMETER stop "{end}"' for end in pieces.ends]
    else:
        lines += ["# The chat template could not be put into Ollama's words: the one in the GGUF file applies."]
    return "\n".join(lines) + "\n"


def _template(pieces: ChatPieces) -> str:
    """The chat template in Ollama's syntax."""
    exchange = f"{{{{ .Prompt }}}}{pieces.after}{{{{ .Response }}}}"
    if pieces.before_system is None:
        return f"{pieces.start}{exchange}"
    system = f"{pieces.before_system}{{{{ .System }}}}{pieces.after_system}"
    return f"{{{{ if .System }}}}{system}{{{{ else }}}}{pieces.start}{{{{ end }}}}{exchange}"


def _unsafe(pieces: ChatPieces) -> bool:
    """Whether a text would close the template's quotes or start a command in it."""
    texts = (pieces.start, pieces.after, pieces.before_system or "", pieces.after_system or "", *pieces.ends)
    return any(mark in text for text in texts for mark in ("{{", '"""')) or any('"' in end for end in pieces.ends)
