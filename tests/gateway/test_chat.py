"""The endpoint as harnesses see it: protocol, limits, typed errors."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from gyre.sandbox.gateway.parse import Reasoning, parse
from gyre.types import CallStatus, Ending, Sampling

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def nested(n: int) -> bytes:
    return b"[" * n + b"]" * n


def test_completion_and_usage(gateway: Any, renderer: Any, sampled: Any) -> None:
    ids = renderer.template.tokenizer.encode("hello").ids

    async def run() -> None:
        async with gateway(lambda r, p: sampled([*ids, renderer.end_id])) as g:
            client = await g.connect()
            status, body = await client.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": MESSAGES}).encode())
            reply = json.loads(body)
            assert (status, reply["object"], reply["model"]) == (200, "chat.completion", "m")
            choice = reply["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": "hello"} and choice["finish_reason"] == "stop"
            n_prompt = len(g.engines[0].prompts[g.engines[0].requests[0].request_id])
            n = len(ids) + 1
            usage = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
            assert reply["usage"] == {**usage, "completion_tokens_details": {"reasoning_tokens": 0}}
            status, body = await client.request("GET", "/v1/models")
            assert [m["id"] for m in json.loads(body)["data"]] == ["policy"]

    asyncio.run(run())


def test_stream_with_keep_alives_and_usage(gateway: Any, renderer: Any, sampled: Any) -> None:
    text = '<think>\nhm\n</think>\n\nso <tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
    ids = [*renderer.template.tokenizer.encode(text).ids, renderer.end_id]

    async def run() -> None:
        async with gateway(lambda r, p: sampled(ids, delay_s=0.5), keep_alive_s=0.05) as g:
            client = await g.connect()
            payload = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
            status, body = await client.request("POST", "/v1/chat/completions", json.dumps(payload).encode())
            assert status == 200 and body.startswith(b": keep-alive\n\n") and body.endswith(b"data: [DONE]\n\n")
            chunks = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line.startswith("data: {")]
            assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
            assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
                {"role": "assistant", "content": ""},
                {"reasoning_content": "hm"},
                {"content": "so"},
                {"tool_calls": [{"index": 0, "id": "call_c1_0", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}]},
                {},
            ]
            assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 4 + ["tool_calls"]
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(ids)

    asyncio.run(run())


def test_a_stream_dropped_after_a_keep_alive_is_aborted(gateway: Any, sampled: Any, until: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([5, 6, 7], delay_s=60.0), keep_alive_s=0.05) as g:
            client = await g.connect()
            client.send("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES, "stream": True}).encode())
            await client.reader.readuntil(b": keep-alive")
            client.close()
            await until(lambda: g.engines[0].aborted)
            (call,) = (await g.close()).calls
            assert (call.status, call.n_completion) == (CallStatus.ABORTED, 2)

    asyncio.run(run())


def test_a_failure_after_a_keep_alive_is_an_event(gateway: Any, sampled: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([], refuse="full"), keep_alive_s=0.05, deadline=time.monotonic() + 0.5) as g:
            client = await g.connect()
            status, body = await client.request("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES, "stream": True}).encode())
            assert status == 200 and b"[DONE]" not in body
            error = json.loads(body.rpartition(b"data: ")[2])["error"]
            assert error["code"] == "unavailable" and "gave up after" in error["message"]

    asyncio.run(run())


@pytest.mark.pain(38)
def test_a_prompt_too_long_is_a_typed_error(gateway: Any, renderer: Any, sampled: Any) -> None:
    """pains 38."""

    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id]), context=60) as g:
            client = await g.connect()
            for stream in (False, True):
                status, error = await client.chat([{"role": "user", "content": "x y " * 100}], stream=stream)
                assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
            assert g.session.context_full and not g.engines[0].requests
            assert (await client.chat(MESSAGES))[0] == 200
            assert not g.session.context_full

    asyncio.run(run())


@pytest.mark.pain(38)
def test_the_engines_own_limit_is_the_same_error(gateway: Any, sampled: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([], refuse="context")) as g:
            client = await g.connect()
            status, error = await client.chat(MESSAGES)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert g.session.context_full and not g.session.ending.done()

    asyncio.run(run())


def test_turn_limit(gateway: Any, renderer: Any, sampled: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id]), max_turns=2) as g:
            client = await g.connect()
            assert [(await client.chat(MESSAGES))[0] for _ in range(4)] == [200, 200, 410, 410]
            assert g.session.ending.result()[0] is Ending.TURN_LIMIT
            assert len((await g.close()).calls) == 2

    asyncio.run(run())


def test_the_runs_sampling_wins(gateway: Any, renderer: Any, sampled: Any) -> None:
    async def run() -> None:
        sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=64)
        async with gateway(lambda r, p: sampled([renderer.end_id]), sampling=sampling) as g:
            client = await g.connect()
            await client.chat(MESSAGES, temperature=0, top_p=0.1, max_tokens=1000)
            await client.chat(MESSAGES, max_completion_tokens=8)
            assert [r.sampling.max_tokens for r in g.engines[0].requests] == [64, 8]
            assert {r.sampling.temperature for r in g.engines[0].requests} == {0.7}
            assert len({r.seed for r in g.engines[0].requests}) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"messages": 3}', 400),
        (b'{"messages": []}', 400),
        (b'{"messages": [{"content": "no role"}]}', 400),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "extra": 1}', 200),
        (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": "%s"}' % (b"m" * 2000), 400),
    ],
)
def test_bad_requests(gateway: Any, renderer: Any, sampled: Any, body: bytes, status: int) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id])) as g:
            client = await g.connect()
            got, answer = await client.request("POST", "/v1/chat/completions", body)
            assert got == status, answer
            assert status == 200 or set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
            for method, path in (("GET", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("GET", "/")):
                assert (await client.request(method, path))[0] == 404

    asyncio.run(run())


@pytest.mark.parametrize("n", [200, 850, 900, 940, 960, 980, 20_000])
def test_deep_json_is_no_bug(gateway: Any, renderer: Any, sampled: Any, n: int) -> None:
    """Whatever an agent may send: a fault of the gateway would end the run. The fixture looks for one."""
    deep = nested(n).decode()
    user = '{"messages": [{"role": "user", "content": "x"}], FIELD}'
    fields = ['"tools": [{"a": DEEP}]', '"tool_choice": DEEP']
    assistant = '{"messages": [{"role": "assistant", "tool_calls": [CALL]}]}'
    calls = ['{"id": DEEP, "function": {"name": "f"}}', '{"function": {"name": "f", "arguments": DEEP}}']
    bodies = [user.replace("FIELD", f) for f in fields] + [assistant.replace("CALL", c) for c in calls]

    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id])) as g:
            client = await g.connect()
            for body in bodies:
                status, _ = await client.request("POST", "/v1/chat/completions", body.replace("DEEP", deep).encode())
                assert status in (200, 400)
            assert status == 400
            echoed = bodies[3].replace("DEEP", f'"{deep}"')  # malformed arguments stay as they are
            assert (await client.request("POST", "/v1/chat/completions", echoed.encode()))[0] == 200

    asyncio.run(run())


def test_a_head_request_gets_no_body(gateway: Any, renderer: Any, sampled: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id])) as g:
            client = await g.connect()
            client.writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: m\r\n\r\nnonsense\r\n\r\n")
            answers = (await client.reader.read()).split(b"HTTP/1.1 ")
            assert [a[:3] for a in answers] == [b"", b"404", b"400"] and answers[1].endswith(b"\r\n\r\n")

    asyncio.run(run())


def test_open_bodies_together_are_bounded(gateway: Any, renderer: Any, sampled: Any) -> None:
    """Or an agent could fill this process's memory through many connections."""

    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id])) as g:
            clients = [await g.connect() for _ in range(3)]
            for client in clients:
                client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nContent-Length: 16000000\r\n\r\n" + b" " * 15_000_000)
            refused = [asyncio.ensure_future(c.reader.readline()) for c in clients]
            done, waiting = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
            assert [b"413" in d.result() for d in done] == [True] and len(waiting) == 2
            for client in clients:
                client.close()
            await asyncio.wait(refused)
            assert (await (await g.connect()).chat(MESSAGES))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "user", "content": "x" * 3_000_000}]},
        {"messages": [{}] * 2000},
        {"messages": MESSAGES, "tools": [{"x": "x" * 3_000_000}]},
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(gateway: Any, renderer: Any, sampled: Any, request_: dict[str, Any]) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id]), context=1000) as g:
            status, error = await (await g.connect()).chat(**request_)
            assert (status, error["code"]) == (400, "context_length_exceeded") and g.session.context_full

    asyncio.run(run())


def test_a_call_that_was_complete_when_its_caller_went_is_aborted_too(gateway: Any, sampled: Any, until: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([5, 6, 7], delay_s=60.0, when_aborted="stop")) as g:
            client = await g.connect()
            client.send("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES}).encode())
            await until(lambda: g.engines[0].requests)
            client.close()
            await until(lambda: g.engines[0].aborted)
            outcome = await g.close()
            assert [c.status for c in outcome.calls] == [CallStatus.ABORTED] and not outcome.trajectories

    asyncio.run(run())


def test_http_limits(gateway: Any, renderer: Any, sampled: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id])) as g:
            client = await g.connect()
            assert (await client.request("POST", "/v1/chat/completions", b"x" * ((1 << 24) + 1)))[0] == 413
            client = await g.connect()
            client.writer.write(b"nonsense\r\n\r\n")
            assert b"400" in await client.reader.readline()
            for ends in (b"", b"\r\n"):
                client = await g.connect()
                client.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: m\r\n" + b"a:\r\n" * 1000 + ends)
                assert b"431" in await client.reader.readline()
            client = await g.connect()
            body = json.dumps({"messages": MESSAGES}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.writer.write((head + body) * 2)  # pipelined
            for _ in range(2):
                status, *headers = (await client.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                assert status.startswith(b"HTTP/1.1 200")
                (length,) = [int(h.split(b":")[1]) for h in headers if h.lower().startswith(b"content-length")]
                await client.reader.readexactly(length)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", {"content": "plain"}),
        ("", {"content": ""}),
        ("<think>\na\n</think>\n\nb", {"content": "b", "reasoning_content": "a"}),
        ("<think>\ncut", {"content": "", "reasoning_content": "cut"}),
        ("<tool_call>\n{broken}\n</tool_call>", {"content": "<tool_call>\n{broken}\n</tool_call>"}),
        ('<tool_call>{"name": "f", "arguments": {}}', {"content": '<tool_call>{"name": "f", "arguments": {}}'}),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', {"content": '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'}),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',) * 2,
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',) * 2,
        ('<tool_call>{"name": "f", "arguments": {"a": DEEP}}</tool_call>'.replace("DEEP", nested(200).decode()),) * 2,
        (
            'a<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            {"content": "a", "tool_calls": [("p_0", "f", '{"x": "</tool_call>"}'), ("p_1", "g", "{}")]},
        ),
        (
            '<tool_call>oops</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
            {"content": "<tool_call>oops</tool_call>", "tool_calls": [("p_0", "g", "{}")]},
        ),
    ],
)  # fmt: skip
def test_parse(text: str, expected: Any) -> None:
    got = parse(text, "p", offered={})
    expected = {"content": expected} if isinstance(expected, str) else expected
    assert got.pop("role") == "assistant"
    if "tool_calls" in got:
        got["tool_calls"] = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in got["tool_calls"]]
    assert got == expected


def test_parse_inside_reasoning() -> None:
    assert parse("because\n</think>\n\nso", "p", reasoning=Reasoning.OPENED) == {"role": "assistant", "content": "so", "reasoning_content": "because"}
