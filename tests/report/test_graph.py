"""gyre-graph: the layout as literal rows and columns; the command from outside: every form, hostile words, sources, a million tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import recorded
from browser import opened
from click.testing import CliRunner
from gyre_commands.graph import main
from synthetic import Page

from gyre.report.graph.layout import Call, Chosen, Message, Node, Recorded, arrange

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.write(tmp_path_factory.mktemp("recorded"))


def graph(*argv: object, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    done = CliRunner(env={"COLUMNS": None, "NO_COLOR": None, "FORCE_COLOR": None, **env}).invoke(main, list(map(str, argv)), input=stdin)
    return subprocess.CompletedProcess(argv, done.exit_code, done.stdout_bytes, done.stderr_bytes)


def test_parents_are_beside_their_first_child_and_others_are_below() -> None:
    #   0 ── 1 ── 2      and a root of its own: 7 ── 8
    #   │    └─── 3 ── 4
    #   ├─ 5
    #   └─ 6
    parents = [-1, 0, 1, 1, 3, 0, 0, -1, 7]
    call = {2: "a", 4: "b", 5: "c", 6: "d", 8: "e"}
    nodes = [Node(p, 10, call.get(i), [Message("user", 10, f"n{i}")]) for i, p in enumerate(parents)]
    chosen = [Chosen(0, "main", [0, 1, 3, 4], [4]), Chosen(1, "main", [0, 5], [5])]
    calls = [Call("a", 2, "aborted"), Call("b", 4), Call("c", 5, leaf_class="main"), Call("d", 6), Call("e", 8)]
    out = arrange(Recorded("gyre.graph/1", "r", nodes, calls, chosen))
    found = {s.messages[0][1]: (s.column, s.row, s.through, s.n_tokens, s.n_trained) for s in out.segments}
    assert found == {
        "n0": (0, 0, (0, 1), 10, 0), "n1": (1, 0, (0,), 10, 0), "n2": (2, 0, (), 10, 0), "n3n4": (2, 1, (0,), 20, 10), "n5": (1, 2, (1,), 10, 10),
        "n6": (1, 3, (), 10, 0), "n7n8": (0, 4, (), 20, 0),
    }  # fmt: skip
    assert [s.notes for s in out.segments if s.notes] == [["aborted"], ["main"]]
    places = [(s.column, s.row) for s in out.segments]
    assert len(set(places)) == len(places), "nothing lies on anything else"


def test_svg_shows_counts_words_and_choice(run: Path) -> None:
    done = graph(run, "--format", "svg")
    assert (done.returncode, done.stderr) == (0, b"")
    picture = ET.fromstring(done.stdout)
    shown = " ".join("".join(e.itertext()) for e in picture.iter(f"{SVG}text"))
    for words in ("finished, reward 1, 427 tokens in 7 segments, 5 calls; 3 trajectories train 119 of 128", "213 tokens · 1 call", "1 call sub-agent",
                  "main, aborted", "system The harness's own prompt.", "assistant There is a.txt.", "sub-agent, 57 tokens, 7 trained"):  # fmt: skip
        assert words in shown, words
    assert all(re.fullmatch(r"M\d+ \d+H\d+V\d+H\d+", e.get("d", "")) for e in picture.iter(f"{SVG}path")), "edges have right angles alone"
    assert {e.tag for e in picture.iter()} <= {f"{SVG}{t}" for t in ("svg", "style", "rect", "g", "text", "tspan", "path", "circle")}


@pytest.mark.parametrize("form", ["tree", "svg", "html"])
def test_words_of_an_agent_are_words(run: Path, tmp_path: Path, form: str) -> None:
    """Tags, control sequences and letters that turn the direction of text, from the tokens of a run and from every field of a dump."""
    evil = recorded.HOSTILE
    node = {"parent": -1, "n_tokens": 1, "call_id": evil, "messages": [{"role": "user", "n_tokens": 1, "text": evil}, {"role": evil, "text": evil}]}
    record = {"schema": "gyre.graph/1", "rollout_id": evil, "ending": evil, "nodes": [node], "calls": [{"call_id": evil, "node": 0, "status": evil,
              "leaf_class": evil}], "trajectories": [{"index": 0, "leaf_class": evil, "nodes": [0], "trainable": [0]}]}  # fmt: skip
    for done in (graph(run, "--format", form), graph("-", "--format", form, stdin=json.dumps(record).encode() + b"\n")):
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text) and "owned" not in text
        if form == "svg":
            assert f"{SVG}script" not in {e.tag for e in ET.fromstring(text).iter()}
        if form == "html":
            page = Page()
            page.feed(text)
            assert page.tags.count("script") == 2 and page.addresses == [] and not {"iframe", "img", "link", "object"} & set(page.tags)
    coloured = graph(run, FORCE_COLOR="1", COLUMNS="90").stdout
    assert form != "tree" or (b"\x1b[34m" in coloured and not re.search(rb"\x1b[^\[]|\x07", coloured))


def test_the_terminals_lines_fit(run: Path) -> None:
    for width in (40, 80, 100):
        lines = graph(run, COLUMNS=str(width)).stdout.decode().splitlines()
        assert lines[0] == "g0.0" and max(map(len, lines)) <= width and lines == [line.rstrip() for line in lines]
        assert [line[0] for line in lines if "1 call · main, aborted" in line] in ([], ["╭"]) and any("(1)(2)(3)╮" in line for line in lines)
        assert "3 trajectories train 119 of 128 sampled tokens" in " ".join(" ".join(lines).split()), "no number is cut"


def test_a_dump_and_its_run_give_the_same_picture(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gyre_commands.dump", str(run), "--kind", "graphs", "--no-tokens", "-o", str(tmp_path / "graphs.jsonl")]
    subprocess.run(words, timeout=120, check=True)
    dumped = (tmp_path / "graphs.jsonl").read_bytes()
    wanted = graph(run, "--format", "svg").stdout
    assert graph("-", "--format", "svg", stdin=dumped).stdout == graph(tmp_path / "graphs.jsonl", "--format", "svg").stdout == wanted
    assert graph("-", "--rollout", "g0.0", "--format", "svg", stdin=dumped.replace(b"g0.0", b"g9.9") + dumped).stdout == wanted


def test_what_cannot_be_drawn_is_one_line(run: Path, tmp_path: Path) -> None:
    node = '{"schema": "gyre.graph/1", "rollout_id": "r", "nodes": [{"parent": 0, "n_tokens": 1}]}'
    cases = [
        (("-",), b"not json\n", 2, "-:1: no prefix graph"),
        (("-",), b'{"schema": "gyre.call/1", "rollout_id": "r"}\n', 2, "a gyre.call/1, no gyre.graph/1"),
        (("-",), node.encode() + b"\n", 2, "parent does not come before"), (("-",), b"", 1, "-: no prefix graph"),
        ((tmp_path / "none",), b"", 2, "no such file"), ((tmp_path,), b"", 2, "holds no ledger.db"), ((run, "--rollout", "g7.7"), b"", 1, "of g7.7"),
        ((run, "-o", tmp_path / "no" / "file"), b"", 2, "cannot be written"),
    ]  # fmt: skip
    for argv, stdin, code, words in cases:
        done = graph(*argv, stdin=stdin)
        assert done.returncode == code and words in done.stderr.decode() and done.stderr.count(b"\n") == 1, (argv, done.stderr)
    read, write = os.pipe()
    os.close(read)
    for form in ("tree", "svg"):
        words = [sys.executable, "-m", "gyre_commands.graph", str(run), "--format", form]
        done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, b""), form
    os.close(write)


def test_a_million_tokens_in_500_calls(tmp_path: Path) -> None:
    """Drawn within the deadline of `graph`; a few seconds where the machine is free. The page holds excerpts, not the run."""
    run = recorded.large(tmp_path / "large")
    done = graph(run, "--format", "html")
    assert done.returncode == 0 and b"500 calls" in done.stdout and len(done.stdout) < 1_000_000
    assert re.search(rb"1,0\d\d,\d{3} tokens in", done.stdout)


def test_a_browser_folds_and_shows(run: Path, tmp_path: Path) -> None:
    graph(run, "--format", "html", "-o", tmp_path / "page.html")
    with opened(tmp_path / "page.html") as page:
        count = "[...document.querySelectorAll('.s')].filter(s => s.style.display !== 'none').length"
        assert (page.evaluate(count), page.locator(".k").count(), page.locator("aside h2").inner_text()) == (7, 3, "8 tokens")
        page.locator(".k").first.click()
        assert (page.evaluate(count), page.locator(".k").first.text_content(), page.locator("#graph").get_attribute("height")) == (1, "+6", "78")
        page.locator(".k").first.press("Enter")
        assert page.evaluate(count) == 7
        page.locator(".s", has_text="213 tokens").first.click(position={"x": 40, "y": 40})
        assert "</text><script>alert(1)</script> & gnp" in page.locator("aside").inner_text()
        page.locator(".s.c .k").nth(1).click()
        page.locator("#unfold").click()
        assert page.evaluate(count) == 7
