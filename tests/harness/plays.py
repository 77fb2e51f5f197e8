"""Which harness is driven through what: the table of the tests that run them and of the recordings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import scenarios
from driver import Fault

from gyre.types import Ending


class Play(NamedTuple):
    """`least` are the leaf classes that must be among the calls, `end` is the ending and the reward."""

    harness: str
    name: str
    say: scenarios.Say
    fault: Fault = lambda n, path, body: ""
    keys: Mapping[str, Any] = {}
    least: frozenset[str] = frozenset(["main"])
    end: tuple[Ending, float] = (Ending.FINISHED, 1.0)


CONTEXT = {"mini": 12_000, "pi": 14_000, "opencode": 40_000, "qwen-code": 110_000, "codex": 50_000, "claude-code": 110_000}
"""In which each compacts, and mini, which does not, ends. With the tests' tokenizer, of hardly more than a byte per token, first prompts take
3,000 (mini) to 67,000 (qwen-code)."""


def _rough(n: int, path: str, body: bytes) -> str:
    return {2: "500", 4: "drop"}.get(n, "")


def _all() -> list[Play]:
    plays = []
    for harness in scenarios.SHELL:
        plays.append(Play(harness, "plain", scenarios.plain(harness)))
        plays.append(Play(harness, "rough", scenarios.malformed(harness), _rough))
        keys = {"context": CONTEXT[harness], "max_tokens": 1024}
        if harness == "mini":
            plays.append(Play(harness, "full", scenarios.compacting(harness), keys=keys, end=(Ending.CONTEXT_FULL, 0.0)))
        else:
            plays.append(Play(harness, "compacting", scenarios.compacting(harness), keys=keys, least=frozenset(["main", "main-summary"])))
        if harness in scenarios.DELEGATE:
            least = frozenset(["main", "sub-agent"])
            plays.append(Play(harness, "delegating", scenarios.delegating(harness), least=least))
            plays.append(Play(harness, "deep", scenarios.delegating(harness, deep=True), keys=keys, least=least | {"sub-agent-summary"}))
    return plays


PLAYS = _all()
