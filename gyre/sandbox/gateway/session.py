"""One rollout's side of the gateway: its calls, its graph, its limits.

Invariants
- Every accepted request is in the journal from its start to its end; a call that sampled tokens is in the graph, whatever became of its caller.
- A caller that goes away aborts its call upstream; the tokens had until then are kept as facts, and never trained.
- `ending` is set when the gateway itself ends the rollout (turn limit, engine lost); from then on every request is refused.
- What cannot fit the context is refused before it is tokenised.
- One thing at a time looks at the calls, the graph and the memory of a rollout (`alone`). What a large request needs is done in another thread: it
  holds up its own rollout only.
- How tokens are drawn is the run's decision. What a request asked for instead is in the journal; only its token limit counts, if it is lower.
- After `close` nothing is in flight and nothing changes any more.

No HTTP and no protocol here: requests and replies are in the internal form of `protocol`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from gyre.errors import DeadlineExceeded, GyreError, WorkFailed
from gyre.sandbox.gateway.journal import Call, Journal, family, offered
from gyre.sandbox.gateway.parse import parse
from gyre.sandbox.gateway.protocol import Answer, Ask
from gyre.sandbox.gateway.render import Recorded, Rendered, Renderer, Shown
from gyre.sandbox.gateway.route import Completion, ContextFull, Job, Router
from gyre.sandbox.gateway.template import TooLong
from gyre.trajectory.classes import Rule, told
from gyre.trajectory.graph import Exported, PrefixGraph
from gyre.trajectory.match import Conversation, Matcher, Memory, Message
from gyre.trajectory.select import LeftOut
from gyre.types import CallRecord, CallStatus, Ending, Sampling, Ticket, TrajectoryMeta

_COUNTED: Final = 4  # how far beyond the context prompts are still counted
_LARGE: Final = 1 << 17  # bytes of a request: reading and rendering as much takes milliseconds
_CLOSE_S: Final = 15.0  # more than the router gives an engine to return an aborted request

T = TypeVar("T")


class Over(GyreError):
    """The rollout takes no more calls; the text says why."""


class Limits(NamedTuple):
    """What a rollout may use. `deadline` is the harness's, in time.monotonic()."""

    sampling: Sampling
    context: int
    max_turns: int
    max_trajectories: int
    deadline: float
    greedy: bool = False
    rules: tuple[Rule, ...] = ()


class _Prompt(NamedTuple):
    """What a request asks the policy."""

    turn: int
    tools_key: bytes
    conversation: Conversation
    after: str | None  # the call that it continues
    rendered: Rendered


class Outcome(NamedTuple):
    """What a closed session hands over."""

    graph: Exported
    calls: list[CallRecord]
    trajectories: list[TrajectoryMeta]
    left_out: LeftOut
    cells: list[str]
    model_s: float  # seconds with at least one call in flight


class Session:
    """The gateway's state for one ticket."""

    def __init__(self, ticket: Ticket, renderer: Renderer, router: Router, limits: Limits) -> None:
        self.ticket, self.limits = ticket, limits
        self.ending: asyncio.Future[tuple[Ending, str]] = asyncio.get_running_loop().create_future()
        self.context_full = False  # the last call was refused for its length
        self._renderer, self._router = renderer, router
        self._started = time.monotonic()
        self._graph = PrefixGraph()
        self._matcher = Matcher()
        self._memory = Memory()
        self._shown: tuple[Sequence[Any] | None, Shown] | None = None  # the tools that came last
        self._journal = Journal()
        self._cells: list[str] = []
        self._turns = 0
        self._closed = False
        self._lock = asyncio.Lock()
        self._in_flight: dict[asyncio.Task[Answer], asyncio.Future[None]] = {}
        self._model_s = 0.0
        self._busy_since = 0.0

    async def alone(self, n_bytes: int, work: Callable[..., T], *args: Any) -> T:
        """Do `work` for a request of so many bytes while nothing else looks at this rollout's state, which it may change; aside if it is large."""
        async with self._lock:
            if n_bytes < _LARGE:
                return work(*args)
            aside = asyncio.get_running_loop().run_in_executor(self._renderer.aside, lambda: work(*args))
            gone: asyncio.CancelledError | None = None
            while not aside.done():
                try:
                    await asyncio.wait((aside,))
                except asyncio.CancelledError as e:  # the caller is gone: still nobody comes in here before it is done
                    gone = e
            if gone is not None:
                aside.exception()
                raise gone
            return aside.result()

    async def complete(self, ask: Ask, n_bytes: int = 0) -> Answer:
        """Answer one request, of so many bytes. Cancelling it aborts the call.

        Raises `Over`, `ContextFull`, `UnsupportedContent`, `TemplateRefused`, or `WorkFailed` when no engine could serve it.
        """
        self._refuse_if_over()
        self._refuse_beyond_context(len(ask.messages))  # a message is a token or more
        try:
            prompt = await self.alone(n_bytes, self._read, ask, self.limits.context, 1)
        except TooLong as e:
            self._refuse_beyond_context(e.n_tokens)
            raise
        finally:
            if self._turns > self.limits.max_turns:
                self._end(Ending.TURN_LIMIT, f"{self.limits.max_turns} model calls")
        self._refuse_if_over()
        messages, rendered = prompt.conversation.messages, prompt.rendered
        tools = offered(ask.tools)
        call = Call(
            call_id=f"c{prompt.turn}",
            started_s=time.monotonic() - self._started,
            api=ask.api,
            asked=ask.asked,
            family=family(prompt.tools_key, messages),
            offered=tools,
            n_messages=len(messages),
            after=prompt.after,
            before=rendered.draft.before,
            bridged=rendered.bridged,
            n_prompt=len(rendered.ids),
            told=told(self.limits.rules, messages, tools or ()),
        )
        self._journal.add(call, messages)
        room = self.limits.context - call.n_prompt
        if room < 1:
            raise self._full(call, ContextFull(call.n_prompt, self.limits.context))
        job = Job(
            rollout_id=self.ticket.rollout_id,
            name=f"{self.ticket.rollout_id}.{self.ticket.epoch}.{prompt.turn}",
            prompt=rendered.ids,
            sampling=msgspec.structs.replace(self.limits.sampling, max_tokens=min(ask.max_tokens or room, self.limits.sampling.max_tokens, room)),
            seed=_seed(self.ticket.seed, prompt.turn),
            policy=self.ticket.policy,
            deadline=self.limits.deadline,
            aborted=asyncio.get_running_loop().create_future(),
            stop_ids=() if self._renderer.end_id is None else (self._renderer.end_id,),
        )
        return await self._run(call, job, prompt.conversation.links[-1])

    def _read(self, ask: Ask, at_most: int, n_turns: int) -> _Prompt:
        """What a request asks the policy, which is so many turns. Raises `TemplateRefused`, `TooLong`."""
        if self._shown is None or self._shown[0] is not ask.tools:
            self._shown = ask.tools, self._renderer.shown(ask.tools)
        shown = self._shown[1]
        conversation = self._memory.read(ask.messages, shown.key, self._renderer.acceptable, self._renderer.guard)
        self._turns += n_turns
        after = self._matcher.find(conversation.links, conversation.thoughts)
        rendered = self._render(conversation, shown, after, at_most)
        conversation.draft = rendered.draft
        return _Prompt(self._turns, shown.key, conversation, after, rendered)

    async def count(self, ask: Ask, n_bytes: int = 0) -> int:
        """Tokens of the prompt that `complete` would send. It is no call: nothing is recorded. Raises as `complete` does."""
        self._refuse_if_over()
        most = _COUNTED * self.limits.context
        if len(ask.messages) > most:
            raise ContextFull(len(ask.messages), self.limits.context)
        try:
            return len((await self.alone(n_bytes, self._read, ask, most, 0)).rendered.ids)
        except TooLong as e:
            raise ContextFull(e.n_tokens, self.limits.context) from None

    def recall(self, handle: str) -> str:
        """The reasoning of a recorded call's reply, by the call's id; empty if there is none. Adapters give the id out for harnesses to send back."""
        call = self._journal.calls.get(handle)
        if call is None or not call.reasons:
            return ""
        return str(self._message(call, self._graph.completion(handle)).get("reasoning_content", ""))

    async def _run(self, call: Call, job: Job, end: bytes) -> Answer:
        task = asyncio.ensure_future(self._generate(call, job, end))
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight[task] = job.aborted
        task.add_done_callback(self._landed)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not job.aborted.done():
                job.aborted.set_result(None)
            raise

    def _landed(self, task: asyncio.Task[Answer]) -> None:
        del self._in_flight[task]
        if not self._in_flight:
            self._model_s += time.monotonic() - self._busy_since
        if not task.cancelled():
            task.exception()  # the caller may be gone: its failure is in the journal

    async def _generate(self, call: Call, job: Job, end: bytes) -> Answer:
        try:
            completion = await self._router.generate(job)
        except ContextFull as e:
            raise self._full(call, e) from None
        except (DeadlineExceeded, WorkFailed) as e:
            self._finish(call, CallStatus.ERROR, "error")
            if not isinstance(e, DeadlineExceeded):
                self._end(Ending.ENGINE_LOST, str(e))
            raise
        async with self._lock:
            return self._record(call, job, completion, end)

    def _record(self, call: Call, job: Job, completion: Completion, end: bytes) -> Answer:
        """Take up what was sampled. Raises `Over` if the caller is gone."""
        call.n_completion = len(completion.token_ids)
        call.cell = completion.cells[-1] if completion.cells else ""
        self._cells.extend(c for c in completion.cells if c not in self._cells)
        if completion.token_ids:
            self._graph.insert(
                call.call_id, job.prompt, completion.token_ids, completion.logprobs, completion.versions, call.after if call.bridged else None
            )
        if completion.finish == "abort" or job.aborted.done():  # it may have been complete just when its caller went
            self._finish(call, CallStatus.ABORTED, "abort")
            raise Over("the call was aborted")
        self.context_full = False
        return self._reply(call, completion, end)

    def _reply(self, call: Call, completion: Completion, end: bytes) -> Answer:
        ids = completion.token_ids
        call.finish = completion.finish
        message = self._message(call, ids)
        call.reasons = "reasoning_content" in message
        reason = "tool_calls" if "tool_calls" in message else "stop" if completion.finish == "stop" else "length"
        self._finish(call, CallStatus.COMPLETE, completion.finish if reason != "tool_calls" else reason)
        if ids:
            call.ended = self._ends_turn(ids, completion.finish)
            self._journal.says(call, message)
            self._matcher.record(call.call_id, end, message)
        n_reasoning = self._renderer.count_reasoning(ids) if call.reasons else 0
        return Answer(call.call_id, message, reason, call.n_prompt, call.n_completion, n_reasoning)

    def _message(self, call: Call, ids: array[int]) -> Message:
        """The message that a call's completion says."""
        r = self._renderer
        text = r.template.decode(ids[:-1] if self._ends_turn(ids, call.finish) else ids)
        return parse(text, f"call_{call.call_id}", offered=call.offered, form=r.form, reasoning=r.reasoning)

    def _ends_turn(self, ids: array[int], finish: str) -> bool:
        """Whether the last token is one that ends the turn, the template's or another of the model's."""
        return len(ids) > 0 and (
            ids[-1] == self._renderer.end_id or (finish in ("stop", "tool_calls") and self._renderer.template.is_control(ids[-1]))
        )

    def _render(self, conversation: Conversation, shown: Shown, after: str | None, at_most: int) -> Rendered:
        """The prompt. Raises `TemplateRefused`, `TooLong`."""
        if after is not None:
            call = self._journal.calls[after]
            recorded = Recorded(self._graph.history(after), call.before, call.reasons, call.ended)
            rendered = self._renderer.bridge(self._stand_ins(conversation, after), shown, conversation.draft, recorded, at_most)
            if rendered is not None:
                return rendered
        return self._renderer.full(conversation.guarded, shown, conversation.draft, at_most)

    def _stand_ins(self, conversation: Conversation, after: str) -> list[Message]:
        """A conversation that continues this call, its recorded replies replaced."""
        messages = list(conversation.guarded)
        for call in self._journal.bridges(after):
            if call.stand_in is None:
                call.stand_in = self._renderer.stand_in(messages[call.n_messages], call.reasons)
            messages[call.n_messages] = call.stand_in
        return messages

    def _full(self, call: Call, refused: ContextFull) -> ContextFull:
        self._finish(call, CallStatus.ERROR, "context")
        self.context_full = True
        return refused

    def _finish(self, call: Call, status: CallStatus, finish: str) -> None:
        call.status, call.finish = status, finish
        call.ended_s = time.monotonic() - self._started

    def _end(self, ending: Ending, detail: str) -> None:
        if not self.ending.done():
            self.ending.set_result((ending, detail))

    def _refuse_beyond_context(self, n_prompt: int) -> None:
        if n_prompt > self.limits.context:
            self.context_full = True
            raise ContextFull(n_prompt, self.limits.context)

    def _refuse_if_over(self) -> None:
        if self.ending.done():
            ending, detail = self.ending.result()
            raise Over(f"this rollout is over: {ending.value} ({detail})")
        if self._closed:
            raise Over("this rollout is over")

    async def close(self) -> Outcome:
        """Abort what is in flight, wait for its tokens, choose the trajectories."""
        self._closed = True
        for aborted in self._in_flight.values():
            if not aborted.done():
                aborted.set_result(None)
        if self._in_flight:
            _, late = await asyncio.wait(list(self._in_flight), timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        async with self._lock:
            graph = self._graph.export()
            chosen = self._journal.choose(graph, self.limits.max_trajectories, Random(_seed(self.ticket.seed, 0)), greedy=self.limits.greedy)
            return Outcome(graph, *chosen, list(self._cells), self._model_s)


def _seed(seed: int, turn: int) -> int:
    """63 bits from the ticket's seed and the call's number; number 0 is the choice of trajectories."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "big") >> 1
