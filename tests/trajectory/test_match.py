"""Recognising a harness's own history."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.trajectory.match import Matcher, Memory, Message, UnsupportedContent, chain, fingerprint, normalise, thought

USER = {"role": "user", "content": "hi"}


def reply(name: str = "bash", call_id: str = "call_1", arguments: Any = '{"a": 1, "b": "x"}', **more: Any) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def links(*messages: dict[str, Any], tools: bytes = b"") -> list[bytes]:
    return chain(tools, [normalise(m) for m in messages])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return fingerprint(normalise(a)) == fingerprint(normalise(b))


def test_cosmetic_differences_do_not_count() -> None:
    assert same(reply(), reply(arguments='{"b":"x","a":1}'))
    assert same(reply(), reply(arguments={"a": 1, "b": "x"}))
    assert same(reply(), {**reply(), "content": "", "refusal": None, "annotations": []})
    assert same({"role": "system", "content": "s"}, {"role": "developer", "content": [{"type": "text", "text": "s", "cache_control": {}}]})
    assert same(reply(reasoning="r"), reply(reasoning_content="r"))
    assert same(reply(arguments='{"a": 1.0, "b": [-2e1]}'), reply(arguments='{"a": 1, "b": [-20]}'))  # as JavaScript writes them
    assert same(reply(arguments='{"a": "\\u00e9"}'), reply(arguments='{"a": "é"}'))


@pytest.mark.parametrize(
    "other",
    [
        reply(name="invalid"),  # renamed under the same id
        reply(arguments='{"a": 2, "b": "x"}'),
        reply(arguments='{"a": true, "b": "x"}'),
        reply(arguments='{"a": 1, "b": "x"'),  # malformed
        reply(call_id="call_2"),
        reply(content="text"),
    ],
)
def test_real_differences_count(other: dict[str, Any]) -> None:
    assert not same(reply(), other)


def find(matcher: Matcher, *messages: dict[str, Any], tools: bytes = b"") -> str | None:
    return matcher.find(links(*messages, tools=tools), [thought(normalise(m)) for m in messages])


def test_the_longest_complete_call_is_found() -> None:
    matcher = Matcher()
    matcher.record("c1", links(USER)[-1], reply())
    told = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    matcher.record("c2", links(USER, reply(), told)[-1], {"role": "assistant", "content": "done"})
    assert find(matcher, USER) is None
    assert find(matcher, USER, reply(), told) == "c1"
    done = {"role": "assistant", "content": "done\n"}
    assert find(matcher, USER, reply(), told, done, USER) == "c2"
    assert find(matcher, USER, reply(), {**told, "content": "edited"}, done, USER) == "c1"
    assert find(matcher, USER, reply(name="invalid"), told) is None
    assert find(matcher, USER, reply(), told, tools=b"other") is None


def thinks(reasoning: str | None, text: str = "x") -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


def test_reasoning_may_be_left_out_but_not_changed() -> None:
    matcher = Matcher()
    matcher.record("c1", links(USER)[-1], thinks("because"))
    assert find(matcher, USER, thinks("because")) == "c1"
    assert find(matcher, USER, thinks(None)) == "c1"
    assert find(matcher, USER, thinks("why")) is None


def test_reasoning_may_be_left_out_later() -> None:
    """A harness that keeps the last reply's reasoning alone, and one that edits an earlier one."""
    matcher = Matcher()
    matcher.record("c1", links(USER)[-1], thinks("one"))
    matcher.record("c2", links(USER, thinks("one"), USER)[-1], thinks("two"))
    assert find(matcher, USER, thinks("one"), USER, thinks("two"), USER) == "c2"
    assert find(matcher, USER, thinks(None), USER, thinks("two"), USER) == "c2"
    assert find(matcher, USER, thinks(None), USER, thinks(None), USER) == "c2"
    assert find(matcher, USER, thinks("edited"), USER, thinks("two"), USER) is None
    assert find(matcher, USER, thinks("one"), USER, thinks("edited"), USER) == "c1"


def test_equal_replies_mean_the_latest_call_that_thought_so() -> None:
    matcher = Matcher()
    for call_id, reasoning in (("c1", "a"), ("c2", "b"), ("c3", "a")):
        matcher.record(call_id, links(USER)[-1], thinks(reasoning))
    assert find(matcher, USER, thinks("b")) == "c2"
    assert find(matcher, USER, thinks("a")) == "c3"
    assert find(matcher, USER, thinks(None)) == "c3"


MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda t: {"role": "user", "content": t}, st.sampled_from("ab")),
        st.builds(lambda n, r: reply(arguments={"n": n}, reasoning=r), st.sampled_from([1, True, 1.0, 2]), st.sampled_from(["", "r"])),
        st.builds(lambda t: {"role": "system", "content": t}, st.sampled_from("ab")),
    ),
    max_size=6,
)  # fmt: skip


@given(st.lists(st.tuples(MESSAGES, st.sampled_from([b"", b"t"])), max_size=8), st.booleans())
def test_what_is_remembered_is_what_would_be_read(requests: list[tuple[list[dict[str, Any]], bytes]], shapes: bool) -> None:
    memory = Memory(2)

    def shape(messages: list[Message]) -> list[Message]:
        return [m for i, m in enumerate(messages) if not shapes or i == 0 or m["role"] != "system"]

    for messages, tools in requests:
        normal = [normalise(m) for m in messages]
        conversation = memory.read(json.loads(json.dumps(messages)), tools, shape, dict)
        assert conversation.normal == normal and conversation.messages == shape(normal)
        assert conversation.links == chain(tools, shape(normal))
        assert conversation.guarded == shape(normal) and conversation.thoughts == [thought(m) for m in shape(normal)]


@pytest.mark.parametrize(
    "message",
    [{"content": "x"}, "text", {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, {"role": "user", "content": 3},
     {"role": "assistant", "tool_calls": [{"id": "a"}]}],
)  # fmt: skip
def test_what_text_models_cannot_be_shown(message: Any) -> None:
    with pytest.raises(UnsupportedContent):
        normalise(message)


@pytest.mark.parametrize("calls", [1.5, True, {"a": 1}, "x", [1.5], [{"function": 2}]])
def test_a_repeated_request_with_calls_that_are_none_is_read_again(calls: object) -> None:
    """Whatever a client sends beside a user's words is left alone, the second time too."""
    memory, given = Memory(), [{"role": "user", "content": "a", "tool_calls": calls}]
    first, second = (memory.read([dict(m) for m in given], b"", lambda shown: shown, dict) for _ in range(2))
    assert first.messages == second.messages and first.links == second.links
