"""Real harnesses, driven end to end in their sandbox without a network: whatever happens on the way, the rollout ends and its graph is right.

They run where they are installed (gyre-harness install NAME); elsewhere they are skipped, and fail if GYRE_REQUIRE names them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from driver import Drive, check_graph, drive
from plays import PLAYS, Play

from gyre.sandbox.harness import install
from gyre.sandbox.harness.presets import NODE, PRESETS
from gyre.types import LeafClass

REQUIRED = os.environ.get("GYRE_REQUIRE", "").split(",")
EVERYWHERE = ("mini", "pi", "codex")
"""Those that the whole suite drives; the others are driven if GYRE_REQUIRE names them: they take longer."""


def need(harness: str) -> None:
    if harness not in EVERYWHERE and harness not in REQUIRED:
        pytest.skip(f"driven with GYRE_REQUIRE={harness} alone")
    missing = shutil.which("bwrap") is None and "bwrap is not installed"
    for preset in (PRESETS[harness], *([NODE] if install.needs_node(PRESETS[harness]) else [])):
        if install.find(preset) is None:
            missing = missing or f"{preset.name} is not installed: gyre-harness install {harness}"
    if missing:
        (pytest.fail if harness in REQUIRED else pytest.skip)(missing)


def drive_checked(play: Play, tmp_path: Path) -> Drive:
    need(play.harness)
    drove = drive(tmp_path, f"preset:{play.harness}", play.say, fault=play.fault, **play.keys)
    message = drove.ended.message
    assert (message.ending, message.reward) == play.end, (message.detail, drove.output[-2000:])
    check_graph(message, drove.ended.arrays, drove.prompts)
    classes = {c.leaf_class.value for c in drove.calls}
    assert play.least <= classes, classes
    trained = sum(t.n_trainable for t in message.trajectories)
    print(f"{play.harness} {play.name}: {trained} of {trained + message.left_tokens} trainable tokens trained, {drove.coverage()[1]} sampled")
    assert trained >= 0.95 * (trained + message.left_tokens)
    return drove


def ids(play: Play) -> str:
    return f"{play.harness}-{play.name}"


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("play", [p for p in PLAYS if p.name == name], ids=ids)


@of("plain")
def test_a_plain_task(play: Play, tmp_path: Path) -> None:
    """Every sampled token of the conversation is trained, but for a title's; and another execution asks the very same first."""
    drove = drive_checked(play, tmp_path / "a")
    main = [c for c in drove.calls if c.leaf_class is LeafClass.MAIN]
    assert drove.coverage()[0] == sum(c.n_completion for c in main) and drove.ended.message.left_tokens == 0


@of("rough")
def test_malformed_calls_a_failed_request_and_a_dropped_stream(play: Play, tmp_path: Path) -> None:
    drove = drive_checked(play, tmp_path)
    assert {"500", "drop"} <= {r.fault for r in drove.requests}


@of("compacting")
def test_compaction(play: Play, tmp_path: Path) -> None:
    """The summary is trained: its text was adopted."""
    drove = drive_checked(play, tmp_path)
    assert any(t.leaf_class is LeafClass.MAIN_SUMMARY for t in drove.ended.message.trajectories)


@of("full")
def test_a_full_context_ends_one_that_does_not_compact(play: Play, tmp_path: Path) -> None:
    """What it did until then is trained."""
    drove = drive_checked(play, tmp_path)
    assert drove.coverage()[0] == drove.coverage()[1]


@of("delegating")
def test_sub_agents(play: Play, tmp_path: Path) -> None:
    drove = drive_checked(play, tmp_path)
    assert any(t.leaf_class is LeafClass.SUB_AGENT for t in drove.ended.message.trajectories)


@of("deep")
def test_compaction_of_a_sub_agent(play: Play, tmp_path: Path) -> None:
    drove = drive_checked(play, tmp_path)
    assert any(t.leaf_class is LeafClass.SUB_AGENT_SUMMARY for t in drove.ended.message.trajectories)


@pytest.mark.parametrize("harness", ["pi"])
def test_executions_of_a_task_begin_with_the_same_prompt(harness: str, tmp_path: Path) -> None:
    """Working directory, home, host name and date are the same: prefixes can be shared between executions."""
    need(harness)
    play = next(p for p in PLAYS if p.harness == harness and p.name == "plain")
    first = [drive(tmp_path / n, f"preset:{harness}", play.say).prompts[0] for n in "ab"]
    assert first[0] == first[1]
