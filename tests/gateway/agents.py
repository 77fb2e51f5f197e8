"""Harnesses of the three protocols as plain bytes: what they send, and how they take a reply into their history. `clients` are the official ones.

`Stepped` stands where the router does, for tests of a session alone.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Completion, Job
from gyre.sandbox.gateway.session import Limits, Session
from gyre.types import Purpose, Sampling, Ticket, Version

SYSTEM = "You are a coding agent."
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
Spell = Callable[[Any], str]
"""How a harness writes arguments that it parsed."""


class Said(NamedTuple):
    """A reply as the harness sees it: calls are (id, name, arguments)."""

    text: str
    calls: list[tuple[str, str, Any]]
    usage: tuple[int, int]


class Chat:
    """Chat completions, with reasoning echoed."""

    path, history_key, api = "/v1/chat/completions", "messages", "chat"

    def __init__(self, system: str = SYSTEM, tools: tuple[str, ...] = ("bash",)) -> None:
        self.system = system
        self.tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in tools]
        self.history: list[Any] = []

    def body(self, **more: Any) -> bytes:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return json.dumps({"model": "m", "messages": system + self.history, "tools": self.tools or None, **more}).encode()

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def assistant(self, text: str) -> None:
        self.history.append({"role": "assistant", "content": text})

    def tool(self, call_id: str, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def take(self, body: bytes, spell: Spell = json.dumps) -> Said:
        answer = json.loads(body)
        message = answer["choices"][0]["message"]
        calls = [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
        for call, (_, _, arguments) in zip(message.get("tool_calls", ()), calls, strict=True):
            call["function"]["arguments"] = spell(arguments)
        self.history.append(message)
        return Said(message["content"] or "", calls, (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]))

    def rename(self, at: int, name: str) -> None:
        """The tool of the reply at a place of the history, under the same call id."""
        self.history[at]["tool_calls"][0]["function"]["name"] = name


class Responses:
    """Responses, with the whole input each time, and reasoning as its handle alone."""

    path, history_key, api = "/v1/responses", "input", "responses"
    assistant, user = Chat.assistant, Chat.user

    def __init__(self, system: str = SYSTEM, tools: tuple[str, ...] = ("bash",)) -> None:
        self.system = system
        self.tools = [{"type": "function", "name": n, "parameters": SCHEMA} for n in tools]
        self.history: list[Any] = []

    def body(self, **more: Any) -> bytes:
        rest = {"instructions": self.system or None, "input": self.history, "tools": self.tools or None, "store": False}
        return json.dumps({"model": "m", **rest, **more}).encode()

    def tool(self, call_id: str, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def take(self, body: bytes, spell: Spell = json.dumps) -> Said:
        answer = json.loads(body)
        text, calls = "", []
        for item in answer["output"]:
            if item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
                item["arguments"] = spell(calls[-1][2])
            elif item["type"] == "reasoning":
                del item["content"]
            else:
                text += item["content"][0]["text"]
        self.history += answer["output"]
        return Said(text, calls, (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]))

    def rename(self, at: int, name: str) -> None:
        next(item for item in self.history[at:] if item.get("type") == "function_call")["name"] = name


class Messages:
    """Messages, without thinking; outputs of tools and what the user adds are one turn."""

    path, history_key, api = "/v1/messages", "messages", "messages"
    assistant = Chat.assistant

    def __init__(self, system: str = SYSTEM, tools: tuple[str, ...] = ("bash",)) -> None:
        self.system = system
        self.tools = [{"name": n, "input_schema": SCHEMA} for n in tools]
        self.history: list[Any] = []

    def body(self, **more: Any) -> bytes:
        rest = {"system": self.system or None, "messages": self.history, "tools": self.tools or None, "max_tokens": 4096}
        return json.dumps({"model": "m", **rest, **more}).encode()

    def user(self, text: str) -> None:
        self._add({"type": "text", "text": text})

    def tool(self, call_id: str, text: str) -> None:
        self._add({"type": "tool_result", "tool_use_id": call_id, "content": text})

    def _add(self, block: dict[str, Any]) -> None:
        if self.history and self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})

    def take(self, body: bytes, spell: Spell = json.dumps) -> Said:
        answer = json.loads(body)
        blocks = answer["content"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(spell(block["input"]))
        self.history.append({"role": "assistant", "content": blocks})
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        return Said(text, calls, (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]))

    def rename(self, at: int, name: str) -> None:
        next(b for b in self.history[at]["content"] if b["type"] == "tool_use")["name"] = name


AGENTS = (Chat, Responses, Messages)


class Stepped:
    """Says what it was given, and notes the prompts."""

    def __init__(self, says: Callable[[Job], array[int]]) -> None:
        self.says = says
        self.jobs: list[tuple[array[int], array[int]]] = []

    async def generate(self, job: Job) -> Completion:
        ids = self.says(job)
        self.jobs.append((job.prompt, ids))
        return Completion(ids, array("f", [-0.5] * len(ids)), array("i", [0] * len(ids)), "stop", ["c"])


def open_session(renderer: Renderer, router: Any, max_tokens: int = 4096) -> Session:
    """A session without limits that matter."""
    ticket = Ticket("q/0/0", 0, "q/0", "q", 0, "/task", Purpose.TRAIN, Version(1, 0), 7, 30.0)
    return Session(ticket, renderer, router, Limits(Sampling(max_tokens=max_tokens), 1 << 21, 1000, 100, time.monotonic() + 600))
