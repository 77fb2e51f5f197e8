"""Token-exact capture through the real gateway over a real Unix socket, with a scripted engine behind a real wire."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.template import ChatTemplate
from gyre.trajectory.flatten import flatten
from gyre.types import CallStatus, LeafClass

SYSTEM = {"role": "system", "content": "You are a coding agent."}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def letters(renderer: Renderer, text: str, end: bool = True) -> list[int]:
    """The text as no tokenizer would write it: each character on its own, marks and control tokens excepted."""
    tokenizer, ids = renderer.template.tokenizer, []
    while text:
        mark = next((m for m in ("<tool_call>", "</tool_call>", "<think>", "</think>") if text.startswith(m)), None)
        piece = mark or text[0]
        ids += tokenizer.encode(piece, add_special_tokens=False).ids
        text = text[len(piece) :]
    assert renderer.end_id is not None
    return [*ids, renderer.end_id] if end else ids


def flats(outcome: Any) -> list[Any]:
    return [flatten(outcome.graph.nodes, t, outcome.graph.arrays()) for t in outcome.trajectories]


def bash(cmd: str) -> str:
    return '<tool_call>\n{"name": "bash",  "arguments": {"cmd":"' + cmd + '"}}\n</tool_call>'


@pytest.mark.pain(21)
@pytest.mark.parametrize("stream", [False, True])
def test_128_turns_byte_for_byte(gateway: Any, renderer: Renderer, sampled: Any, stream: bool) -> None:
    """pains 21: the trajectory's ids are the engine's, though the harness re-serialises tool arguments and adds cosmetic keys."""
    rng = random.Random(5)

    def script(request: Any, prompt: list[int]) -> Any:
        text = f"<think>\nstep {rng.random()}\n</think>\n\nlet me look {rng.choice('abc')} " + bash(f"ls {rng.randrange(99)}")
        return sampled(letters(renderer, text))

    async def run() -> None:
        async with gateway(script) as g:
            client = await g.connect()
            messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "do it"}]
            for turn in range(128):
                status, message = await client.chat(messages, tools=TOOLS, stream=stream)
                assert status == 200, message
                call = message["tool_calls"][0]
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
                if turn % 3 == 0:
                    message["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
                messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": f"file{turn} naïve ✓"}]
            outcome = await g.close()
            engine = g.engines[0]
            assert [c.status for c in outcome.calls] == [CallStatus.COMPLETE] * 128
            (flat,) = flats(outcome)
            last = engine.requests[-1].request_id
            assert flat.token_ids.tolist() == engine.prompts[last] + engine.replies[last][0]
            for request, span in zip(engine.requests, flat.calls, strict=True):
                ids, logprobs = engine.replies[request.request_id]
                assert flat.token_ids[: span.start].tolist() == engine.prompts[request.request_id]
                assert flat.token_ids[span.start : span.end].tolist() == ids
                assert flat.logprobs[span.start : span.end].tolist() == pytest.approx(logprobs)
                assert set(flat.versions[span.start : span.end]) == {0}
                assert set(flat.loss_mask[span.start : span.end]) == {1}
            assert sum(flat.loss_mask) == sum(len(ids) for ids, _ in engine.replies.values())

    asyncio.run(run())


@pytest.mark.pain(21)
def test_retry_edit_drop_and_side_call(gateway: Any, renderer: Renderer, sampled: Any, until: Any) -> None:
    """The case table: an identical retry, edited history, a renamed tool under the same id, a dropped stream, a title request."""
    turns = iter(range(100))

    def script(request: Any, prompt: list[int]) -> Any:
        turn = next(turns)
        text = {0: "a title", 1: "one " + bash("a"), 2: "other " + bash("b")}.get(turn, f"t{turn} " + bash(f"c{turn}"))
        return sampled(letters(renderer, text), delay_s=20.0 if turn == 4 else 0.0)

    async def run() -> None:
        async with gateway(script, max_trajectories=8) as g:
            client = await g.connect()
            user = {"role": "user", "content": "do it"}
            await client.chat([{"role": "system", "content": "Make a title."}, user])  # c1: side call
            base = [SYSTEM, user]
            _, first = await client.chat(base, tools=TOOLS)  # c2: its reply never comes back
            _, second = await client.chat(base, tools=TOOLS)  # c3: identical retry, adopted
            assert first["content"] != second["content"]
            assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]
            told = {"role": "tool", "tool_call_id": second["tool_calls"][0]["id"], "content": "x"}
            _, third = await client.chat([*base, second, told], tools=TOOLS)  # c4
            dropper = await g.connect()
            more = [*base, second, told, third, {"role": "tool", "tool_call_id": third["tool_calls"][0]["id"], "content": "y"}]
            dropper.send("POST", "/v1/chat/completions", json.dumps({"messages": more, "tools": TOOLS, "stream": True}).encode())
            await until(lambda: len(g.engines[0].requests) == 5)
            dropper.close()  # c5: aborted upstream
            await until(lambda: g.engines[0].aborted)
            _, _ = await client.chat(more, tools=TOOLS)  # c6: the retry of it
            renamed = json.loads(json.dumps(third))
            renamed["tool_calls"][0]["function"]["name"] = "invalid"
            _, _ = await client.chat([*more[:4], renamed, more[5]], tools=TOOLS)  # c7: edited history, the id alone is no proof
            outcome = await g.close()
            calls = {c.call_id: c for c in outcome.calls}
            assert [c.status for c in outcome.calls] == [CallStatus.COMPLETE] * 4 + [CallStatus.ABORTED] + [CallStatus.COMPLETE] * 2
            assert calls["c1"].leaf_class is LeafClass.SIDE
            assert calls["c2"].prompt_node == calls["c3"].prompt_node
            assert calls["c5"].prompt_node == calls["c6"].prompt_node and calls["c5"].n_completion == 2
            assert calls["c7"].prompt_node not in (calls["c6"].prompt_node, calls["c4"].node)
            nodes = outcome.graph.nodes
            trained = {nodes[i].call_id for t in outcome.trajectories for i in t.trainable}
            assert trained == {"c3", "c4", "c6", "c7"}
            assert sum(t.n_trainable for t in outcome.trajectories) == sum(calls[c].n_completion for c in trained)
            for request in g.engines[0].requests:  # whatever the branch: what was sent is what is kept
                call = calls["c" + request.request_id.split(".")[-2]]
                path, at = [], call.prompt_node
                while at >= 0:
                    path.append(at)
                    at = nodes[at].parent
                starts = [0]
                for node in nodes:
                    starts.append(starts[-1] + node.n_tokens)
                ids = [i for n in path[::-1] for i in outcome.graph.token_ids[starts[n] : starts[n + 1]]]
                assert ids == g.engines[0].prompts[request.request_id]

    asyncio.run(run())


def test_reasoning_that_a_template_strips_is_a_break(gateway: Any, forgetful: Renderer, sampled: Any) -> None:
    """A user turn in the middle: the template drops earlier reasoning, so the prompt is rendered in full and the graph branches."""

    def script(request: Any, prompt: list[int]) -> Any:
        return sampled(letters(forgetful, f"<think>\nhm {len(prompt)}\n</think>\n\nanswer"))

    async def run() -> None:
        async with gateway(script, use=forgetful, max_trajectories=4) as g:
            client = await g.connect()
            messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "one"}]
            _, reply = await client.chat(messages)
            assert reply["reasoning_content"].startswith("hm") and reply["content"] == "answer"
            await client.chat([*messages, reply, {"role": "user", "content": "two"}])
            outcome = await g.close()
            assert len(outcome.trajectories) == 2
            text = forgetful.template.decode(flats(outcome)[0].token_ids) + forgetful.template.decode(flats(outcome)[1].token_ids)
            assert text.count("hm") == 2

    asyncio.run(run())


def test_an_echo_without_reasoning_is_bridged(gateway: Any, renderer: Renderer, sampled: Any) -> None:
    def script(request: Any, prompt: list[int]) -> Any:
        return sampled(letters(renderer, f"<think>\nhm {len(prompt)}\n</think>\n\nanswer {len(prompt)}"))

    async def run() -> None:
        async with gateway(script) as g:
            client = await g.connect()
            messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "one"}]
            for turn in range(4):
                _, reply = await client.chat(messages)
                messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": f"go on {turn}"}]
            outcome = await g.close()
            (flat,) = flats(outcome)
            assert [c.call_id for c in flat.calls] == ["c1", "c2", "c3", "c4"]

    asyncio.run(run())


def test_a_reply_cut_by_length_goes_on(gateway: Any, renderer: Renderer, sampled: Any) -> None:
    """The bridge adds the end of the turn that the policy had no room for; it bears no loss."""

    def script(request: Any, prompt: list[int]) -> Any:
        return sampled(letters(renderer, "cut off", end=False), finish="length")

    async def run() -> None:
        async with gateway(script) as g:
            client = await g.connect()
            _, reply = await client.chat([SYSTEM, {"role": "user", "content": "one"}])
            await client.chat([SYSTEM, {"role": "user", "content": "one"}, reply, {"role": "user", "content": "go on"}])
            outcome = await g.close()
            (flat,) = flats(outcome)
            end = flat.calls[0].end
            assert flat.token_ids[end] == renderer.end_id and flat.loss_mask[end] == 0
            text = renderer.template.decode(flat.token_ids)
            assert "assistant\ncut off<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n" in text

    asyncio.run(run())


def test_calls_at_the_same_time(gateway: Any, renderer: Renderer, sampled: Any) -> None:
    """Sub-agents run in parallel: each has its own root, each is matched to its own history."""

    def script(request: Any, prompt: list[int]) -> Any:
        return sampled(letters(renderer, f"{len(prompt)} {sum(prompt)}"), delay_s=0.01)

    async def agent(g: Any, name: str, turns: int) -> None:
        client = await g.connect()
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": "go"}]
        for turn in range(turns):
            _, reply = await client.chat(messages, tools=TOOLS)
            messages += [reply, {"role": "user", "content": f"more {turn}"}]

    async def run() -> None:
        async with gateway(script, max_trajectories=8) as g:
            await asyncio.gather(agent(g, "main", 6), agent(g, "helper", 3), agent(g, "reviewer", 3))
            outcome = await g.close()
            assert [t.leaf_class for t in outcome.trajectories] == [LeafClass.MAIN, LeafClass.SUB_AGENT, LeafClass.SUB_AGENT]
            assert sorted(len(f.calls) for f in flats(outcome)) == [3, 3, 6]
            assert sum(t.n_trainable for t in outcome.trajectories) == sum(c.n_completion for c in outcome.calls)

    asyncio.run(run())


def test_renders_as_transformers_does(make_model: Any, tmp_path: Any) -> None:
    """The same text and ids, from the same files, without importing it in the product."""
    transformers = pytest.importorskip("transformers")
    directory = make_model(tmp_path / "m")
    ours, theirs = ChatTemplate.load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": {"cmd": "ls <é> & 'x'"}}}
    messages = [SYSTEM, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "out"}]  # fmt: skip
    for tools in (None, TOOLS):
        text = ours.render(messages, tools, reply_follows=True)
        assert text == theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        assert ours.encode(text, 1000).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
