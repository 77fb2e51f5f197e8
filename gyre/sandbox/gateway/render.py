"""From a request's messages to the ids that the engine is sent: rendered in full, or bridged.

Invariants
- A bridged prompt is the recorded prompt, the recorded completion exactly as sampled, and the template's text after the assistant's turn for the
  new messages, tokenised on its own. Nothing that the policy sampled is ever tokenised again.
- A bridge is used only if the template, shown the longer conversation, still writes the earlier part as it did (`Rendered.before`), and still shows
  the reasoning of the reply. Templates that strip earlier reasoning when a user speaks fail that test: then the prompt is rendered in full, and the
  graph branches where its tokens differ.

How it works: recorded replies are replaced by sentinels (so how a harness spells them does not matter), the conversation is rendered once, and the
text cut behind the end-of-turn token that follows the last sentinel. Which token ends a turn, and what opens one, is found out once by rendering a
short conversation.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from gyre.sandbox.gateway.template import ChatTemplate, TemplateRefused
from gyre.trajectory.match import Message, canonical

_REPLY: Final = "GYRE-REPLY-7c1f"
_REASONING: Final = "GYRE-REASONING-7c1f"
_CACHED_TOOLS: Final = 64


class Before(NamedTuple):
    """What a conversation rendered to without the opening of the reply: length and digest of the text."""

    length: int
    digest: bytes


class Rendered(NamedTuple):
    """A prompt's ids; `before` recognises the conversation when it comes back; `bridged` says how the ids were made."""

    ids: array[int]
    before: Before
    bridged: bool


class Reply(NamedTuple):
    """Message number `place` of a conversation is the reply of a recorded call; `reasons`: the reply held reasoning."""

    place: int
    reasons: bool


class Renderer:
    """One model's way to write conversations. Shared by all rollouts; keeps only caches."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.end_text, self.end_id = self._find_end()
        self.opening = self._find_opening()
        self.opens_reasoning = self.opening.rstrip().endswith("<think>")
        self._tool_keys: OrderedDict[bytes, bytes] = OrderedDict()  # by digest: tools may be large

    def tools_key(self, tools: Sequence[Any] | None) -> bytes:
        """Digest of what the template makes of these tools: equal keys mean equal prompts, for instance if tools are not shown at all."""
        spelling = canonical(tools or [])
        known = _digest(spelling)
        key = self._tool_keys.get(known)
        if key is None:
            try:
                text = self.template.render([{"role": "user", "content": _REPLY}], tools or None, reply_follows=False)
            except TemplateRefused:
                text = spelling
            key = self._tool_keys[known] = _digest(text)
            if len(self._tool_keys) > _CACHED_TOOLS:
                self._tool_keys.popitem(last=False)
        return key

    def full(self, messages: Sequence[Message], tools: Sequence[Any] | None, context: int) -> Rendered:
        """Render and tokenise all messages. Raises `TemplateRefused`, and `TooLong` if that cannot be `context` tokens."""
        text = self.template.render(messages, tools or None, reply_follows=True)
        return Rendered(self.template.encode(text, context), self._before(text), False)

    def bridge(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, replies: Sequence[Reply], history: array[int], before: Before, context: int
    ) -> Rendered | None:
        """Continue a recorded call: None if the template does not allow it. Raises `TemplateRefused`, `TooLong`.

        `replies` are the recorded replies among the messages since the conversation was last rendered in full; the last of them is the reply of the
        call to continue. `history` are that call's prompt and completion ids, `before` is what its prompt was rendered to.
        """
        if self.end_id is None:
            return None
        shown = list(messages)
        for reply in replies:
            shown[reply.place] = _stand_in(messages[reply.place], reply.reasons)
        text = self.template.render(shown, tools or None, reply_follows=True)
        if _digest(text[: before.length]) != before.digest:
            return None
        at = text.find(_REPLY, before.length)
        if at < 0 or (replies[-1].reasons and text.find(_REASONING, before.length, at) < 0):
            return None
        end = text.find(self.end_text, at)
        if end < 0:
            return None
        ended = len(history) > 0 and history[-1] == self.end_id
        bridge = self.template.encode(text[end + len(self.end_text) :] if ended else text[end:], context)
        return Rendered(history + bridge, self._before(text), True)

    def _before(self, text: str) -> Before:
        if self.opening and text.endswith(self.opening):
            text = text[: -len(self.opening)]
        return Before(len(text), _digest(text))

    def _find_end(self) -> tuple[str, int | None]:
        """The token that ends an assistant's turn: the first added token that the template writes behind the reply."""
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _REPLY}, {"role": "user", "content": "b"}]
        try:
            text = self.template.render(conversation, None, reply_follows=False)
        except TemplateRefused:
            return "", None
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


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _stand_in(message: Message, reasons: bool) -> Message:
    """A reply with its text replaced by sentinels. Tool calls keep name and id: templates may look them up."""
    out: Message = {"role": "assistant", "content": _REPLY}
    if reasons:
        out["reasoning_content"] = _REASONING
    if "tool_calls" in message:
        out["tool_calls"] = [{**c, "function": {"name": c["function"]["name"], "arguments": {}}} for c in message["tool_calls"]]
    return out
