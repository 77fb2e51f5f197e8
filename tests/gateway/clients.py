"""Harnesses of three kinds, made of the official clients, over a gateway's Unix socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai

SYSTEM = "You are a coding agent."
PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}


class Reply:
    def __init__(self, text: str, reasoning: str, calls: list[tuple[str, str, Any]], usage: tuple[int, int], stop: str) -> None:
        self.text, self.reasoning, self.calls, self.usage, self.stop = text, reasoning, calls, usage, stop


OPEN: list[httpx2.AsyncClient] = []


def http(g: Any) -> httpx2.AsyncClient:
    OPEN.append(httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(g.socket)), timeout=60))
    return OPEN[-1]


def rewritten(arguments: str) -> str:
    """As harnesses write them anew: other white space, whole numbers as integers."""
    return json.dumps({k: int(v) if isinstance(v, float) else v for k, v in json.loads(arguments).items()}, indent=1)


def shortcut(asked: dict[str, Any], history: str, raw: bool) -> dict[str, Any]:
    """Long histories pass by the client's own conversion of requests, which takes seconds."""
    return {**asked, history: [], "extra_body": {history: asked[history]}} if raw else asked


class Chat:
    """A harness on chat completions."""

    def __init__(self, g: Any, stream: bool, tools: bool = True, raw: bool = False) -> None:
        self.raw = raw
        self.client = openai.AsyncOpenAI(api_key="k", base_url="http://model/v1", http_client=http(g), max_retries=0)
        self.stream = stream
        self.messages: list[Any] = [{"role": "developer", "content": SYSTEM}]
        tool = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}
        self.more: dict[str, Any] = {"tools": [tool]} if tools else {}

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def tool(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": text}]})

    async def turn(self, **more: Any) -> Reply:
        asked = {"model": "m", "messages": self.messages, **self.more, **more}
        asked = shortcut(asked, "messages", self.raw)
        if self.stream:
            async with self.client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                done = await events.get_final_completion()
        else:
            done = await self.client.chat.completions.create(**asked)
        choice = done.choices[0]
        message = choice.message
        echo: dict[str, Any] = {"role": "assistant", "content": message.content}
        if reasoning := getattr(message, "reasoning_content", None):
            echo["reasoning_content"] = reasoning
        calls = message.tool_calls or []
        if calls:
            echo["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": rewritten(c.function.arguments)}} for c in calls
            ]
        self.messages.append(echo)
        return Reply(
            message.content or "",
            reasoning or "",
            [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls],
            (done.usage.prompt_tokens, done.usage.completion_tokens),
            choice.finish_reason,
        )


class Responses:
    """A harness on responses, which sends its whole input each time."""

    def __init__(self, g: Any, stream: bool, tools: bool = True, raw: bool = False) -> None:
        self.raw = raw
        self.client = openai.AsyncOpenAI(api_key="k", base_url="http://model/v1", http_client=http(g), max_retries=0)
        self.stream = stream
        self.input: list[Any] = []
        tool = {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}
        self.more: dict[str, Any] = {"tools": [tool]} if tools else {}

    def user(self, text: str) -> None:
        self.input.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def tool(self, call_id: str, text: str) -> None:
        self.input.append({"type": "function_call_output", "call_id": call_id, "output": text})

    async def turn(self, **more: Any) -> Reply:
        asked = {"model": "m", "instructions": SYSTEM, "input": self.input, "store": False, **self.more, **more}
        asked = shortcut(asked, "input", self.raw)
        if self.stream:
            async with self.client.responses.stream(**asked) as events:
                kinds = [e.type async for e in events]
                done = await events.get_final_response()
                assert kinds[0] == "response.created" and kinds[-1] == f"response.{done.status}"
        else:
            done = await self.client.responses.create(**asked)
        reasoning, calls = "", []
        for item in done.output:
            echo = item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            if item.type == "reasoning":
                reasoning = item.content[0].text
                del echo["content"]  # the opaque part alone comes back
            elif item.type == "function_call":
                calls.append((item.call_id, item.name, json.loads(item.arguments)))
                echo["arguments"] = rewritten(item.arguments)
            elif item.type == "message":
                echo["content"] = [{"type": "output_text", "text": c.text} for c in item.content]
            self.input.append(echo)
        stop = done.incomplete_details.reason if done.incomplete_details else done.status
        return Reply(done.output_text, reasoning, calls, (done.usage.input_tokens, done.usage.output_tokens), stop)


class Messages:
    """A harness on Anthropic's messages, which moves its cache marker and drops the thinking of all but its last reply."""

    def __init__(self, g: Any, stream: bool, tools: bool = True, raw: bool = False) -> None:
        self.raw = raw
        self.client = anthropic.AsyncAnthropic(api_key="k", base_url="http://model", http_client=http(g), max_retries=0)
        self.stream = stream
        self.messages: list[Any] = []
        self.more: dict[str, Any] = {"tools": [{"name": "bash", "input_schema": PARAMETERS}]} if tools else {}

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def tool(self, call_id: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}
        if self.messages[-1]["role"] == "user":
            self.messages[-1]["content"].append(block)
        else:
            self.messages.append({"role": "user", "content": [block]})

    async def turn(self, **more: Any) -> Reply:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        asked = {"model": "m", "max_tokens": 4096, "system": system, "messages": self.messages, "thinking": thinking, **self.more, **more}
        asked = shortcut(asked, "messages", self.raw)
        if self.stream:
            async with self.client.messages.stream(**asked) as events:
                done = await events.get_final_message()
        else:
            done = await self.client.messages.create(**asked)
        for message in self.messages:
            if message["role"] == "assistant":
                message["content"] = [b for b in message["content"] if b["type"] != "thinking"]
        self.messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in done.content]})
        return Reply(
            "".join(b.text for b in done.content if b.type == "text"),
            "".join(b.thinking for b in done.content if b.type == "thinking"),
            [(b.id, b.name, b.input) for b in done.content if b.type == "tool_use"],
            (done.usage.input_tokens, done.usage.output_tokens),
            done.stop_reason,
        )


def story(run: Callable[[], Any]) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(120):
                await run()
        finally:
            while OPEN:
                await OPEN.pop().aclose()

    asyncio.run(bounded())
