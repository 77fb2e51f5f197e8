"""The table of presets, and what a configuration makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.config import Config, Rollout, Sandbox
from gyre.errors import UsageError
from gyre.sandbox.backends.base import Limits
from gyre.sandbox.harness import install
from gyre.sandbox.harness.launch import launch
from gyre.sandbox.harness.presets import NODE, PRESETS, Preset


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which every preset seems to be installed."""
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    for preset in [NODE, *PRESETS.values()]:
        install.place(preset).mkdir(parents=True)
        python = "/usr/bin/env" if preset.registry == "pypi" else ""
        mark = install.Installed(bytes=1, python=python)
        (install.place(preset) / "gyre.json").write_bytes(msgspec.json.encode(mark))
    return tmp_path


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_told_its_model_and_its_limits(cached: Path, name: str, tmp_path: Path) -> None:
    """No placeholder is left but the instruction; all of it is bound read-only."""
    config = Config(rollout=Rollout(context=123456, max_tokens=678), sandbox=Sandbox(harness=f"preset:{name}", models=("M1",)))
    made = launch(config)
    made.write_files(tmp_path / "home")
    files = {str(f.relative_to(tmp_path / "home")): f.read_text() for f in (tmp_path / "home").rglob("*") if f.is_file()}
    everything = [*made.argv, *made.env.values(), *files.values()]
    assert made.tcp and made.label == f"{name} {PRESETS[name].version}"
    assert sum("{instruction}" in word for word in made.argv) == 1
    for placeholder in ("{root}", "{node}", "{python}", "{arch}", "{base_url}", "{model}", "{context}", "{max_tokens}", "{eighth}"):
        assert not any(placeholder in text for text in everything)
    assert any("http://127.0.0.1:8080" in text for text in everything) and any("M1" in text for text in everything)
    assert " - a list" in made.words("- a list") and "a - b" in made.words("a - b")
    assert all(bind.readonly for bind in made.binds) and Path(made.binds[0].source) == install.place(PRESETS[name])


def test_limits_are_raised_to_what_a_preset_needs_and_never_lowered(cached: Path) -> None:
    made = launch(Config(sandbox=Sandbox(harness="preset:codex")))
    raised = made.limits(Limits(memory_mb=16, pids=9999, output_kb=3))
    assert (raised.memory_mb, raised.pids, raised.tmp_mb, raised.output_kb) == (2048, 9999, 256, 3)
    plain = launch(Config(sandbox=Sandbox(harness="sh -c 'x y'")))
    assert plain.words("-") == ["sh", "-c", "x y"] and not plain.tcp and plain.limits(Limits(memory_mb=16)).memory_mb == 16


def test_a_context_in_which_it_would_compact_for_ever_is_refused(cached: Path) -> None:
    few = Config(rollout=Rollout(context=32_768), sandbox=Sandbox(harness="preset:qwen-code"))
    with pytest.raises(UsageError, match=r"rollout\.context: 32768 is too little for qwen-code; give 50000 or more"):
        launch(few)


@pytest.mark.parametrize(
    ("sandbox", "words"),
    [
        (Sandbox(harness="preset:nope"), "sandbox.harness: no preset is called 'nope'; they are mini, pi"),
        (Sandbox(harness="preset:pi", backend="process"), "presets need a sandbox with mounts; use the bubblewrap"),
        (Sandbox(harness="preset:pi"), "pi 0.73.1 is not installed in .*; run: gyre-harness install pi"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox, words: str) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=words):
        launch(Config(sandbox=sandbox))


NPM = """#!/bin/sh
# what the real one does of its own: files below --prefix, readable by their owner alone
[ -n "$FAIL" ] && { echo "npm error 404 Not Found"; exit 1; }
while [ "$1" != --prefix ]; do shift; done
umask 077; mkdir -p "$2/node_modules/thing"; echo x > "$2/node_modules/thing/main.js"; echo once >> "$LOG"; sleep 0.5
"""
THING = Preset(
    name="thing", package="thing", version="1.2.3", registry="npm", protocol="chat", licence="MIT", argv=(), entry="node_modules/thing/main.js"
)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry that has one package: `npm` as a script. Returns the file that has a line for each time it was asked."""
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(NPM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_installing_is_atomic_readable_and_done_once(npm: Path) -> None:
    left = install.cache() / ".thing-dead.part"
    left.mkdir(parents=True)
    said: list[str] = []
    first = install.install(THING, accept=False, say=said.append)
    assert install.install(THING, accept=False, say=said.append) == first == install.find(THING)
    assert npm.read_text() == "once\n" and "licence: MIT" in said[0]
    assert not left.exists() and not list(install.cache().glob("*.part"))
    assert (install.place(THING) / THING.entry).stat().st_mode & 0o004 and install.place(THING).stat().st_mode & 0o005 == 0o005


def test_two_processes_fetch_it_once(npm: Path) -> None:
    """The second waits for the first, whose lock goes with its process."""
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                install.install(THING, accept=False, say=lambda line: None)
                os._exit(0)
            except BaseException:
                os._exit(1)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert npm.read_text() == "once\n"


def test_a_failure_leaves_nothing_and_says_where_to_look(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(Exception, match=r"thing 1\.2\.3 cannot be installed \(npm error 404 Not Found\); all of it: .*thing\.log"):
        install.install(THING, accept=False, say=lambda line: None)
    assert install.find(THING) is None and not list(install.cache().glob("*.part"))


def test_terms_are_accepted_first(npm: Path) -> None:
    closed = msgspec.structs.replace(THING, terms="https://example.com/terms")
    with pytest.raises(UsageError, match=r"not open: https://example\.com/terms; read it, and accept it with --accept-licence"):
        install.install(closed, accept=False, say=lambda line: None)
    assert not npm.exists()
    said: list[Any] = []
    install.install(closed, accept=True, say=said.append)
    assert "https://example.com/terms, accepted" in said[0]
