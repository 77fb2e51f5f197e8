"""gyre-dump from outside: its formats hold the same records, ATIF is valid, system prompts stay away, mistakes are one line."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import msgpack
import msgspec
import pytest
import recorded
from click.testing import CliRunner
from gyre_commands.dump import main

from gyre.report import formats
from gyre.report.conversation import Conversations
from gyre.report.dump import records, write
from gyre.report.read import RunReader, Selection


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.write(tmp_path_factory.mktemp("recorded"))


def dump(*argv: object) -> subprocess.CompletedProcess[bytes]:
    done = CliRunner().invoke(main, list(map(str, argv)))
    return subprocess.CompletedProcess(argv, done.exit_code, done.stdout_bytes, done.stderr_bytes)


def lines(*argv: object) -> list[dict[str, Any]]:
    done = dump(*argv)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_parquet_and_msgpack_hold_what_json_lines_hold(run: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    for kind in ("trajectories", "graphs"):
        wanted = lines(run, "--kind", kind)
        assert wanted
        assert dump(run, "--kind", kind, "--format", "parquet", "-o", tmp_path / "out").returncode == 0
        columns = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
        assert [list(c) for c in columns] == [list(w) for w in wanted]
        for got, want in zip(columns, wanted, strict=True):
            for key, value in got.items():
                assert (json.loads(value) if isinstance(value, str) and not isinstance(want[key], str) else value) == want[key], key
        packed = dump(run, "--kind", kind, "--format", "msgpack").stdout
        unpacker = msgpack.Unpacker()
        unpacker.feed(packed)
        assert json.loads(json.dumps(list(unpacker))) == wanted
    assert dump(run, "--step", "7", "--format", "parquet", "-o", tmp_path / "none").returncode == 0
    assert pyarrow.parquet.read_table(tmp_path / "none").num_rows == 0


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    extra: dict[str, Any] = {}


class Agent(Strict, kw_only=True):
    name: str
    version: str
    model_name: str = ""


class ToolCall(Strict, kw_only=True):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(Strict, kw_only=True):
    source_call_id: str | None = None
    content: str


class Observation(Strict, kw_only=True):
    results: list[Result]


class Metrics(Strict, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    completion_token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: list[float] = []


class Step(Strict, kw_only=True):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None


class FinalMetrics(Strict, kw_only=True):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_steps: int


class Document(Strict, kw_only=True):
    """ATIF v1.8, of what its specification allows the part that gyre writes."""

    schema_version: Literal["ATIF-v1.8"]
    session_id: str
    trajectory_id: str
    agent: Agent
    steps: list[Step]
    final_metrics: FinalMetrics
    subagent_trajectories: list[Document] = []


def test_atif_is_valid_and_says_what_happened(run: Path) -> None:
    roots = [msgspec.convert(d, Document) for d in lines(run, "--format", "atif")]
    documents = sorted([d for root in roots for d in (root, *root.subagent_trajectories)], key=lambda d: d.trajectory_id)
    trajectories = lines(run)
    assert [d.trajectory_id for d in documents] == [t["trajectory_id"] for t in trajectories] and len(documents) == 3
    assert [[s.steps[-1].message for s in root.subagent_trajectories] for root in roots] == [["Found."], []]
    for d, t in zip(documents, trajectories, strict=True):
        assert [s.step_id for s in d.steps] == list(range(1, len(d.steps) + 1)) and d.final_metrics.total_steps == len(d.steps)
        for s in d.steps:
            known = {c.tool_call_id for c in s.tool_calls}
            assert all(r.source_call_id in known for r in (s.observation.results if s.observation else []))
            assert s.source == "agent" or not (s.tool_calls or s.metrics or s.reasoning_content)
        asked = [s.metrics for s in d.steps if s.metrics]
        assert all(t["token_ids"][: m.prompt_tokens + m.completion_tokens] == m.prompt_token_ids + m.completion_token_ids for m in asked)
        sampled = [i for m in asked for i in m.completion_token_ids]
        assert sampled == [i for i, v in zip(t["token_ids"], t["versions"], strict=True) if v is not None]
    told = next(d for d in documents if any(s.message == "There is a.txt." for s in d.steps))
    assert [s.source for s in told.steps] == ["system", "user", "agent", "agent"]
    assert told.steps[0].message == recorded.SECRET and told.steps[1].message == f"List the files. {recorded.HOSTILE}"
    assert [(c.function_name, c.arguments) for c in told.steps[2].tool_calls] == [("bash", {"cmd": "ls"})]
    assert told.steps[2].observation is not None and told.steps[2].observation.results[0].content == "a.txt"
    compacted = next(d for d in documents if d.steps[-1].message == "Done.")
    assert compacted.steps[-1].reasoning_content == "hm" and [s.is_copied_context for s in compacted.steps if s.message == "I go on."] == [True]


def test_atif_by_the_published_models(run: Path) -> None:
    models = pytest.importorskip("harbor.models.trajectories", reason="harbor, which has the models, needs Python 3.12 or newer")
    for d in lines(run, "--format", "atif") + lines(run, "--format", "atif", "--redact-system"):
        models.Trajectory.model_validate(d, strict=True)


@pytest.mark.parametrize("argv", [[], ["--kind", "calls"], ["--kind", "graphs"], ["--format", "atif"], ["--format", "msgpack"]], ids=" ".join)
def test_no_word_of_a_system_prompt_is_left(run: Path, argv: list[str]) -> None:
    secret = recorded.tokenizer().encode(recorded.SECRET).ids
    whole, left = dump(run, *argv), dump(run, *argv, "--redact-system")
    assert (left.returncode, left.stderr) == (0, b"")
    if "msgpack" in argv:
        unpacker = msgpack.Unpacker()
        unpacker.feed(left.stdout)
        records = list(unpacker)
    else:
        records = [json.loads(line) for line in left.stdout.splitlines()]
    spelled = json.dumps(secret)[1:-1]
    assert recorded.SECRET not in json.dumps(records) and spelled not in json.dumps(records)
    assert b"List the files" in left.stdout or "atif" not in argv
    if not argv:
        wanted = lines(run)
        assert spelled in json.dumps(wanted[0]["token_ids"])
        for r, w in zip(records, wanted, strict=True):
            kept = [(a, b) for a, b in zip(r["token_ids"], w["token_ids"], strict=True) if a != -1]
            assert all(a == b for a, b in kept) and {k: v for k, v in r.items() if k != "token_ids"} == {
                k: v for k, v in w.items() if k != "token_ids"
            }
            assert len(w["token_ids"]) - len(kept) >= len("You search.")
    assert len(records) == whole.stdout.count(b"\n") or "msgpack" in argv


def test_roles_are_read_whatever_a_branch_cuts(tmp_path: Path) -> None:
    """A header that lies on both sides of a branch is still one."""
    for control, text in (
        (recorded.CHATML, "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"),
        (
            recorded.LLAMA,
            "<|start_header_id|>system<|end_header_id|>\n\nBe good.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>",
        ),
    ):
        folder = tmp_path / control[0].strip("<|>")
        folder.mkdir()
        words = recorded.tokenizer(control)
        words.save(str(folder / "tokenizer.json"))
        c, ids = Conversations(folder), words.encode(text).ids
        whole = [(p.role, c.text(ids, p)) for p in c.pieces(ids, 0, len(ids))]
        assert whole == [("system", "Be good."), ("user", "Hello")]
        for cut in range(1, len(ids)):
            upper = list(c.pieces(ids, 0, cut))
            lower = list(c.pieces(ids, cut, len(ids), upper[-1].role))
            said = "".join(c.text(ids, p) for p in (*upper, *lower) if p.role == "system")
            assert said.replace(control[-1], "").strip() == "Be good.", cut
        assert [p.role for p in c.pieces(ids, 1, 9)] == [""], "what no token opens is nobody's"


def test_what_cannot_be_dumped_is_one_line(run: Path, tmp_path: Path) -> None:
    strange = recorded.write(tmp_path / "strange", control=("<|other|>",))
    moved = recorded.write(tmp_path / "moved")
    (tmp_path / "moved" / "model" / "tokenizer.json").unlink()
    kept = tmp_path / "kept"
    kept.write_bytes(b"earlier")
    cases = [
        ((run, "--format", "atif", "--kind", "calls"), "--format atif: is for whole trajectories"), ((strange, "--redact-system"), "--redact-system"),
        ((moved, "--redact-system"), "tokenizer.json: no such file"), ((moved, "--format", "atif", "-o", kept), "tokenizer.json: no such file"),
    ]  # fmt: skip
    for argv, words in cases:
        done = dump(*argv)
        assert done.returncode == 2 and words in done.stderr.decode() and done.stderr.count(b"\n") == 1, done.stderr
    assert kept.read_bytes() == b"earlier"
    done = dump(moved, "--kind", "graphs")
    assert done.returncode == 0 and b"messages are not shown" in done.stderr and "messages" not in json.loads(done.stdout)["nodes"][0]


def test_a_closed_pipe_is_quiet_in_every_format(run: Path) -> None:
    for form in ("jsonl", "msgpack", "parquet", "atif"):
        read, write = os.pipe()
        os.close(read)
        words = [sys.executable, "-m", "gyre_commands.dump", str(run), "--format", form]
        done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == (0, b""), form


@pytest.mark.parametrize("form", ["jsonl", "msgpack", "parquet"])
def test_a_reader_that_leaves_ends_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """In the middle, as head does; nothing hides why it ended."""
    monkeypatch.setattr(formats, "_ROWS", 2)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def read() -> None:
        with fifo.open("rb") as file:
            file.read(10)

    Thread(target=read, daemon=True).start()
    with RunReader(run) as reader:
        (record,) = records(reader, "rollouts", Selection(), tokens=True)
        endless = itertools.repeat(record)
        with pytest.raises(BrokenPipeError):
            write(endless, fifo, form, [], reader, lambda *_: None, flush=True)


def test_steps_that_are_none(run: Path) -> None:
    for words in (["--step", "9:3"], ["--step", "2:2"], ["--step", "two"]):
        done = dump(run, *words)
        assert done.returncode == 2 and done.stderr.startswith(b"error: --step: '") and done.stderr.count(b"\n") == 1
