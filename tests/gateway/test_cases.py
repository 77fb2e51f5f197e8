"""What harnesses do to their history, each in all three protocols: what is kept, what is trained, and that prompts are what was sent.

The engine spells every reply a character a token, as no tokenizer would: a reply that was tokenised again would show.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from agents import AGENTS, Chat, Messages, Responses

from gyre.sandbox.gateway.render import Renderer
from gyre.types import CallStatus, LeafClass

EACH = pytest.mark.parametrize("agent", AGENTS)
CALL = '<tool_call>\n{"name": "bash",  "arguments": {"cmd": "%s", "n": 1.0}}\n</tool_call>'


def letters(renderer: Renderer, text: str) -> list[int]:
    tokenizer, ids = renderer.template.tokenizer, []
    while text:
        piece = next((m for m in ("<tool_call>", "</tool_call>", "<think>", "</think>") if text.startswith(m)), text[0])
        ids += tokenizer.encode(piece, add_special_tokens=False).ids
        text = text[len(piece) :]
    return [*ids, renderer.end_id or 0]


class Story:
    """One rollout: its gateway, a connection, and what was asked and answered."""

    def __init__(self, g: Any, client: Any) -> None:
        self.g, self.client = g, client

    async def ask(self, harness: Any, spell: Callable[[Any], str] = json.dumps, **more: Any) -> Any:
        status, body = await self.client.request("POST", harness.path, harness.body(**more))
        assert status == 200, body
        return harness.take(body, spell)

    async def refused(self, harness: Any, body: bytes | None = None) -> int:
        status, answer = await self.client.request("POST", harness.path, harness.body() if body is None else body)
        assert status != 200, answer
        return int(status)

    async def end(self) -> Ended:
        return Ended(await self.g.close(), self.g.engines[0])


class Ended:
    """What is left of it, checked: every prompt is its ancestors, every trained token is trained once."""

    def __init__(self, outcome: Any, engine: Any) -> None:
        self.outcome, self.calls = outcome, {c.call_id: c for c in outcome.calls}
        nodes, starts = outcome.graph.nodes, [0]
        for node in nodes:
            starts.append(starts[-1] + node.n_tokens)
        for request in engine.requests:
            call = self.calls["c" + request.request_id.split(".")[-2]]
            at, ids = call.prompt_node, []
            while at >= 0 and call.n_completion:
                ids = outcome.graph.token_ids[starts[at] : starts[at + 1]].tolist() + ids
                at = nodes[at].parent
            assert not call.n_completion or ids == engine.prompts[request.request_id]
        trained = [i for t in outcome.trajectories for i in t.trainable]
        assert len(trained) == len(set(trained))
        self.trained = {nodes[i].call_id for i in trained}
        for call_id in self.trained:  # with its own tokens, to the last
            assert sum(nodes[i].n_tokens for i in trained if nodes[i].call_id == call_id) == self.calls[call_id].n_completion

    def continues(self, call_id: str, before: str) -> bool:
        """Whether a call's prompt has another's completion, as sampled, among its ancestors."""
        at = self.calls[call_id].prompt_node
        while at >= 0:
            if at == self.calls[before].node:
                return True
            at = self.outcome.graph.nodes[at].parent
        return False


@pytest.fixture
def tell(gateway: Any, renderer: Renderer, sampled: Any) -> Callable[..., None]:
    """Run a story with an engine that says these texts in turn; one that is a dictionary says how else it is sampled."""

    def run(what: Callable[[Story], Any], *says: Any, **limits: Any) -> None:
        async def all_of_it() -> None:
            lines = iter(says)

            def script(request: Any, prompt: list[int]) -> Any:
                line = next(lines)
                more = line if isinstance(line, dict) else {"text": line}
                return sampled(letters(renderer, more.pop("text", "")), **more)

            async with gateway(script, max_trajectories=16, **limits) as g:
                await what(Story(g, await g.connect()))

        asyncio.run(all_of_it())

    return run


@EACH
def test_an_identical_retry_is_a_sibling_and_one_is_trained(tell: Any, agent: Any) -> None:
    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        lost = agent()
        lost.user("go")
        await s.ask(lost)  # c1: its reply never comes back
        said = await s.ask(a)  # c2
        a.tool(said.calls[0][0], "out")
        await s.ask(a)  # c3
        e = await s.end()
        assert e.calls["c1"].prompt_node == e.calls["c2"].prompt_node and e.calls["c1"].node != e.calls["c2"].node
        assert e.trained == {"c2", "c3"} and e.continues("c3", "c2")

    tell(story, CALL % "a", CALL % "b", "done")


@EACH
def test_a_client_that_is_gone_is_kept_and_not_trained(tell: Any, agent: Any, until: Any) -> None:
    """Aborted, in the middle of a stream; then the same prompt again."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        dropper = await s.g.connect()
        dropper.send("POST", a.path, a.body(stream=True))
        await until(lambda: s.g.engines[0].requests)
        dropper.close()
        await until(lambda: s.g.engines[0].aborted)
        await s.ask(a)
        e = await s.end()
        assert e.calls["c1"].status is CallStatus.ABORTED and e.calls["c1"].n_completion == 2 and e.calls["c1"].node >= 0
        assert e.trained == {"c2"} and e.calls["c1"].prompt_node == e.calls["c2"].prompt_node

    tell(story, {"text": "never heard", "delay_s": 30.0}, "done")


@EACH
def test_partial_text_of_a_dropped_stream_is_edited_history(tell: Any, agent: Any, until: Any) -> None:
    """A harness that keeps what it had heard, says so as the user, and goes on: what was heard is context, its call is not trained."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        dropper = await s.g.connect()
        dropper.send("POST", a.path, a.body(stream=True))
        await until(lambda: s.g.engines[0].requests)
        dropper.close()
        await until(lambda: s.g.engines[0].aborted)
        a.assistant("ne")
        a.user("The answer was cut off. Go on.")
        await s.ask(a)
        e = await s.end()
        assert e.trained == {"c2"} and e.calls["c1"].status is CallStatus.ABORTED

    tell(story, {"text": "never heard", "delay_s": 30.0}, "done")


@EACH
def test_an_error_leaves_no_node_and_is_tried_again(tell: Any, agent: Any) -> None:
    """A request that is malformed, one that the engine refuses, then the same again."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        assert await s.refused(a, b"{") == 400
        assert await s.refused(a) == 400  # c1: the engine's own limit
        await s.ask(a)
        e = await s.end()
        assert (e.calls["c1"].status, e.calls["c1"].node, e.calls["c1"].prompt_node) == (CallStatus.ERROR, -1, -1)
        assert e.trained == {"c2"}

    tell(story, {"refuse": "context"}, "done")


@pytest.mark.pain(21)
@EACH
def test_arguments_written_anew_and_text_in_other_clothes(tell: Any, agent: Any) -> None:
    """Keys in another order, 1.0 as 1, white space; content as parts or as a string; cache markers that move; `developer` for `system`."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        for turn in range(3):
            said = await s.ask(a, lambda x: json.dumps(dict(sorted(x.items(), reverse=True), n=1), indent=2))
            a.tool(said.calls[0][0], f"out {turn}")
            if agent is Chat:
                a.history[0] = {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"n": turn}}]}
                a.history[-2]["content"] = [{"type": "text", "text": a.history[-2]["content"] or ""}]
            elif agent is Messages:
                a.history[0] = {
                    "role": "user",
                    "content": "go" if turn % 2 else [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}],
                }
            else:
                a.history[0] = {"role": "user", "content": [{"type": "input_text", "text": "go"}]}
        await s.ask(a)
        e = await s.end()
        assert len(e.outcome.trajectories) == 1 and e.trained == {"c1", "c2", "c3", "c4"}

    tell(story, *[CALL % "a b"] * 3, "done")


@EACH
def test_a_call_renamed_under_the_same_id_is_edited_history(tell: Any, agent: Any) -> None:
    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        said = await s.ask(a)
        a.rename(1, "invalid")
        a.tool(said.calls[0][0], "no such tool")
        await s.ask(a)
        e = await s.end()
        assert not e.continues("c2", "c1") and e.trained == {"c1", "c2"}

    tell(story, CALL % "a", "done")


@EACH
def test_edited_history_branches_and_the_original_stays_trainable(tell: Any, agent: Any) -> None:
    """A reply changed in the middle of its text, and one that is taken out."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        said = await s.ask(a)
        a.tool(said.calls[0][0], "out")
        await s.ask(a)  # c2 continues c1
        a.history[-1] = {"role": "assistant", "content": "I looked, and it is done."}
        a.user("more")
        await s.ask(a)  # c3 continues c1, not c2
        e = await s.end()
        assert e.continues("c2", "c1") and e.continues("c3", "c1") and not e.continues("c3", "c2")
        assert e.trained == {"c1", "c2", "c3"}

    tell(story, CALL % "a", "I looked, it is done.", "more done")


@EACH
def test_compaction(tell: Any, agent: Any) -> None:
    """Instruction as the last user's turn; then a new start from the summary, as the user's text: the call that wrote it is trained where it was
    sampled, its text is context elsewhere."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        said = await s.ask(a)
        a.tool(said.calls[0][0], "a very long output")
        a.user("Summarise what was done so far.")
        summary = (await s.ask(a)).text  # c2
        assert summary == "They asked me to go; I looked at a."
        fresh = agent()
        fresh.user("go")
        fresh.user(f"The story so far: {summary}")
        await s.ask(fresh)  # c3
        e = await s.end()
        assert e.trained == {"c1", "c2", "c3"} and not e.continues("c3", "c2")
        assert sum(t.n_trainable for t in e.outcome.trajectories) == sum(c.n_completion for c in e.calls.values())

    tell(story, CALL % "a", "They asked me to go; I looked at a.", "done")


@EACH
def test_a_summary_that_comes_back_as_the_assistants(tell: Any, agent: Any) -> None:
    """A reply's text as an assistant's message of another conversation: not the reply."""

    async def story(s: Story) -> None:
        a = agent(system="You summarise.")
        a.user("All of it, as text.")
        await s.ask(a)
        b = agent()
        b.user("What did we do so far?")
        b.assistant("We did a.")
        b.user("go on")
        await s.ask(b)
        e = await s.end()
        assert not e.continues("c2", "c1") and "c2" in e.trained

    tell(story, "We did a.", "done")


@EACH
def test_a_sub_agent_has_its_own_root_and_a_title_has_no_weight(tell: Any, agent: Any) -> None:
    async def story(s: Story) -> None:
        title = agent(system="Make a title.", tools=())
        title.user("go")
        await s.ask(title)  # c1
        a = agent()
        a.user("go")
        said = await s.ask(a)  # c2
        helper = agent(system="You are a helper.", tools=("bash", "read"))
        helper.user("look at a")
        inner = await s.ask(helper)  # c3
        helper.tool(inner.calls[0][0], "out")
        found = (await s.ask(helper)).text  # c4
        a.tool(said.calls[0][0], found)
        await s.ask(a)  # c5
        fresh = agent()
        fresh.user(f"So far: {found}")
        await s.ask(fresh)  # c6
        e = await s.end()
        assert e.trained == {"c2", "c3", "c4", "c5", "c6"} and e.calls["c1"].leaf_class is LeafClass.SIDE
        assert e.calls["c4"].leaf_class is LeafClass.SUB_AGENT, "it was an answer before it was repeated"
        assert e.continues("c4", "c3") and e.continues("c5", "c2") and not e.continues("c3", "c2")
        assert {t.leaf_class for t in e.outcome.trajectories} == {LeafClass.MAIN, LeafClass.SUB_AGENT}

    tell(story, "A title", CALL % "delegate", CALL % "inner", "it is all right with the file a", "done", "done")


@EACH
def test_a_users_turn_in_the_middle(tell: Any, agent: Any) -> None:
    """Between two calls of tools, and replies whose reasoning does not come back."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        said = await s.ask(a)
        a.tool(said.calls[0][0], "out")
        a.user("And be quick.")
        await s.ask(a)
        a.user("Again.")
        await s.ask(a)
        e = await s.end()
        assert e.continues("c2", "c1") and e.continues("c3", "c2") and e.trained == {"c1", "c2", "c3"}

    tell(story, "<think>\nhm\n</think>\n\n" + CALL % "a", "<think>\nso\n</think>\n\none", "two")


@EACH
def test_usage_is_what_was_sent_and_sampled(tell: Any, agent: Any) -> None:
    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        for turn in range(3):
            said = await s.ask(a)
            prompt, ids = list(s.g.engines[0].prompts.values())[-1], list(s.g.engines[0].replies.values())[-1][0]
            assert said.usage == (len(prompt), len(ids))
            a.tool(said.calls[0][0], f"out {turn}")

    tell(story, *[CALL % "a"] * 3)


@pytest.mark.parametrize("agent", [Responses])
def test_outputs_of_tools_right_behind_their_calls(tell: Any, agent: Any) -> None:
    """Two calls of one reply, each followed by its output, as some harnesses send them."""

    async def story(s: Story) -> None:
        a = agent()
        a.user("go")
        said = await s.ask(a)
        first, second = a.history[-2:]
        del a.history[-2:]
        for item, (call_id, _, _) in zip((first, second), said.calls, strict=True):
            a.history.append(item)
            a.tool(call_id, "out")
        await s.ask(a)
        assert (await s.end()).continues("c2", "c1")

    tell(story, CALL % "a" + "\n" + CALL % "b", "done")
