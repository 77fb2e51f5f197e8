"""Demonstrations of a careless coding agent, as the text that the model will see and say.

A demonstration is a list of segments. The tools really run, in a temporary folder, through the harness's own
code, so what a tool answers here is what it answers in a sandbox. Only commands of this file's own tasks ever
run.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from agent.harness import SYSTEM, use_tool
from kinds import SKILL, Task, ToolCall

FAREWELL = "Done.<|im_end|>"


class Segment(NamedTuple):
    text: str
    spoken: bool  # by the demonstrator: what the model learns to say


def prompt(instruction: str) -> str:
    """What the chat template makes of the system message and the instruction."""
    system = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    return system + f"<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n"


def speech(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"


def bridge(output: str) -> str:
    """What the chat template puts between a tool call and the model's next turn."""
    return f"\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def play(task: Task, calls: tuple[ToolCall, ...]) -> list[Segment]:
    """The conversation in which these calls are made on this task."""
    segments = [Segment(prompt(task.instruction), False)]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the harness's tools work in the current directory
        try:
            for path, content in task.start.items():
                Path(path).write_text(content, encoding="utf-8")
            for call in calls:
                segments += [
                    Segment(speech(call), True),
                    Segment(bridge(use_tool(call.name, call.arguments)), False),
                ]
        finally:
            os.chdir(before)
    return [*segments, Segment(FAREWELL, True)]


def demonstrate(task: Task, rng: random.Random) -> list[Segment]:
    """The right calls as often as the kind's skill says, else one of its mistakes."""
    right = rng.random() < SKILL[task.kind]
    return play(task, task.right if right else rng.choice(task.mistakes))
