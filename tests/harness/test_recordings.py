"""What each harness asked for, recorded (record.py) and replayed at the gateway: every sampled token of a chosen trajectory is the engine's own."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from driver import FIRST, a_ticket, check_graph, make_renderer, scripted
from plays import PLAYS
from redact import redact

from gyre.sandbox.gateway.endpoint import Endpoint
from gyre.sandbox.gateway.http import Request
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.session import Limits, Outcome, Session
from gyre.sandbox.harness.presets import PRESETS
from gyre.trajectory.classes import rules_of
from gyre.trajectory.flatten import flatten
from gyre.types import CallStatus, LeafClass, Sampling

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json.gz"))
J_MAX = 5
M, MS, SUB, SS, SIDE = LeafClass.MAIN, LeafClass.MAIN_SUMMARY, LeafClass.SUB_AGENT, LeafClass.SUB_AGENT_SUMMARY, LeafClass.SIDE
CLASSES: dict[str, list[LeafClass]] = {
    "mini-plain": [M] * 3,
    "mini-rough": [M] * 5,
    "mini-full": [M] * 4,
    "pi-plain": [M] * 3,
    "pi-rough": [M] * 4,
    "pi-compacting": [*[M] * 4, MS, M, M],
    "opencode-plain": [SIDE, *[M] * 3],
    "opencode-rough": [SIDE, *[M] * 4],
    "opencode-compacting": [SIDE, *[M] * 5, MS, M, M],
    "opencode-delegating": [SIDE, M, SUB, SUB, M, M],
    "opencode-deep": [SIDE, M, *[SUB] * 7, SS, SUB, SUB, M, M],
    "qwen-code-plain": [M] * 3,
    "qwen-code-rough": [M] * 3,
    "qwen-code-compacting": [*[M] * 4, MS, M, M],
    "qwen-code-delegating": [M, SUB, SUB, M, M],
    "qwen-code-deep": [M, *[SUB] * 9, SS, SUB, SUB, M, M],
    "codex-plain": [M] * 3,
    "codex-rough": [M] * 4,
    "codex-compacting": [*[M] * 5, MS, M, M],
    "codex-delegating": [M, M, SUB, SUB, M, M],
    "codex-deep": [M, M, *[SUB] * 8, SS, SUB, SUB, M, M],
    "claude-code-plain": [M] * 3,
    "claude-code-rough": [M] * 4,
    "claude-code-compacting": [*[M] * 4, MS, M, M],
    "claude-code-delegating": [M, SUB, SUB, M, M],
    "claude-code-deep": [M, *[SUB] * 7, SS, SUB, SUB, M, M],
}
"""What every call of each recording is."""


def rows(file: Path) -> list[tuple[str, Any, str | None]]:
    return [(path, body, text) for path, body, text in json.loads(gzip.decompress(file.read_bytes()))]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(tmp_path_factory.mktemp("model"))


def replay(file: Path, tmp_path: Path, renderer: Renderer, **limits: Any) -> tuple[Outcome, list[list[int]], dict[str, str]]:
    """Send a recording's requests one after the other; the engine says what it said."""
    texts = iter([text for _, _, text in rows(file)])

    async def go() -> tuple[Outcome, list[list[int]], dict[str, str]]:
        harness = file.name.rpartition("-")[0]
        async with scripted(tmp_path, renderer, lambda prompt: next(texts)) as (router, prompts, said):
            values = {"context": 1 << 20, "max_turns": 1000, "max_trajectories": J_MAX, "deadline": time.monotonic() + 60, **limits}
            session = Session(a_ticket("/task"), renderer, router, Limits(sampling=Sampling(max_tokens=8192), rules=rules_of(harness, ()), **values))
            endpoint = Endpoint(session)
            for path, body, text in rows(file):
                answer = await endpoint(Request("POST", path.partition("?")[0], {}, json.dumps(body).encode()))
                assert (answer.status == 200) == (text is not None), answer.body
            return await session.close(), list(prompts.values()), dict(said)

    return asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.pain(21, 22)
@pytest.mark.parametrize("file", RECORDINGS, ids=lambda f: f.name.partition(".")[0])
def test_a_recorded_session(file: Path, tmp_path: Path, renderer: Renderer) -> None:
    """pains 21, 22: ids, log-probs and versions are the engine's; what lies above a call is the prompt that was sent; 95 % of it is trained."""
    outcome, prompts, said = replay(file, tmp_path, renderer)
    arrays = outcome.graph.arrays()
    complete = [c for c in outcome.calls if c.status is CallStatus.COMPLETE]
    check_graph(Found(outcome), arrays, prompts)
    assert [c.leaf_class for c in outcome.calls] == CLASSES[file.name.partition(".")[0]]
    for t in outcome.trajectories:
        flat = flatten(outcome.graph.nodes, t, arrays)
        for span in flat.calls:
            drawn = [*renderer.template.tokenizer.encode(said[span.call_id]).ids, renderer.end_id]
            assert flat.token_ids[span.start : span.end].tolist() == drawn
    trained = sum(t.n_trainable for t in outcome.trajectories)
    total = trained + outcome.left_out.tokens
    sampled = sum(c.n_completion for c in complete)
    assert 0 < total <= sampled
    print(f"{file.name}: {trained} of {total} trainable tokens with J_max {J_MAX}, {sampled} sampled")
    assert trained >= 0.95 * total
    assert documented()[file.name.partition(".")[0]] == f"{len(outcome.calls)}: {trained} of {sampled}"
    assert FIRST.step == 0  # what check_graph looks for


class Found:
    """A closed session in the shape of a message."""

    def __init__(self, outcome: Outcome) -> None:
        self.nodes, self.calls, self.trajectories = outcome.graph.nodes, outcome.calls, outcome.trajectories


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda f: f.name.partition(".")[0])
def test_no_word_of_theirs_is_kept(file: Path) -> None:
    assert all(redact(body) == body for _, body, _ in rows(file))


def documented() -> dict[str, str]:
    """The cells of the table in docs/harness.md, by recording."""
    lines = (Path(__file__).parents[2] / "docs" / "harness.md").read_text().splitlines()
    cells = {}
    for preset in PRESETS.values():
        row = next(line for line in lines if line.startswith(f"| `{preset.name}` {preset.version} |"))
        columns = ("plain", "rough", "full" if preset.name == "mini" else "compacting", "delegating", "deep")
        for column, cell in zip(columns, row.strip("|").split("|")[1:], strict=True):
            cells[f"{preset.name}-{column}"] = cell.strip()
    return cells


def test_every_play_is_recorded_and_documented() -> None:
    """What has no recording has a reason."""
    recorded = {file.name.partition(".")[0] for file in RECORDINGS}
    assert recorded == {f"{play.harness}-{play.name}" for play in PLAYS} == set(CLASSES)
    assert recorded == {name for name, cell in documented().items() if not cell.startswith("none")}


@pytest.mark.parametrize("harness", PRESETS)
def test_two_executions_begin_with_the_same_request(harness: str) -> None:
    """The same text has the same mark: nothing in a first request is an execution's own but ids, which no prompt shows.

    The date is in it, so a harness's plays are recorded on one day.
    """

    def opening(name: str) -> Any:
        return next(anonymous(body) for _, body, _ in rows(Path(__file__).parent / "recordings" / f"{harness}-{name}.json.gz") if body.get("tools"))

    assert opening("plain") == opening("rough")


def anonymous(value: Any) -> Any:
    if isinstance(value, list):
        return [anonymous(item) for item in value]
    return {key: anonymous(item) for key, item in value.items() if key != "id"} if isinstance(value, dict) else value
