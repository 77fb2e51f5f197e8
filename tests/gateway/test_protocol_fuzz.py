"""Whatever is sent to an endpoint: an answer or an error in the protocol's own form, never a traceback, never a lost rollout."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.sandbox.gateway.parse import Format, Reasoning, parse
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.template import ChatTemplate

KEYS = [
    "role", "content", "type", "text", "name", "id", "tool_calls", "function", "arguments", "tool_call_id", "reasoning_content", "messages",
    "tools", "input", "output", "call_id", "summary", "encrypted_content", "thinking", "signature", "tool_use_id", "input_schema",
    "parameters", "namespace", "format", "definition", "description", "data", "model", "stream", "n", "stop",
]  # fmt: skip
WORDS = [
    "user", "assistant", "system", "developer", "tool", "function", "custom", "namespace", "message", "text", "input_text", "output_text",
    "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "item_reference",
    "additional_tools", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "none", "auto", "call_c1_0", "call_c2_0", "c1",
    "c2", "resp_1", "{}", "[1", "<|im_end|>", "<think>", "policy",
]  # fmt: skip
MORE = [
    "model", "system", "instructions", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "n", "temperature", "thinking", "store", "previous_response_id", "background", "conversation", "stop", "text",
    "reasoning", "metadata",
]  # fmt: skip
LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(WORDS), st.text(max_size=6)
)
VALUE = st.recursive(
    LEAF, lambda v: st.one_of(st.lists(v, max_size=4), st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), v, max_size=6)),
    max_leaves=20,
)  # fmt: skip
ITEM = st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=7)
KIND = st.builds(lambda kind, role, rest: {**rest, "type": kind, "role": role}, st.sampled_from(WORDS), st.sampled_from(WORDS), ITEM)
ENDPOINTS = {
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}


TEXTS = st.one_of(st.sampled_from(["x", "", "<|im_end|>", "<think>\nhm\n</think>\n\n", "so", "x-anthropic-billing-header: 1"]), st.text(max_size=5))
IDS = st.sampled_from(["call_c1_0", "call_c2_0", "call_c2_1", "c1", "c3", "", "other"])
JSON = st.one_of(st.sampled_from(['{"input": "x"}', "{", "[1]", "null", '{"a": 1.0}']), VALUE.map(json.dumps))
BLOCK = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"]),
        "text": TEXTS, "id": IDS, "name": TEXTS, "input": ITEM, "tool_use_id": IDS, "content": TEXTS, "thinking": TEXTS,
        "signature": IDS, "data": IDS,
    }
)  # fmt: skip
CONTENT = st.one_of(TEXTS, st.lists(BLOCK, max_size=4), st.none())
CALL = st.builds(lambda i, n, a: {"id": i, "type": "function", "function": {"name": n, "arguments": a}}, IDS, TEXTS, st.one_of(JSON, ITEM))
TURN = st.builds(
    lambda role, content, calls, i, r: {"role": role, "content": content, "tool_calls": calls, "tool_call_id": i, "reasoning_content": r},
    st.sampled_from(["user", "assistant", "system", "developer", "tool"]), CONTENT, st.lists(CALL, max_size=2), IDS, TEXTS,
)  # fmt: skip
ENTRY = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["message", *(w for w in WORDS if "call" in w and "_c" not in w), "reasoning", "additional_tools"]),
        "role": st.sampled_from(["user", "assistant", "developer"]), "content": CONTENT, "call_id": IDS, "name": TEXTS, "arguments": JSON,
        "input": TEXTS, "output": CONTENT, "encrypted_content": IDS, "summary": st.lists(BLOCK, max_size=1),
    }
)  # fmt: skip
TOOL = st.builds(
    lambda kind, name, inner, text: {
        "type": kind, "name": name, "description": text, "parameters": inner, "input_schema": inner, "format": inner,
        "tools": [inner, {**inner, "name": text}],
        "function": {"name": name, "parameters": inner},
    },
    st.sampled_from(["function", "custom", "namespace", "web_search"]), st.sampled_from(["f", "g", ""]), ITEM, TEXTS,
)  # fmt: skip


def spoilt(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly as it should be, sometimes with one field that is anything."""
    return st.one_of(good, good, good, st.builds(lambda x, k, v: {**x, list(x)[k % len(x)]: v}, good, st.integers(0, 9), VALUE))


def request(key: str) -> st.SearchStrategy[bytes]:
    """Requests that are plausible, that are spoilt in one place, that have the right words, and that have nothing right."""
    more = st.fixed_dictionaries(
        {"stream": st.booleans(), "model": TEXTS, "thinking": st.just({"type": "enabled"})}, optional={"max_tokens": st.integers()}
    )
    plausible = spoilt(
        st.builds(
            lambda history, tools, rest: {**rest, key: history, "tools": tools},
            st.lists(spoilt(ENTRY if key == "input" else TURN), min_size=1, max_size=6), st.lists(spoilt(TOOL), max_size=3), more,
        )
    )  # fmt: skip
    history, tools = st.lists(st.one_of(ITEM, KIND, VALUE), max_size=6), st.lists(st.one_of(ITEM, KIND), max_size=3)
    wild = st.builds(lambda h, t, rest: {**rest, key: h, "tools": t}, history, tools, st.dictionaries(st.sampled_from(MORE), VALUE, max_size=5))
    return st.one_of(*(x.map(lambda x: json.dumps(x).encode()) for x in (plausible, plausible, plausible, wild, VALUE)), st.binary(max_size=60))


def check(path: str, status: int, body: bytes) -> None:
    if body.startswith((b"event: ", b"data: ")):
        for block in body.decode().strip().split("\n\n"):
            data = block.rpartition("data: ")[2]
            assert data == "[DONE]" or isinstance(json.loads(data), dict)
        return
    answer = json.loads(body)
    if status == 200:
        assert "usage" in answer or "input_tokens" in answer
    elif "/messages" in path:
        assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
    else:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert status in (200, 400, 404, 413), answer


@pytest.mark.parametrize("path", ENDPOINTS)
def test_any_request_has_an_answer_or_an_error(gateway: Any, renderer: Any, sampled: Any, path: str) -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>{"name": "f", "arguments": {"input": "x"}}</tool_call>'
    ids = [*renderer.template.tokenizer.encode(text).ids, renderer.end_id]
    with asyncio.Runner() as runner:
        context = gateway(lambda r, p: sampled(ids), max_turns=1_000_000, deadline=1e9, context=20_000)
        g = runner.run(context.__aenter__())
        try:
            client = runner.run(g.connect())

            @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
            @given(request(ENDPOINTS[path]))
            def one(body: bytes) -> None:
                check(path, *runner.run(asyncio.wait_for(client.request("POST", path, body), 30)))

            one()
            status, message = runner.run(client.chat([{"role": "user", "content": "are you still there?"}]))
            assert status == 200 and message["role"] == "assistant"
            outcome = runner.run(g.close())
            assert outcome.trajectories and all(c.n_completion == len(ids) for c in outcome.calls if c.status.value == "complete")
        finally:
            runner.run(context.__aexit__(None, None, None))  # which looks for a bug that was met


PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name": ["f"]}', "\n", " ", "1e999", "NaN", "\ud7ff", "x",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join)
SCHEMAS = st.dictionaries(st.sampled_from("fg"), st.one_of(VALUE, st.just({"properties": {"a": {"type": "integer"}}})), max_size=2)


@settings(max_examples=1000, deadline=None)
@given(TEXT, st.sampled_from(Format), st.sampled_from(Reasoning), st.one_of(st.none(), SCHEMAS))
def test_no_word_of_a_completion_is_lost(text: str, form: Format, reasoning: Reasoning, offered: Any) -> None:
    """What is no call is text, and what is a call is whole: only white space and the tags themselves may be missing."""
    message = parse(text, "p", offered=offered, form=form, reasoning=reasoning)
    calls = message.get("tool_calls", [])
    for i, call in enumerate(calls):
        assert call["id"] == f"p_{i}" and isinstance(json.loads(call["function"]["arguments"]), dict)
    if not calls:
        kept = "".join(((message.get("reasoning_content") or "") + message["content"]).split())
        for tag in ("<think>", "</think>"):
            text, kept = text.replace(tag, ""), kept.replace(tag, "")
        assert kept == "".join(text.split())
    assert offered is not None or not calls


CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.sampled_from([*CONTROL, "<|", "|>", "im_end"]), st.text(max_size=4)), max_size=8).map("".join))
def test_a_control_token_in_a_text_is_text(renderer: Renderer, text: str) -> None:
    """In a user's text, in a tool's, in an argument: the ids are ordinary ones and spell the same."""
    template: ChatTemplate = renderer.template
    text = text.replace("\ufdd0", "")
    control = {template.tokenizer.token_to_id(c) for c in CONTROL}
    ids = template.encode(template.guard(text), 10_000)
    assert not control & set(ids) and template.decode(ids) == text
    call = {"id": "call_c1_0", "type": "function", "function": {"name": "f", "arguments": {text: [text]}}}
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text, "tool_calls": [call]}, {"role": "tool", "content": text}]
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    rendered = renderer.full([renderer.guard(m) for m in messages], renderer.shown(tools), None, 100_000).ids
    plain = renderer.full([{**m, "content": ""} for m in messages[:1]] + [{"role": "assistant", "content": ""}, {"role": "tool", "content": ""}],
                          renderer.shown([{"type": "function"}]), None, 100_000).ids  # fmt: skip
    assert sum(i in control for i in rendered) == sum(i in control for i in plain)
