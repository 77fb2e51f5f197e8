"""A trajectory as an ATIF v1.8 document (Agent Trajectory Interchange Format, Harbor's RFC 0001).

Invariants
- Each call is one agent step, with the ids and log-probs that the engine reported; what the harness said between two calls are steps of its own,
  a tool's answers are observations of the step that called.
- An assistant's turn in the prompt that no call of this trajectory sampled is `is_copied_context`.
- What ATIF has no field for is in `extra`: everything of a "gyre.trajectory/1" record but its arrays, and of a step whether it bears loss.

One document per trajectory; those of one execution share `session_id`, and its sub-agents are inside its first. Prompts are there as ids while those
of a document have a million tokens at most, for they grow with the square of its turns; beyond, the ids are those of the steps before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from gyre.report.conversation import Conversations, Piece
from gyre.report.read import Record

SCHEMA: Final = "ATIF-v1.8"
_OBSERVED: Final = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>", re.S)
_ARRAYS: Final = ("token_ids", "loss_mask", "logprobs", "versions", "calls")
_SOURCES: Final = {"system": "system", "developer": "system", "assistant": "agent"}
_REDACTED: Final = "[left out]"
_PROMPTS: Final = 1 << 20  # tokens of all prompts of a document
Parse = Callable[[str, str], dict[str, Any]]
"""(text of a completion, prefix for ids) to an assistant message in OpenAI's form; arguments of tool calls are JSON objects."""


def document(c: Conversations, parse: Parse, record: Record) -> dict[str, Any]:
    """`record`: a "gyre.trajectory/1" with its tokens."""
    steps: list[dict[str, Any]] = []
    ids: list[int] = record["token_ids"]
    at, role, total = 0, "", 0
    for number, call in enumerate(record["calls"]):
        pieces = list(c.pieces(ids, at, call["start"], role))
        opened = pieces.pop() if pieces and pieces[-1].role == "assistant" else None  # what the template says before the model goes on
        for piece in pieces:
            _context(c, ids, piece, steps)
        lead = c.text(ids, opened) if opened is not None else ""
        steps.append(_call(c, parse, record, call, number, lead))
        at, role, total = call["end"], "assistant", total + call["start"]
    for piece in c.pieces(ids, at, len(ids), role):
        _context(c, ids, piece, steps)
    harness = record["harness"].split()
    return {
        "schema_version": SCHEMA, "session_id": record["rollout_id"], "trajectory_id": record["trajectory_id"],
        "agent": {"name": harness[0].rpartition("/")[2] if harness else "unknown", "version": "unknown",
                  "extra": {"command": record["harness"], "leaf_class": record["leaf_class"]}},
        "steps": [{"step_id": i, **step} for i, step in enumerate(steps, 1)],
        "final_metrics": {"total_prompt_tokens": total, "total_completion_tokens": sum(c["end"] - c["start"] for c in record["calls"]),
                          "total_steps": len(steps)},
        "extra": {k: v for k, v in record.items() if k not in _ARRAYS},
    }  # fmt: skip


def documents(c: Conversations, parse: Parse, records: list[Record]) -> list[dict[str, Any]]:
    """One execution's trajectories, those of its sub-agents inside the first of another class."""
    made = [(document(c, parse, r), (r["leaf_class"] or "").startswith("sub-agent")) for r in records]
    own, subs = [d for d, is_sub in made if not is_sub], [d for d, is_sub in made if is_sub]
    if own and subs:
        own[0]["subagent_trajectories"] = subs
    return own or subs


def _call(c: Conversations, parse: Parse, record: Record, call: Record, number: int, lead: str) -> dict[str, Any]:
    """The agent step of one call. ATIF knows no null among log-probs."""
    start, end = call["start"], call["end"]
    ids, logprobs = record["token_ids"][start:end], record["logprobs"][start:end]
    text = c.text(ids, Piece("assistant", 0, len(ids), 0))
    message = parse(lead + text, f"{call['call_id']}.{number}")
    metrics = {"prompt_tokens": start, "completion_tokens": end - start, "completion_token_ids": ids}
    if sum(x["start"] for x in record["calls"]) <= _PROMPTS:
        metrics["prompt_token_ids"] = record["token_ids"][:start]
    step = {
        "source": "agent", "message": message.get("content") or "", "llm_call_count": 1,
        "metrics": metrics if None in logprobs else {**metrics, "logprobs": logprobs},
        "extra": {"call_id": call["call_id"], "trained": any(record["loss_mask"][start:end]), "versions": record["versions"][start:end]},
    }  # fmt: skip
    if message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = list(_tool_calls(message["tool_calls"]))
    return step


def _tool_calls(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for call in calls:
        yield {"tool_call_id": call["id"], "function_name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}


def _context(c: Conversations, ids: list[int], piece: Piece, steps: list[dict[str, Any]]) -> None:
    """Add what was said between calls: a tool's answers to the step they answer, all else as a step."""
    text = c.text(ids, piece)
    if not text.strip():
        if piece.role not in ("system", "developer") or piece.body == piece.end:
            return
        text = _REDACTED
    calls = steps[-1].get("tool_calls") if steps else None
    answers = _OBSERVED.findall(text) if piece.role not in ("tool", "ipython") else [text]
    if answers and calls is not None and not _OBSERVED.sub("", text).strip():
        results = steps[-1].setdefault("observation", {"results": []})["results"]
        for answer in answers:
            known = {"source_call_id": calls[len(results)]["tool_call_id"]} if len(results) < len(calls) else {}
            results.append({**known, "content": answer})
        return
    step: dict[str, Any] = {"source": _SOURCES.get(piece.role, "user"), "message": text}
    steps.append({**step, "is_copied_context": True} if step["source"] == "agent" else step)
