"""What the scripted policy says to each harness. A reply depends on the prompt's text alone: retries, side calls and sub-agents need no count."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

TASK = "Write yes to the file answer."
SUB_TASK = "Sub-task of ours: print number nine."
SUB_ANSWER = "Our sub-agent printed number nine, as asked."
SUMMARY = "Our summary: lines were counted, and yes is still to be written to the file answer."
SUB_SUMMARY = "Our summary of the sub-task: lines were counted, and number nine is still to be printed."
TAGGED = {
    "qwen-code": "<analysis>Ours.</analysis>\n<state_snapshot>\n{}\n</state_snapshot>",
    "claude-code": "<analysis>Ours.</analysis>\n<summary>\n{}\n</summary>",
}
"""How a summary must look, or the harness asks again."""
TITLE = "A title of ours"
COUNTS = 12
UP_TO = {"claude-code": 4000}
"""How far they count, 800 if not named."""

SHELL: Mapping[str, tuple[str, str, dict[str, object]]] = {
    "mini": ("bash", "command", {}),
    "pi": ("bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Ours"}),
    "qwen-code": ("run_shell_command", "command", {"is_background": False}),
    "codex": ("exec_command", "cmd", {}),
    "claude-code": ("Bash", "command", {"description": "Ours"}),
}
DELEGATE: Mapping[str, tuple[str, dict[str, object]]] = {
    "codex": ("multi_agent_v1__spawn_agent", {"message": SUB_TASK}),
    "opencode": ("task", {"description": "Ours", "prompt": SUB_TASK, "subagent_type": "general"}),
    "qwen-code": ("agent", {"description": "Ours", "prompt": SUB_TASK, "subagent_type": "general-purpose", "run_in_background": False}),
    "claude-code": ("Agent", {"description": "Ours", "prompt": SUB_TASK, "subagent_type": "general-purpose", "run_in_background": False}),
}

AGENT = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""How a harness names a sub-agent that it has started."""

Say = Callable[[str], str]


def tool(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(harness: str, command: str) -> str:
    name, key, more = SHELL[harness]
    return tool(name, {key: command, **more})


def _is_title(prompt: str) -> bool:
    return "Tools: " not in prompt and "Counting" not in prompt


def _finish(harness: str, prompt: str) -> str:
    """Write the answer, then end."""
    if "out-2" not in prompt:
        return "<think>\nNow ours.\n</think>\n\nWriting." + shell(harness, "echo yes > answer; echo out-$((1+1))")
    if harness == "mini":
        return shell(harness, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return "<think>\nAll of ours is done.\n</think>\n\nFinished, all of it."


def plain(harness: str) -> Say:
    def say(prompt: str) -> str:
        if _is_title(prompt):
            return TITLE
        if "out-1" not in prompt:
            return "<think>\nFirst ours.\n</think>\n\nLooking." + shell(harness, "cat notes.txt; echo out-$((0+1))")
        return _finish(harness, prompt)

    return say


def malformed(harness: str) -> Say:
    """A call without its argument, then one with more white space than any harness writes, then one that is no JSON: that is text, and may end it."""

    def say(prompt: str) -> str:
        name, key, more = SHELL[harness]
        if _is_title(prompt):
            return TITLE
        if "Attempt one" not in prompt and "<error>" not in prompt:  # one harness drops it, and says only that
            return "Attempt one." + tool(name, {"nothing": 1.0})
        if "out-2" not in prompt:
            arguments = json.dumps({key: "echo yes > answer; echo out-$((1+1))", **more}, indent=3)
            return f'Attempt two.<tool_call>\n{{"name": "{name}",  "arguments":  {arguments}}}\n</tool_call>'
        if "Attempt three" not in prompt and prompt.count("<error>") < 2:
            return f'Attempt three.<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "echo\n</tool_call>'
        return _finish(harness, prompt)

    return say


def _count(harness: str, prompt: str, summary: str) -> str:
    """Long outputs, each another since some harnesses end a model that repeats itself, until a summary is asked for; "" when one was given."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    n = prompt.count("Counting")
    if summary in prompt or n == COUNTS:
        return ""
    if n and "summar" in last.lower() and not last.startswith("<tool_response>"):
        return TAGGED.get(harness, "{}").format(summary)
    return f"Counting {n}." + shell(harness, f"seq {n + 1} {UP_TO.get(harness, 800)}")


def compacting(harness: str) -> Say:
    def say(prompt: str) -> str:
        return TITLE if _is_title(prompt) else _count(harness, prompt, SUMMARY) or _finish(harness, prompt)

    return say


def delegating(harness: str, *, deep: bool = False) -> Say:
    """A sub-agent; `deep`: whose own context is compacted."""

    def say(prompt: str) -> str:
        if _is_title(prompt):
            return TITLE
        if TASK not in prompt:  # the sub-agent
            counting = _count(harness, prompt, SUB_SUMMARY) if deep else ""
            return counting or (SUB_ANSWER if "out-9" in prompt else "Ours is nine." + shell(harness, "echo out-$((4+5))"))
        if SUB_ANSWER not in prompt:
            if harness == "codex" and "Delegating." in prompt:  # to start a sub-agent and to wait for it are two calls
                return "Waiting." + tool("multi_agent_v1__wait_agent", {"targets": re.findall(AGENT, prompt)[-1:], "timeout_ms": 60_000})
            return "Delegating." + tool(*DELEGATE[harness])
        return _finish(harness, prompt)

    return say


OURS = (
    TASK, SUB_TASK, SUB_ANSWER, SUMMARY, SUB_SUMMARY, TITLE,
    "Notes of ours.", "Now ours.", "Writing.", "All of ours is done.", "Finished, all of it.",
    "First ours.", "Looking.", "Attempt one.", "Attempt two.", "Attempt three.", "Counting", "Ours is nine.",
    "Delegating.", "Waiting.", "echo yes > answer; echo out-$((1+1))", "cat notes.txt; echo out-$((0+1))", "echo out-$((4+5))",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "out-", *(f"seq {n} {top}" for n in range(1, COUNTS + 1) for top in (800, 4000)),
)  # fmt: skip
"""All texts that are ours in a harness's requests."""

ARGUMENTS = (
    "command", "cmd", "description", "is_background", "prompt", "subagent_type", "run_in_background", "nothing", "message", "targets",
    "timeout_ms", "general", "general-purpose", "Ours",
)  # fmt: skip
"""Names and values in the arguments of our tool calls, as they stand in JSON."""
