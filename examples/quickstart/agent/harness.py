"""A whole coding agent in one file: asks the model, runs its tool calls, shows it what came out.

    python3 -I -S harness.py [--stream]        # inside a sandbox, in the workspace

    GYRE_INSTRUCTION   file with the instruction   (default /run/gyre/instruction.md)
    GYRE_MODEL_SOCKET  Unix socket of the model    (default /run/gyre/model.sock)
    GYRE_MAX_TURNS     model calls at most         (default 4)

It speaks OpenAI chat completions over plain HTTP/1.1 on one connection. It ends with 0 when a reply has no
tool call or the turns are used up, and with 1 and a line on stderr when the model cannot be reached or
refuses.

Standard library only, and little of it: thousands of short rollouts on two cores pay for every import.
`_socket` and `_json` are the C parts of `socket` and `json`; `json` alone imports `re` and `enum`, and takes
12 of 30 ms.
"""

# ruff: noqa: PTH123
from __future__ import annotations

import _json
import _socket
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SYSTEM = "You are a coding agent. Tools: bash(cmd), write_file(path, content)."
OUTPUT_CHARS = 200
COMMAND_S = 2.0
SIGKILL = 9
REPLY_BYTES = 1 << 24
MALFORMED = "error: malformed tool call"


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {p: {"type": "string"} for p in parameters},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [_tool("bash", "cmd"), _tool("write_file", "path", "content")]


class _Scanner:
    """What `_json.make_scanner` asks for."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant = float, int, float


_scan = _json.make_scanner(_Scanner())  # type: ignore[arg-type]


def loads(text: str) -> Any:
    """As json.loads."""
    text = text.strip()
    try:
        value, end = _scan(text, 0)
    except (StopIteration, SystemError):  # SystemError: before Python 3.12 it needs `json` loaded to say why
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("text after JSON")
    return value


def dumps(value: object) -> str:
    """As json.dumps, for what messages consist of."""
    if isinstance(value, str):
        return str(_json.encode_basestring_ascii(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dumps(str(k))}: {dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(dumps, value)) + "]"
    for constant, text in ((None, "null"), (True, "true"), (False, "false")):
        if value is constant:
            return text
    return repr(value)


class ModelError(Exception):
    """The model's endpoint could not be used; the text is for the user."""


class Endpoint:
    """One keep-alive HTTP/1.1 connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self.socket.connect(path)
        self.buffer = b""

    def _more(self) -> bool:
        piece = self.socket.recv(65536)
        self.buffer += piece
        if len(self.buffer) > REPLY_BYTES:
            raise ModelError("reply is too long")
        return bool(piece)

    def _line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            if not self._more():
                raise ModelError("connection closed inside a reply")
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            if not self._more():
                raise ModelError("connection closed inside a reply")
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def _body(self, headers: dict[bytes, bytes]) -> bytes:
        if b"content-length" in headers:
            return self._exactly(int(headers[b"content-length"]))
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            chunks = []
            while size := int(self._line().split(b";")[0], 16):
                chunks.append(self._exactly(size))
                self._line()
            while self._line():  # trailers
                pass
            return b"".join(chunks)
        while self._more():  # neither: the body ends with the connection
            pass
        data, self.buffer = self.buffer, b""
        return data

    def post(self, path: str, payload: dict[str, Any]) -> bytes:
        """The body of a 200 reply to a JSON request."""
        body = dumps(payload).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: model\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        status = self._line().split(None, 2)
        headers = {}
        while line := self._line():
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        answer = self._body(headers)
        if len(status) < 2 or status[1] != b"200":
            raise ModelError(f"HTTP {b' '.join(status[1:]).decode('latin-1')}: {answer[:200].decode('utf-8', 'replace')}")
        return answer


def from_stream(body: bytes) -> dict[str, Any]:
    """The assistant message that a stream of server-sent events adds up to."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for line in body.decode().splitlines():
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            continue
        for choice in loads(line[5:]).get("choices", []):
            delta = choice.get("delta", {})
            content.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part.get("index", 0), {"type": "function", "function": {"name": "", "arguments": ""}})
                if part.get("id"):
                    call["id"] = part["id"]
                for key, value in (part.get("function") or {}).items():
                    call["function"][key] += value or ""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content) or None}
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return message


def ask(endpoint: Endpoint, messages: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
    """The model's next message, as it was received."""
    payload: dict[str, Any] = {"model": "policy", "messages": messages, "tools": TOOLS}
    if stream:
        return from_stream(endpoint.post("/v1/chat/completions", {**payload, "stream": True}))
    reply = loads(endpoint.post("/v1/chat/completions", payload).decode())
    message: dict[str, Any] = reply["choices"][0]["message"]
    return message


def bash(cmd: str) -> str:
    """Output of a shell command in the current directory; it and its children end after COMMAND_S."""
    back, out = os.pipe()
    pid = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", cmd],
        os.environ,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, out, 2),
        ],
    )
    os.close(out)
    deadline, text, late = time.monotonic() + COMMAND_S, b"", False
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([back], [], [], left)[0]:
            late = True
            break
        piece = os.read(back, 65536)
        if not piece:
            break
        text = (text + piece)[: 4 * OUTPUT_CHARS]
    os.close(back)
    if late:
        os.killpg(pid, SIGKILL)
    os.waitpid(pid, 0)
    shown = text.decode("utf-8", "replace")[:OUTPUT_CHARS].strip()
    return "error: took too long" if late else shown or "ok"


def write_file(path: str, content: str) -> str:
    with open(path, "w", encoding="utf-8") as f:
        f.write(content)
    return "ok"


def use_tool(name: str, arguments: object) -> str:
    """The text that the model is shown for one call; every mistake of the model becomes a text too."""
    wanted = {"bash": ["cmd"], "write_file": ["content", "path"]}.get(name)
    if wanted is None:
        return "error: no such tool"
    if not isinstance(arguments, dict) or sorted(arguments) != wanted or not all(isinstance(v, str) for v in arguments.values()):
        return MALFORMED
    try:
        return bash(**arguments) if name == "bash" else write_file(**arguments)
    except (OSError, ValueError) as error:
        return "error: " + type(error).__name__


def answers(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What to tell the model after its message; empty when it has finished."""
    told: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or []:
        try:
            name, arguments = call["function"]["name"], loads(call["function"]["arguments"])
        except (KeyError, TypeError, ValueError):
            name, arguments = "bash", None  # use_tool says that it is malformed
        told.append({"role": "tool", "tool_call_id": call.get("id"), "content": use_tool(name, arguments)})
    if not told and "<tool_call>" in (message.get("content") or ""):
        told.append({"role": "user", "content": MALFORMED})
    return told


def main(argv: list[str]) -> int:
    env = os.environ.get
    try:
        with open(env("GYRE_INSTRUCTION", "/run/gyre/instruction.md"), encoding="utf-8") as f:
            instruction = f.read().strip()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
        endpoint = Endpoint(env("GYRE_MODEL_SOCKET", "/run/gyre/model.sock"))
        for _ in range(int(env("GYRE_MAX_TURNS", "4"))):
            message = ask(endpoint, messages, stream="--stream" in argv)
            told = answers(message)
            if not told:
                break
            messages += [message, *told]
    except (ModelError, OSError, ValueError, LookupError, TypeError) as error:
        print(f"harness: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
