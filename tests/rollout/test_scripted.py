"""The scripted engine's script: which line is recited, and what a bad one says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from gyre.errors import UsageError
from gyre.rollout.engine import EngineRefused
from gyre.rollout.scripted import ScriptedEngine, load_script

MakeEngine = Callable[..., ScriptedEngine]


@pytest.fixture
def tokenizer() -> Tokenizer:
    words = ["<end>", "say", "hello", "world", "bye", "now", "again"]
    t = Tokenizer(WordLevel({**{w: i for i, w in enumerate(words, 5)}, "?": 0}, unk_token="?"))
    t.pre_tokenizer = Whitespace()
    return t


def recite(engine: ScriptedEngine, kit: Any, prompt: list[int], **more: Any) -> list[int]:
    done = engine.submit(kit.ask("r", prompt, **more)).result(30)
    assert done.logprobs == [-0.5] * len(done.token_ids)
    return done.token_ids


def test_ordered_lines_follow_what_the_prompt_already_has(scripted_engine: MakeEngine, kit: Any) -> None:
    engine = scripted_engine({"token_ids": [20, 21]}, {"token_ids": [30, 31]}, {"token_ids": [20, 21]})
    prompt = [1, 2]
    for expected in ([20, 21], [30, 31], [20, 21]):
        assert recite(engine, kit, prompt) == expected
        prompt = [*prompt, *expected, 3]
    with pytest.raises(EngineRefused, match="no line of the script fits"):
        engine.submit(kit.ask("r", prompt))


def test_text_is_tokenised_and_ended(scripted_engine: MakeEngine, kit: Any, tokenizer: Tokenizer) -> None:
    engine = scripted_engine({"match": "say .*bye$", "text": "bye", "eos": False}, {"text": "hello world"}, tokenizer=tokenizer)
    assert recite(engine, kit, [6, 9]) == [9]
    assert recite(engine, kit, [6, 7]) == [7, 8, kit.EOS]


def test_conditions(scripted_engine: MakeEngine, kit: Any) -> None:
    engine = scripted_engine(
        {"suffix_ids": [7, 7], "token_ids": [40]},
        {"rollout": "^other", "token_ids": [50]},
        {"rollout": "^roll", "suffix_ids": [8], "token_ids": [60]},
        {"token_ids": [70]},
    )
    assert [recite(engine, kit, p) for p in ([1, 7, 7], [1, 8], [1])] == [[40], [60], [70]]


def test_a_line_is_cut_by_the_budget_and_continued(scripted_engine: MakeEngine, kit: Any) -> None:
    engine = scripted_engine({"token_ids": [20, 21, 22, 23]})
    done = engine.submit(kit.ask("a", [1], max_tokens=3)).result(30)
    assert (done.token_ids, done.finish_reason) == ([20, 21, 22], "length")
    assert recite(engine, kit, [1, 20, 21, 22], drawn=3) == [23]
    with pytest.raises(EngineRefused, match="not those of the script's line"):
        engine.submit(kit.ask("b", [1, 20, 99], drawn=2))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not a line of a script"),
        ('{"txt": "a"}', "unknown field"),
        ('{"match": "a"}', "needs either text or token_ids"),
        ('{"text": "a", "token_ids": [1]}', "needs either text or token_ids"),
        ('{"match": "(", "text": "a"}', "not a line of a script"),
        ('{"text": "a"}', "need a tokenizer"),
        ('{"token_ids": []}', "without tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text('\n{"token_ids": [1]}\n' + line + "\n")
    with pytest.raises(UsageError, match=says) as error:
        load_script(file, None, frozenset())
    assert str(error.value).startswith(f"{file}:3: ") and "\n" not in str(error.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(UsageError, match=r"rollout\.script"):
            load_script(tmp_path / name, None, frozenset())


def test_it_needs_no_torch() -> None:
    code = "import sys, gyre.rollout.shell, gyre.rollout.scripted, gyre.weights.transfer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
