"""What the gateway accepts: the part of OpenAI's chat completions that both engines honour, and feedback.

An unknown or unsupported field is an error: it would have no effect. null means absent, as OpenAI defines it.
"""

from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.errors import problems
from tasks.feedback.events import Id, OtherId, User

LARGEST_BODY = 2**20  # bytes
Count = Annotated[int, Field(ge=1)]
T = TypeVar("T", bound=BaseModel)


class TooLong(HTTPException):
    code = "context_length_exceeded"  # OpenAI's


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, content: Any) -> Any:
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


class TextPart(Input):
    type: Literal["text"]
    text: str


class Message(Input):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        parts = self.content if isinstance(self.content, list) else [TextPart(type="text", text=self.content)]
        return {"role": self.role, "content": "\n".join(part.text for part in parts)}


class ChatRequest(Input):
    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}  # usage is always sent
    n: Literal[1] = 1
    user: User = ""

    def parameters(self, most_tokens: int, prompt: int, context: int | None) -> dict[str, Any]:
        """The parameters of generation, all of them explicit. `prompt` and `context` are numbers of tokens."""
        asked = self.max_completion_tokens or self.max_tokens
        if asked and asked > most_tokens:
            raise HTTPException(400, f"max_tokens is {asked}, and this server allows {most_tokens}.")
        room = most_tokens if context is None else context - prompt
        if room < (asked or 1):
            wanted = f" and max_tokens asks for {asked}" if asked else ""
            raise TooLong(400, f"The messages have {prompt} tokens{wanted}, and the model's context {context}.")
        seed = {} if self.seed is None else {"seed": self.seed}
        sampling = {"temperature": self.temperature, "top_p": self.top_p, **seed}
        return {"max_tokens": asked or min(most_tokens, room), **sampling}


class FeedbackRequest(Input):
    answer_id: Id
    kind: Literal["thumb", "edit", "preference"]
    value: str
    other: OtherId = ""
    user: User = ""


async def read_body(request: Request, schema: type[T]) -> T:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, f"The request is larger than {LARGEST_BODY:,} bytes.")
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(400, problems(error.errors())) from None
