"""The three protocols through the official clients, over the real gateway and a real scripted engine: tokens, tools, reasoning, errors."""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import anthropic
import openai
import pytest
from clients import PARAMETERS, SYSTEM, Chat, Messages, Responses, story

from gyre.sandbox.gateway.render import Renderer
from gyre.trajectory.flatten import flatten
from gyre.types import CallStatus, Sampling

CALL = '<tool_call>\n{"name": "bash",  "arguments": {"cmd":"%s", "n": 1.0}}\n</tool_call>'
DRIVERS = pytest.mark.parametrize("harness", [Chat, Responses, Messages])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def letters(renderer: Renderer, text: str) -> list[int]:
    """The text as no tokenizer would write it: each character on its own, marks excepted."""
    tokenizer, ids = renderer.template.tokenizer, []
    while text:
        piece = next((m for m in ("<tool_call>", "</tool_call>", "<think>", "</think>") if text.startswith(m)), text[0])
        ids += tokenizer.encode(piece, add_special_tokens=False).ids
        text = text[len(piece) :]
    assert renderer.end_id is not None
    return [*ids, renderer.end_id]


def flat_of(outcome: Any) -> Any:
    (trajectory,) = outcome.trajectories
    return flatten(outcome.graph.nodes, trajectory, outcome.graph.arrays())


@pytest.mark.pain(21, 22)
@STREAMS
@DRIVERS
def test_128_turns_drift_by_no_token(gateway: Any, renderer: Renderer, harness: Any, stream: bool) -> None:
    """pains 21, 22: in each protocol the trajectory's ids are the engine's, byte for byte, however replies were spelled when they came back."""
    rng = random.Random(3)
    lines = [
        {"token_ids": letters(renderer, f"<think>\nstep {i} {rng.random()}\n</think>\n\nlet me look " + CALL % f"ls {rng.randrange(99)}")}
        for i in range(128)
    ]

    async def run() -> None:
        async with gateway(lines, deadline=1e9) as g:
            agent = harness(g, stream, raw=True)
            agent.user("do it")
            for turn in range(128):
                reply = await agent.turn()
                ((call_id, name, arguments),) = reply.calls
                assert (name, arguments["n"], reply.text) == ("bash", 1, "let me look") and reply.reasoning.startswith(f"step {turn} ")
                assert reply.usage == (len(g.engines[0].prompts[turn]), len(lines[turn]["token_ids"]))
                agent.tool(call_id, f"file{turn} naïve ✓")
            outcome = await g.close()
            assert [c.status for c in outcome.calls] == [CallStatus.COMPLETE] * 128
            flat, ids = flat_of(outcome), []
            for prompt, line, span in zip(g.engines[0].prompts, lines, flat.calls, strict=True):
                assert flat.token_ids[: span.start].tolist() == prompt
                assert flat.token_ids[span.start : span.end].tolist() == line["token_ids"]
                assert set(flat.logprobs[span.start : span.end]) == {-0.5} and set(flat.versions[span.start : span.end]) == {0}
                ids += line["token_ids"]
            assert [i for i, bears in zip(flat.token_ids, flat.loss_mask, strict=True) if bears] == ids

    story(run)


@pytest.mark.pain(22)
@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
@STREAMS
@DRIVERS
def test_ids_are_there_with_streams_and_tools(gateway: Any, renderer: Renderer, harness: Any, stream: bool, tools: bool) -> None:
    """pains 22: every protocol, streamed or not, with two calls at once or without tools."""
    first = "<think>\nhm\n</think>\n\nboth " + CALL % "a" + "\n" + CALL % "b" if tools else "first"
    lines = [{"text": first}, {"text": "done"}]

    async def run() -> None:
        async with gateway(lines) as g:
            agent = harness(g, stream, tools)
            agent.user("go")
            reply = await agent.turn()
            for call_id, _, arguments in reply.calls:
                agent.tool(call_id, "out " + arguments["cmd"])
            if not tools:
                agent.user("more")
            assert [c[2]["cmd"] for c in reply.calls] == (["a", "b"] if tools else [])
            assert (await agent.turn()).text == "done"
            outcome = await g.close()
            assert [c.api for c in outcome.calls] == [harness.__name__.lower()] * 2
            flat = flat_of(outcome)
            assert flat.token_ids.tolist() == [*g.engines[0].prompts[1], *flat.token_ids[flat.calls[1].start :]]
            assert sum(flat.loss_mask) == sum(c.n_completion for c in outcome.calls)
            assert ("out b" in renderer.template.decode(flat.token_ids)) == tools

    story(run)


@pytest.mark.pain(22)
@STREAMS
@DRIVERS
def test_what_cannot_be_parsed_is_text_and_is_trained(gateway: Any, renderer: Renderer, harness: Any, stream: bool) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls}\n</tool_call>'

    async def run() -> None:
        async with gateway([{"token_ids": letters(renderer, broken)}, {"text": "sorry"}]) as g:
            agent = harness(g, stream)
            agent.user("go")
            reply = await agent.turn()
            assert (reply.text, reply.calls) == (broken, [])
            agent.user("That was no call.")
            await agent.turn()
            flat = flat_of(await g.close())
            assert flat.token_ids[flat.calls[0].start : flat.calls[0].end].tolist() == letters(renderer, broken)

    story(run)


@DRIVERS
def test_a_reply_cut_by_length_says_so(gateway: Any, harness: Any) -> None:
    async def run() -> None:
        async with gateway([{"text": "a long story about nothing at all"}], sampling=Sampling(max_tokens=3)) as g:
            agent = harness(g, stream=harness is Messages)  # OpenAI's helpers raise where a stream ends so
            agent.user("go")
            reply = await agent.turn()
            assert reply.stop == {Chat: "length", Responses: "max_output_tokens", Messages: "max_tokens"}[harness]
            assert reply.usage[1] == 3

    story(run)


LIMITS = {Chat: "max_tokens", Responses: "max_output_tokens", Messages: "max_tokens"}


@DRIVERS
def test_sampling_parameters_are_overruled_and_recorded(gateway: Any, renderer: Renderer, sampled: Any, harness: Any) -> None:
    async def run() -> None:
        ours = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=64)
        async with gateway(lambda r, p: sampled([renderer.end_id]), sampling=ours) as g:
            agent = harness(g, stream=False)
            agent.user("go")
            extra = {} if harness is Messages else {"extra_body": {"temperature": 0.0, "top_p": 0.1, "stop": ["x"]}}
            more = {"extra_body": {"temperature": 0, "top_k": 1, "stop_sequences": ["x"]}} if harness is Messages else extra
            await agent.turn(**more, **{LIMITS[harness]: 8})
            (request,) = g.engines[0].requests
            assert request.sampling == Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=8)
            (call,) = (await g.close()).calls
            assert call.asked["temperature"] == 0 and call.asked[LIMITS[harness]] == 8
            assert harness is Responses or call.asked["stop_sequences" if harness is Messages else "stop"] == '["x"]'

    story(run)


@pytest.mark.pain(38)
@STREAMS
@DRIVERS
def test_errors_are_the_protocols_own(gateway: Any, renderer: Renderer, sampled: Any, harness: Any, stream: bool) -> None:
    """pains 38 among them: what the official clients make of a prompt that is too long, an unknown model, no engine, a rollout that is over."""
    library: Any = anthropic if harness is Messages else openai

    async def run() -> None:
        says = {"refuse": ""}
        async with gateway(lambda r, p: sampled([renderer.end_id], refuse=says["refuse"]), context=200, models=("m",), max_turns=2) as g:
            agent = harness(g, stream)
            agent.user("x y " * 400)
            with pytest.raises(library.BadRequestError) as long:
                await agent.turn()
            assert g.session.context_full and not g.engines[0].requests
            if harness is Messages:
                assert long.value.body["type"] == "error" and long.value.body["error"]["type"] == "invalid_request_error"
                assert "prompt is too long: " in long.value.message and " > 200 maximum" in long.value.message
            else:
                assert long.value.code == "context_length_exceeded" and "maximum context length is 200 tokens" in long.value.message
            agent = harness(g, stream)
            agent.user("go")
            with pytest.raises(library.NotFoundError) as unknown:
                await agent.turn(model="another")
            assert "another" in unknown.value.message
            assert unknown.value.body.get("code", "model_not_found") == "model_not_found"
            agent.user("")
            with pytest.raises(library.BadRequestError):
                await agent.turn(**{"input" if harness is Responses else "messages": [{"role": "user", "content": [{"type": "input_image"}]}]})
            says["refuse"] = "context"
            with pytest.raises(library.BadRequestError):
                await agent.turn()
            with pytest.raises(library.APIStatusError) as over:
                await agent.turn()
            assert over.value.status_code == 410 and "turn_limit" in over.value.message

    story(run)


@STREAMS
@DRIVERS
def test_no_engine_in_time(gateway: Any, sampled: Any, harness: Any, stream: bool) -> None:
    library: Any = anthropic if harness is Messages else openai

    async def run() -> None:
        async with gateway(lambda r, p: sampled([], refuse="full"), deadline=asyncio.get_running_loop().time() + 0.5) as g:
            agent = harness(g, stream)
            agent.user("go")
            with pytest.raises(library.APIStatusError) as lost:
                await agent.turn()
            assert lost.value.status_code == (529 if harness is Messages else 503) and "gave up after" in lost.value.message

    story(run)


@DRIVERS
def test_streams_are_kept_alive_while_a_generation_runs(gateway: Any, harness: Any) -> None:
    """Through the official streaming helpers: signs of life disturb none of them, and a failure after one is told in the stream."""

    async def run() -> None:
        async with gateway([{"text": "slow", "token_delay_s": 0.2}], keep_alive_s=0.05, max_turns=1) as g:
            agent = harness(g, stream=True)
            agent.user("go")
            reply = await agent.turn()
            assert reply.text == "slow" and reply.usage[1] >= 2

    story(run)


@DRIVERS
def test_a_failure_after_a_sign_of_life_is_told_in_the_stream(gateway: Any, sampled: Any, harness: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([], refuse="full"), keep_alive_s=0.05, deadline=asyncio.get_running_loop().time() + 0.5) as g:
            agent = harness(g, stream=True)
            agent.user("go")
            if harness is Responses:
                async with agent.client.responses.stream(model="m", input="go") as events:
                    last = [e async for e in events][-1]
                assert last.type == "response.failed" and last.response.error.code == "unavailable"
                assert "gave up after" in last.response.error.message
            else:
                with pytest.raises((openai.APIError, anthropic.APIError), match="gave up after"):
                    await agent.turn()

    story(run)


@pytest.mark.pain(38)
@DRIVERS
def test_what_is_too_large_is_refused_in_the_protocols_form(gateway: Any, harness: Any) -> None:
    """By its bytes, while it is still sent, and by the number of its JSON values, before it is decoded."""
    library: Any = anthropic if harness is Messages else openai
    key = "input" if harness is Responses else "messages"

    async def run() -> None:
        async with gateway([{"text": "x"}], context=1000) as g:
            for history in ([{"role": "user", "content": "x" * 17_000_000}], [{}] * 200_000):
                agent = harness(g, False, raw=True)
                with pytest.raises(library.APIStatusError) as large:
                    await agent.turn(**{key: history})
                assert large.value.status_code == 413 and g.session.context_full
                body = large.value.body
                assert (body["error"]["type"] if harness is Messages else body["code"]) == "request_too_large"
                agent = harness(g, False)
                agent.user("go")
                assert (await agent.turn()).text == "x"

    story(run)


def test_models(gateway: Any) -> None:
    async def run() -> None:
        async with gateway([{"text": "x"}], models=("m", "n")) as g:
            ours, theirs = Chat(g, False).client, Messages(g, False).client
            assert [m.id async for m in ours.models.list()] == [m.id async for m in theirs.models.list()] == ["m", "n"]
            assert (await ours.models.retrieve("n")).id == (await theirs.models.retrieve("n")).id == "n"
            with pytest.raises(openai.NotFoundError, match="model: no"):
                await ours.models.retrieve("no")
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await theirs.models.retrieve("no")
            assert unknown.value.body["error"]["type"] == "not_found_error"

    story(run)


def test_tokens_are_counted_as_they_will_be_sent(gateway: Any) -> None:
    """Whatever is counted, before and after a reply, is the usage of the next call; counting is no call."""

    async def run() -> None:
        async with gateway([{"text": "<think>\nhm\n</think>\n\n" + CALL % "ls"}, {"text": "done"}]) as g:
            agent = Messages(g, False)
            agent.user("go")
            for _ in range(2):
                counted = await agent.client.messages.count_tokens(model="m", system=SYSTEM, messages=agent.messages, **agent.more)
                reply = await agent.turn(system=SYSTEM)
                assert reply.usage[0] == counted.input_tokens
                for call_id, _, _ in reply.calls:
                    agent.tool(call_id, "out")
            ours = await Responses(g, False).client.responses.input_tokens.count(model="m", input="hello")
            assert ours.input_tokens > 0
            assert len((await g.close()).calls) == 2
            huge = await agent.client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x y " * 10}])
            assert huge.input_tokens > 0

    with pytest.raises(anthropic.APIStatusError, match="over"):  # once the rollout is over nothing is counted either
        story(run)


def test_previous_responses_are_continued(gateway: Any, renderer: Renderer) -> None:
    async def run() -> None:
        async with gateway([{"text": "<think>\nhm\n</think>\n\n" + CALL % "a"}, {"text": "one"}, {"text": "two"}]) as g:
            client = Responses(g, False).client
            tools = [{"type": "function", "name": "bash", "parameters": PARAMETERS}]
            first = await client.responses.create(model="m", input="go", tools=tools)
            output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "seen"}
            second = await client.responses.create(model="m", input=[output], previous_response_id=first.id, tools=tools)
            third = await client.responses.create(model="m", input="more", previous_response_id=second.id, tools=tools, store=False)
            assert (second.output_text, third.output_text, third.previous_response_id) == ("one", "two", second.id)
            with pytest.raises(openai.BadRequestError) as unknown:
                await client.responses.create(model="m", input="more", previous_response_id=third.id)
            assert unknown.value.code == "previous_response_not_found"
            flat = flat_of(await g.close())
            assert [c.call_id for c in flat.calls] == ["c1", "c2", "c3"]
            assert "seen" in renderer.template.decode(flat.token_ids)

    story(run)


def test_items_of_one_reply_are_put_together_again(gateway: Any) -> None:
    """Outputs right behind their calls, a custom tool, a namespace, and a reply whose reasoning comes back as its handle alone."""
    patch = '<tool_call>{"name": "patch", "arguments": {"input": "*** a"}}</tool_call>'
    remote = '<tool_call>{"name": "web__get", "arguments": {"url": "u"}}</tool_call>'

    async def run() -> None:
        async with gateway([{"text": "<think>\nwhy\n</think>\n\n" + patch + remote}, {"text": "done"}]) as g:
            grammar = {"type": "grammar", "syntax": "lark", "definition": "start: LINE"}
            tools = [
                {"type": "custom", "name": "patch", "description": "Patch.", "format": grammar},
                {"type": "namespace", "name": "web", "description": "", "tools": [{"type": "function", "name": "get", "parameters": PARAMETERS}]},
                {"type": "web_search"},
            ]
            client = Responses(g, False).client
            first = await client.responses.create(model="m", input="go", tools=tools, store=False)
            thought, custom, function = first.output
            assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "*** a")
            assert (function.name, function.namespace) == ("get", "web")
            items = [i.model_dump(exclude_none=True) for i in (thought, custom, function)]
            del items[0]["content"]
            told = [
                {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
                {"type": "function_call_output", "call_id": function.call_id, "output": "404"},
            ]
            interleaved = [{"role": "user", "content": "go"}, items[0], items[1], told[0], items[2], told[1]]
            await client.responses.create(model="m", input=interleaved, tools=tools, store=False)
            assert len(flat_of(await g.close()).calls) == 2
            assert "start: LINE" in g.session._renderer.template.decode(flat_of(await g.close()).token_ids)

    story(run)


def test_thinking_is_shown_to_those_who_ask_and_recalled(gateway: Any, renderer: Renderer) -> None:
    """A block that comes back without its text is looked up by its signature, also where history is edited and so rendered anew."""

    async def run() -> None:
        async with gateway([{"match": "assistant\n$", "text": "<think>\nbecause\n</think>\n\nso"}]) as g:
            agent = Messages(g, True)
            agent.user("go")
            assert (await agent.turn()).reasoning == "because"
            (signed, said) = agent.messages[-1]["content"]
            quiet = await agent.client.messages.create(model="m", max_tokens=99, messages=[{"role": "user", "content": "go"}])
            assert [b.type for b in quiet.content] == ["text"]
            edited = {"type": "text", "text": said["text"] + " edited"}
            agent.messages[-1]["content"] = [{**signed, "thinking": ""}, edited]
            agent.user("why?")
            await agent.turn()
            assert "<think>\nbecause\n</think>\n\nso edited" in renderer.template.decode(array("i", g.engines[0].prompts[-1]))

    story(run)


def test_a_billing_header_is_no_part_of_the_prompt(gateway: Any, renderer: Renderer) -> None:
    async def run() -> None:
        async with gateway([{"text": "one"}, {"text": "two"}]) as g:
            agent = Messages(g, False, tools=False)
            agent.user("go")
            for turn in range(2):
                header = {"type": "text", "text": f"x-anthropic-billing-header: cch={turn};"}
                await agent.turn(system=[header, {"type": "text", "text": SYSTEM}])
                agent.user("more")
            flat = flat_of(await g.close())
            assert len(flat.calls) == 2 and "billing" not in renderer.template.decode(flat.token_ids)

    story(run)
