"""What the protocols share: the internal form of a request, of a refusal, and what an adapter has to offer.

Invariants
- A request has one internal form, `Ask`: messages and tools in chat form, as `match.normalise` takes them. Session, matching, rendering and the graph
  know no other. An adapter turns a protocol's request into it, and an `Answer` into that protocol's reply.
- An adapter is the inverse of itself: a reply that a harness sends back untouched comes out as the message that was recorded for it.
- Whatever is wrong, the harness is told in its protocol's own form. Each kind of fault is a `Fault`, with one status for all protocols.

No I/O here, and nothing of HTTP but the statuses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec

from gyre.trajectory.match import Message

POLICY: Final = "policy"
"""The model's name, where a harness gives none."""

_TEXT: Final = 200  # characters kept of a parameter that is overruled
_LARGE: Final = 1 << 53

encode: Final = msgspec.json.encode


class Fault(StrEnum):
    """Why a request is not answered."""

    MALFORMED = "malformed"
    UNSUPPORTED = "unsupported"
    CONTEXT_FULL = "context_full"
    TOO_LARGE = "too_large"
    UNKNOWN_URL = "unknown_url"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_RESPONSE = "unknown_response"
    OVER = "over"
    UNAVAILABLE = "unavailable"


STATUS: Final = {
    Fault.MALFORMED: 400,
    Fault.UNSUPPORTED: 400,
    Fault.CONTEXT_FULL: 400,
    Fault.TOO_LARGE: 413,
    Fault.UNKNOWN_URL: 404,
    Fault.UNKNOWN_MODEL: 404,
    Fault.UNKNOWN_RESPONSE: 400,
    Fault.OVER: 410,
    Fault.UNAVAILABLE: 503,
}


class Refusal(Exception):
    """A request that cannot be answered. `n_prompt` and `limit` in tokens, for `CONTEXT_FULL`."""

    def __init__(self, fault: Fault, message: str, n_prompt: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.fault, self.message, self.n_prompt, self.limit = fault, message, n_prompt, limit


class Ask(NamedTuple):
    """A request in the internal form."""

    api: str  # chat | responses | messages
    model: str
    messages: list[Any]
    tools: list[Any] | None
    max_tokens: int | None
    stream: bool
    asked: dict[str, bool | int | float | str]  # sampling parameters it had: the run's hold instead, these are only recorded


class Answer(NamedTuple):
    """A call's reply, for the harness."""

    call_id: str
    message: Message  # chat form, arguments as JSON text
    finish_reason: str  # stop | length | tool_calls
    n_prompt: int
    n_completion: int
    n_reasoning: int  # of the completion's tokens


class Turn(Protocol):
    """One request of one protocol, and how its reply is written."""

    @property
    def ask(self) -> Ask: ...

    def whole(self, answer: Answer) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def waiting(self) -> bytes:
        """What is sent, again and again, while a stream has nothing to say."""
        ...

    def stream(self, answer: Answer) -> bytes:
        """All events of a complete call, behind those that `waiting` gave."""
        ...

    def broken(self, refusal: Refusal) -> bytes:
        """The event of a failure that comes after the first `waiting`."""
        ...


class Dialect(Protocol):
    """One protocol."""

    def read(self, body: bytes) -> Turn:
        """Decode a request. Raises `Refusal`, `UnsupportedContent`."""
        ...

    def count(self, n_tokens: int) -> bytes:
        """The answer to how many tokens a request's prompt has."""
        ...

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """Status and body of an error."""
        ...


def decode(decoder: msgspec.json.Decoder[Any], body: bytes, what: str) -> Any:
    """Decode a body or a part of one, or refuse it as `what` it is not."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise Refusal(Fault.MALFORMED, f"not a {what} request: {e}") from None


class Parts:
    """Parts of a rollout's requests, made into something. Those that were in one of the last three are the same objects again, and not decoded."""

    def __init__(self) -> None:
        self._recent: deque[dict[bytes, tuple[bytes, Any]]] = deque(maxlen=3)

    def read(self, parts: Iterable[msgspec.Raw], make: Callable[[bytes], Any]) -> list[Any]:
        now: dict[bytes, tuple[bytes, Any]] = {}
        out = []
        for part in map(bytes, parts):
            for known in self._recent:
                if (found := known.get(part)) is not None:
                    break
            else:
                found = part, make(part)
            now[found[0]] = found
            out.append(found[1])
        self._recent.appendleft(now)
        return out


_objects: Final = msgspec.json.Decoder(dict[str, Any])
_lists: Final = msgspec.json.Decoder(list[dict[str, Any]] | None)


def read_object(part: bytes) -> Any:
    """A JSON object, as a dict."""
    return decode(_objects, part, "well-formed")


def read_objects(part: bytes) -> Any:
    """A list of JSON objects, empty for null."""
    return decode(_lists, part, "well-formed") or []


def event(payload: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(payload) + b"\n\n"


def overruled(request: Any, names: Iterable[str]) -> dict[str, bool | int | float | str]:
    """The sampling parameters that a request gives, as values for the record: scalars as they are, all else as short JSON text."""
    found = ((name, getattr(request, name)) for name in names)
    return {name: _recorded(value) for name, value in found if value is not None and value is not msgspec.UNSET}


def _recorded(value: Any) -> bool | int | float | str:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < _LARGE) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (dict, list)):
        try:
            return encode(value).decode()[:_TEXT]
        except (RecursionError, ValueError):
            return "nested too deeply"
    return str(value)[:_TEXT] if isinstance(value, (str, float)) else str(type(value).__name__)


class Request(msgspec.Struct, kw_only=True):
    """What requests of all protocols have; `model` is echoed in every chunk."""

    model: Annotated[str, msgspec.Meta(max_length=1024)] = POLICY
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: Any = None
    stream: bool | None = False
    temperature: Any = None
    top_p: Any = None


def make_ask(api: str, request: Request, messages: list[Any], tools: list[Any] | None, sampling: Iterable[str], *limits: int | None) -> Ask:
    """A request in the internal form. `sampling` names the parameters that the run's overrule; the smallest limit of tokens holds."""
    choice = request.tool_choice
    hides = choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")  # in the form of any of the protocols
    return Ask(
        api=api,
        model=request.model,
        messages=messages,
        tools=None if hides else tools or None,
        max_tokens=min((n for n in limits if n is not None and n > 0), default=None),
        stream=bool(request.stream),
        asked=overruled(request, sampling),
    )


def function_tool(name: Any, description: Any, parameters: Any) -> Message:
    """A tool in chat form, as chat templates are written for."""
    function: Message = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


Recall = Callable[[str], str]
"""The reasoning behind a handle that a reply carried, or nothing."""
