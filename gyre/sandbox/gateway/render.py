"""From a request's messages to the ids that the engine is sent: rendered in full, or bridged.

Invariants
- A bridged prompt is the recorded prompt, the recorded completion exactly as sampled, and the template's text after the assistant's turn for the
  new messages, tokenised on its own. Nothing that the policy sampled is ever tokenised again.
- A bridge is used only if the template, shown the longer conversation, still writes the earlier part as it did (`Rendered.before`), and still shows
  the reasoning of the reply. Templates that strip earlier reasoning when a user speaks fail that test: then the prompt is rendered in full, and the
  graph branches where its tokens differ.

- What a template would refuse is put otherwise where that can be done without a loss: system messages behind the first, arguments that are no object.

How it works: recorded replies are replaced by sentinels (so how a harness spells them does not matter), the conversation is rendered once, and the
text cut behind the end-of-turn token that follows the last sentinel. Which token ends a turn, what opens one, how tool calls are written and what is
refused is found out once by rendering short conversations.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from threading import Lock
from typing import Any, Final, NamedTuple

from gyre.sandbox.gateway.parse import Format, Reasoning
from gyre.sandbox.gateway.resume import Mark
from gyre.sandbox.gateway.template import ChatTemplate, TemplateRefused
from gyre.trajectory.match import Message, canonical

_REPLY: Final = "GYRE-REPLY-7c1f"
_REASONING: Final = "GYRE-REASONING-7c1f"
_CACHED_TOOLS: Final = 64
_NAME: Final = "gyre_probe"
_USER: Final[Message] = {"role": "user", "content": "a"}
_CALL: Final[Message] = {"id": "call_0", "type": "function", "function": {"name": _NAME, "arguments": {"key": "value"}}}


class Before(NamedTuple):
    """What a conversation rendered to without the opening of the reply: length and digest of the text. The digest is copied, never updated."""

    length: int
    digest: blake2b


class Draft(NamedTuple):
    """What a conversation's last rendering left for the next one."""

    marks: dict[int, Mark]
    text: str
    before: Before


class Rendered(NamedTuple):
    """A prompt's ids, how it was rendered, which recognises the conversation when it comes back; `bridged` says how the ids were made."""

    ids: array[int]
    draft: Draft
    bridged: bool


class Recorded(NamedTuple):
    """A call to continue: its prompt and completion, what its prompt was rendered to, whether its reply held reasoning and ended its turn itself."""

    ids: array[int]
    before: Before
    reasons: bool
    ended: bool


class Shown(NamedTuple):
    """Tools as the template is given them; `key`: equal keys mean equal prompts, for instance if tools are not shown at all."""

    tools: Sequence[Any] | None
    key: bytes


_NOTHING: Final = Before(0, blake2b(digest_size=16))


class Renderer:
    """One model's way to write conversations. Shared by all rollouts; keeps only caches. `aside` is a thread for what would hold up the others."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.end_text, self.end_id = self._find_end()
        self.opening = self._find_opening()
        self.form = self._find_format()
        self.reasoning = self._find_reasoning()
        self._unthink: int | None = template.tokenizer.token_to_id("</think>")
        late = [{"role": "system", "content": "b"}, _USER, {"role": "system", "content": _REPLY}, _USER]
        self._late_system = self._try(late).find(_REPLY) >= 0
        strange = {**_CALL, "function": {"name": _NAME, "arguments": "x"}}
        self._any_arguments = self._try([_USER, {"role": "assistant", "content": "", "tool_calls": [strange]}, _USER]) != ""
        self._calls_hide_text = self._find_hidden()
        self._shown: OrderedDict[bytes, Shown] = OrderedDict()  # by digest: tools may be large
        self._lock = Lock()  # of these
        self.aside = ThreadPoolExecutor(1, "gateway")

    def shown(self, tools: Sequence[Any] | None) -> Shown:
        """Tools for `full` and `bridge`."""
        spelling = canonical(tools or [])
        known = blake2b(spelling, digest_size=16).digest()
        shown = self._shown.get(known)
        if shown is None:
            guarded = self.template.guard(tools) if tools else None
            try:
                key = _digest(self.template.render([{"role": "user", "content": _REPLY}], guarded, reply_follows=False))
            except TemplateRefused:
                key = known
            shown = Shown(guarded, key)
            with self._lock:
                self._shown[known] = shown
                if len(self._shown) > _CACHED_TOOLS:
                    self._shown.popitem(last=False)
        return shown

    def acceptable(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template will take them. A system message that it refuses joins the first ones, or speaks as the user."""
        out: list[Message] = []
        for message in messages:
            if message["role"] == "system" and out and not self._late_system:
                if out[-1]["role"] == "system":
                    out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
                    continue
                message = {**message, "role": "user"}
            out.append(message)
        return out

    def guard(self, message: Message) -> Message:
        """A message with control tokens cut, and arguments that the template can write; itself if nothing is to be done."""
        has = self.template.has_control
        calls = message.get("tool_calls")
        if has(message["content"]) or has(message.get("reasoning_content", "")) or (calls and has(canonical(calls).decode())):
            message = self.template.guard(message)
        if calls and not self._any_arguments:
            message = {**message, "tool_calls": [_with_object(c) for c in message["tool_calls"]]}
        return message

    def full(self, guarded: Sequence[Message], shown: Shown, draft: Draft | None, context: int) -> Rendered:
        """Render and tokenise messages that were guarded. Raises `TemplateRefused`, and `TooLong` if that cannot be `context` tokens."""
        text, marks = self._render(guarded, shown, draft)
        return Rendered(self.template.encode(text, context), self._draft(text, marks, _NOTHING), False)

    def bridge(self, stand_ins: Sequence[Message], shown: Shown, draft: Draft | None, recorded: Recorded, context: int) -> Rendered | None:
        """Continue a recorded call with messages that were guarded: None if the template does not allow it. Raises `TemplateRefused`, `TooLong`.

        In `stand_ins` the replies recorded since the conversation was last rendered in full are replaced by their `stand_in`; the last of them is the
        reply of the call to continue.
        """
        if self.end_id is None:
            return None
        text, marks = self._render(stand_ins, shown, draft)
        before = recorded.before
        known = draft is not None and draft.before is before  # then there is no need for a digest
        if not (text.startswith(draft.text) if draft and known else _digest(text[: before.length]) == before.digest.digest()):
            return None
        at = text.find(_REPLY, before.length)
        if at < 0 or (recorded.reasons and text.find(_REASONING, before.length, at) < 0):
            return None
        end = text.find(self.end_text, at)
        if end < 0:
            return None
        bridge = self.template.encode(text[end + len(self.end_text) :] if recorded.ended else text[end:], context)
        return Rendered(recorded.ids + bridge, self._draft(text, marks, before), True)

    def _render(self, messages: Sequence[Message], shown: Shown, draft: Draft | None) -> tuple[str, dict[int, Mark]]:
        marks = dict(draft.marks) if draft else {}
        return self.template.render(messages, shown.tools, reply_follows=True, marks=marks), marks

    def _draft(self, text: str, marks: dict[int, Mark], earlier: Before) -> Draft:
        """A prompt's text begins with what was rendered earlier, which is not looked at again."""
        unopened = text.removesuffix(self.opening)
        digest = earlier.digest.copy()
        digest.update(unopened[earlier.length :].encode())
        return Draft(marks, unopened, Before(len(unopened), digest))

    def stand_in(self, message: Message, reasons: bool) -> Message:
        """A reply whose text is replaced by sentinels, for `bridge`; `reasons`: it held reasoning. Calls keep name and id: templates look them up."""
        out: Message = {"role": "assistant", "content": _REPLY}
        if reasons:
            out["reasoning_content"] = _REASONING
        if "tool_calls" in message and not self._calls_hide_text:
            out["tool_calls"] = [{**c, "function": {"name": c["function"]["name"], "arguments": {}}} for c in message["tool_calls"]]
        return out

    def count_reasoning(self, ids: array[int]) -> int:
        """Tokens of a completion up to the end of its reasoning, which it has; all of them if that was cut off."""
        if self._unthink is None:
            return 0
        return next((i + 1 for i, token in enumerate(ids) if token == self._unthink), len(ids))

    def _find_end(self) -> tuple[str, int | None]:
        """The token that ends an assistant's turn: the first added token that the template writes behind the reply."""
        text = self._try([_USER, {"role": "assistant", "content": _REPLY}, {"role": "user", "content": "b"}])
        _, found, tail = text.partition(_REPLY)
        added = {token.content: i for i, token in self.template.tokenizer.get_added_tokens_decoder().items()}
        positions = [(tail.find(content), -len(content), content) for content in added if content and content in tail]
        if not found or not positions:
            return "", None
        content = min(positions)[2]
        return content, added[content]

    def _find_opening(self) -> str:
        """What the template writes to open the assistant's turn."""
        conversation = [{"role": "user", "content": "a"}]
        try:
            without = self.template.render(conversation, None, reply_follows=False)
            text = self.template.render(conversation, None, reply_follows=True)
        except TemplateRefused:
            return ""
        return text[len(without) :] if text.startswith(without) else ""

    def _find_format(self) -> Format:
        """How the template itself writes a tool call."""
        text = self._try([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}])
        if f"<function={_NAME}>" in text:
            return Format.XML
        return Format.LLAMA if '"parameters"' in text and "<tool_call>" not in text else Format.HERMES

    def _find_reasoning(self) -> Reasoning:
        """Whether the template tells reasoning from text, be it to leave it out later. If not, `<think>` is a part of the text."""
        shown = self._try([_USER, {"role": "assistant", "content": _REPLY, "reasoning_content": _REASONING}])
        kept = self._try([_USER, {"role": "assistant", "content": f"<think>\n{_REASONING}\n</think>\n\n{_REPLY}"}, _USER])
        if self.opening.rstrip().endswith("<think>"):
            return Reasoning.OPENED
        return Reasoning.TAGGED if _REASONING in shown or _REASONING not in kept else Reasoning.NONE

    def _find_hidden(self) -> bool:
        """Whether the template leaves out the text of a reply that calls tools: then stand-ins are shown without their calls."""
        reply = {"role": "assistant", "content": _REPLY, "tool_calls": [_CALL, {**_CALL, "id": "call_1"}]}
        told = [{"role": "tool", "tool_call_id": f"call_{i}", "name": _NAME, "content": "b"} for i in range(2)]
        return _REPLY not in self._try([_USER, reply, *told])

    def _try(self, messages: list[Message]) -> str:
        """The template's text for a probe, none if it is refused."""
        try:
            return self.template.render(messages, None, reply_follows=False)
        except TemplateRefused:
            return ""


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _with_object(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": {"input": arguments}}}
