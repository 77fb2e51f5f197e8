"""Each family of models, with arbitrary conversations: calls are read as the template writes them, bridges are what it would have written, and
whatever is sampled, in any protocol, is trained as it was sampled."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from agents import AGENTS, Messages, Stepped, open_session
from families import FAMILIES, make_family
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.sandbox.gateway.anthropic import Anthropic
from gyre.sandbox.gateway.chat import Chat
from gyre.sandbox.gateway.parse import Format, Reasoning, parse
from gyre.sandbox.gateway.protocol import Ask
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.responses import Responses
from gyre.sandbox.gateway.route import Job
from gyre.sandbox.gateway.session import Session
from gyre.trajectory.flatten import flatten

FOUND = {
    "qwen3": (Format.HERMES, Reasoning.TAGGED), "hermes": (Format.HERMES, Reasoning.NONE), "coder": (Format.XML, Reasoning.NONE),
    "opened": (Format.XML, Reasoning.OPENED), "llama3": (Format.LLAMA, Reasoning.NONE), "other": (Format.HERMES, Reasoning.NONE),
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string"}, "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "all": {"type": "boolean"},
        "list": {"type": "array"}, "map": {"type": "object"},
    },
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
FAMILY = pytest.mark.parametrize("family", FAMILIES)
WORD = st.text(st.sampled_from("ab \n<>{}/\"'\\=éß✓"), max_size=12)
PLAIN = WORD.map(str.strip)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "cmd": WORD.filter(lambda s: "</parameter>" not in s), "n": st.one_of(st.none(), st.integers()), "all": st.booleans(),
        "list": st.lists(st.one_of(st.integers(), WORD), max_size=3), "map": st.dictionaries(WORD, WORD, max_size=2),
    },
)  # fmt: skip


@pytest.fixture(scope="session")
def families(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    return {name: make_family(make_model, tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def run(renderer: Renderer, says: Callable[[Job], array[int]], talk: Callable[[Session, Stepped], Any]) -> Any:
    """A conversation of one session, then its outcome."""

    async def all_of_it() -> Any:
        router = Stepped(says)
        session = open_session(renderer, router)
        await talk(session, router)
        return await session.close(), router.jobs

    return asyncio.run(all_of_it())


@FAMILY
def test_the_template_tells_the_family(families: dict[str, Renderer], family: str) -> None:
    assert (families[family].form, families[family].reasoning) == FOUND[family]


def written(renderer: Renderer, before: list[Any], reply: dict[str, Any]) -> str:
    """A reply as the template writes it behind a conversation, without the end of its turn."""
    prompt = renderer.template.render(before, [TOOL], reply_follows=True)
    text = renderer.template.render([*before, reply], [TOOL], reply_follows=False)
    assert text.startswith(prompt)
    return text[len(prompt) : text.rindex(renderer.end_text)]


def reply_of(renderer: Renderer, text: str, reasoning: str, calls: list[Any]) -> dict[str, Any]:
    """A reply that the family can say: with reasoning if it has any, and no more than it shows beside a call."""
    out: dict[str, Any] = {"role": "assistant", "content": text}
    if renderer.reasoning is not Reasoning.NONE and reasoning:
        out["reasoning_content"] = reasoning
    if renderer.form is Format.LLAMA and calls:
        out["content"], calls = "", calls[:1]
    if calls:
        out["tool_calls"] = [
            {"id": f"p_{i}", "type": "function", "function": {"name": "bash", "arguments": arguments}} for i, arguments in enumerate(calls)
        ]
    return out


def is_plain(text: str) -> bool:
    return not any(mark in text for mark in ("<think>", "</think>", "<tool_call>", "<function", "{", "_"))


TURN = st.tuples(PLAIN.filter(is_plain), PLAIN.filter(is_plain), st.lists(ARGUMENTS, max_size=2))


@pytest.mark.pain(22)
@FAMILY
@settings(max_examples=60, deadline=None, database=None)
@given(turn=TURN)
def test_a_call_is_read_as_the_template_writes_it(families: dict[str, Renderer], family: str, turn: Any) -> None:
    renderer = families[family]
    reply = reply_of(renderer, *turn)
    text = written(renderer, [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}], reply)
    got = parse(text, "p", offered={"bash": SCHEMA}, form=renderer.form, reasoning=renderer.reasoning)
    for call in got.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert {**got, "content": got["content"] or ""} == reply


@pytest.mark.pain(21)
@FAMILY
@settings(max_examples=30, deadline=None, database=None)
@given(turns=st.lists(TURN, min_size=2, max_size=5))
def test_a_bridge_is_what_the_template_would_write(families: dict[str, Renderer], family: str, turns: list[Any]) -> None:
    """If the policy writes as the template does, then the prompt of the last turn spells what a rendering of it all would."""
    renderer = families[family]
    history: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    replies: list[Any] = []

    def says(job: Job) -> array[int]:
        text = written(renderer, history, replies[-1])
        return array("i", [*renderer.template.tokenizer.encode(text, add_special_tokens=False).ids, renderer.end_id or 0])

    async def talk(session: Session, router: Stepped) -> None:
        for n, turn in enumerate(turns):
            text, reasoning, calls = turn  # of no reasoning at all QWEN3 writes an empty one, and forgets it
            replies.append(reply_of(renderer, text, reasoning or "hm", calls))
            answer = await session.complete(Ask("chat", "m", list(history), [TOOL], None, False, {}))
            assert bool(session._journal.calls[answer.call_id].bridged) == (n > 0), "a turn was not bridged"
            got = {**answer.message, "content": answer.message["content"] or ""}
            calls = [{**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in got.get("tool_calls", ())]
            told = [{"role": "tool", "tool_call_id": c["id"], "content": f"out {n}"} for c in calls]
            if not told:  # a user's turn would end the reasoning before it
                told = [{"role": "tool", "tool_call_id": "x", "content": "none"}]
            history.extend([{**got, **({"tool_calls": calls} if calls else {})}, *told])
        prompt = renderer.template.decode(router.jobs[-1][0])
        n_last = max(i for i, m in enumerate(history) if m["role"] == "assistant")
        assert prompt == renderer.template.render(history[:n_last], [TOOL], reply_follows=True)

    run(renderer, says, talk)


@pytest.mark.pain(21)
@FAMILY
@pytest.mark.parametrize("agent", AGENTS)
@settings(max_examples=15, deadline=None, database=None)
@given(data=st.data())
def test_whatever_is_sampled_is_trained_as_it_was_sampled(families: dict[str, Renderer], family: str, agent: Any, data: Any) -> None:
    """Any token of the vocabulary, control tokens and halves of characters among them, in each protocol: every sampled id is in the trajectories with
    its mask, behind the prompt that was sent."""
    renderer = families[family]
    tokenizer = renderer.template.tokenizer
    call = written(renderer, [{"role": "user", "content": "go"}], reply_of(renderer, "", "", [{"cmd": "ls"}]))
    any_id = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=12)
    marks = st.sampled_from([call, "<think>", "</think>", "\n\n", "<tool_call>", '{"name":'])
    piece = st.one_of(any_id, marks.map(lambda t: tokenizer.encode(t).ids))
    completion = st.lists(piece, min_size=1, max_size=3).map(lambda pieces: [i for ids in pieces for i in ids])
    completions = data.draw(st.lists(completion, min_size=2, max_size=4))
    ends = data.draw(st.booleans())
    saying = iter(completions)

    def says(job: Job) -> array[int]:
        return array("i", [*next(saying), *([renderer.end_id] if ends else [])])

    async def talk(session: Session, router: Stepped) -> None:
        dialect: Any = Anthropic(session.recall) if agent is Messages else Responses(session.recall, 1 << 20) if agent is AGENTS[1] else Chat()
        harness = agent()
        harness.user("go")
        for n in range(len(completions)):
            turn = dialect.read(harness.body())
            said = harness.take(turn.whole(await session.complete(turn.ask)), lambda a: json.dumps(a, indent=1))
            for call_id, _, _ in said.calls:
                harness.tool(call_id, f"out {n}")
            if not said.calls:
                harness.user(f"more {n}")

    outcome, jobs = run(renderer, says, talk)
    borne = {f"c{i + 1}": [0] * len(ids) for i, (_, ids) in enumerate(jobs)}
    for t in outcome.trajectories:
        flat = flatten(outcome.graph.nodes, t, outcome.graph.arrays())
        for span in flat.calls:  # a completion that another prompt leaves halfway is on two paths, each half trained on one of them
            prompt, ids = jobs[int(span.call_id[1:]) - 1]
            assert flat.token_ids[: span.start] == prompt
            assert flat.token_ids[span.start : span.end] == ids[: span.end - span.start]
            for i in range(span.start, span.end):
                borne[span.call_id][i - span.start] += flat.loss_mask[i]
    assert all(set(bears) == {1} for bears in borne.values())
