"""gyre-report from outside: every format, streams, exit codes, what is hostile or damaged."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import synthetic
from browser import opened
from click.testing import CliRunner
from gyre_commands.report import main
from rich.console import Console
from synthetic import Page

from gyre.events import Event, decode, encode
from gyre.report import summary

KEYS = {
    "seconds", "dispatch", "cells", "bursts", "steps", "marks", "slots", "staleness", "durations", "speedup", "learning", "failure", "messages",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    return synthetic.write(folder / "elastic"), synthetic.write(folder / "slower", "boundary", 0.8)


def report(*argv: object, **env: str) -> subprocess.CompletedProcess[bytes]:
    """The command in this process, which has imported matplotlib already."""
    done = CliRunner(env={"COLUMNS": None, "NO_COLOR": None, "FORCE_COLOR": None, **env}).invoke(main, list(map(str, argv)))
    return subprocess.CompletedProcess(argv, done.exit_code, done.stdout_bytes, done.stderr_bytes)


def texts(svg: bytes) -> str:
    return " ".join("".join(e.itertext()) for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def test_svg_says_what_it_shows(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = report(*runs, "--format", "svg", "-o", tmp_path / "out.svg")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    shown = texts((tmp_path / "out.svg").read_bytes())
    for words in ("Roles of the cells", "c0", "c7", "81%", "burst 1", "Burst 3 of elastic", "joins the step", "reduction", "update", "broadcast",
                  "Water level", "water level",
                  "Which execution held which slot", "boundary dispatch: elastic", "Staleness in slower", "predicted by the quota",
                  "elastic over other runs", "1.23×", "How long queries and rollouts take", "time-out", "lost",
                  "gradient norm before clipping", "elastic (J_max 5)", "slower (J_max 1)", "125%",
                  "elastic is 100%"):  # fmt: skip
        assert words in shown, words


def test_png_single_figures_and_the_same_bytes(runs: tuple[Path, Path]) -> None:
    assert report(runs[0], "--format", "png", "--figure", "roles").stdout.startswith(b"\x89PNG\r\n")
    first, second = (report(runs[0], "--format", "svg", "--figure", "burst", "--burst", 2).stdout for _ in range(2))
    assert first == second and "Burst 2 of elastic" in texts(first) and "Roles" not in texts(first)


def test_html_is_one_file(runs: tuple[Path, Path]) -> None:
    done = report(runs[0], "--format", "html")
    assert done.returncode == 0
    page = Page()
    page.feed(done.stdout.decode())
    assert page.tags.count("svg") == 7 and not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert all(a.startswith(("#", "data:image/png")) for a in page.addresses)
    ids = re.findall(r'id="((?:p|m|h)[0-9a-f]{8,})"', done.stdout.decode())
    assert len(ids) == len(set(ids)), "clips and markers of one picture are not taken for another's"


def test_the_page_has_every_figure_and_needs_nothing_else(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """In a browser of 1280 points: pictures, steps, events and the last stall, with no word to the console and no request."""
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    lines = (run / "events.jsonl").read_text().splitlines()
    last = decode(lines[-1])
    waits = [{"who": "core/1", "for": "tickets <i>", "since_s": 301.0}]
    stall = Event(seq=last.seq + 1, t_wall=last.t_wall + 1, t_mono=0, proc="b", cause="", kind="stall", fields={"idle_s": 300.0, "waits": waits})
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in [*lines, encode(stall)]))
    assert report(run, "--format", "html", "-o", tmp_path / "page.html").returncode == 0
    with opened(tmp_path / "page.html") as page:
        text = page.locator("body").inner_text()
        for words in ("Roles of the cells", "Water level", "Burst 3", "Which execution held which slot", "Staleness in", "predicted by the quota",
                      "gradient norm before clipping", "How long queries", "Events of", "stall: nothing progressed for 300 s", "The last stall of",
                      "tickets <i>", "301 s"):  # fmt: skip
            assert words in text, words
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, "nothing sticks out"
        boxes = [page.locator("figure svg").nth(i).bounding_box() for i in range(page.locator("figure svg").count())]
        assert len(boxes) == 7 and all(box["width"] > 900 and box["height"] > 100 for box in boxes)


def test_json_is_stable(runs: tuple[Path, Path]) -> None:
    one = json.loads(report(runs[0], "--format", "json").stdout)
    assert one["schema"] == "gyre.report/1" and one["run_id"] == "elastic" and set(one["figures"]) >= KEYS
    f = one["figures"]
    assert [c["cell"] for c in f["cells"]] == synthetic.CELLS
    assert set(f["cells"][0]) == {"cell", "train_fraction", "seconds", "spans"}
    assert f["cells"][3]["seconds"]["lost"] == 200.0 and sum(f["cells"][3]["seconds"].values()) == pytest.approx(f["seconds"])
    assert [b["steps"] for b in f["bursts"]] == [[1, 2], [3, 4], [5, 6]] and f["bursts"][0]["turned_to_train"] == 7
    assert f["staleness"]["trained"]["discrete"]["n"] == 48 and f["durations"]["harness_timeout_s"] == synthetic.HARNESS_S
    assert f["learning"]["budget"] == 5 and f["learning"]["compute_s"] == 40 and f["learning"]["relative"] == {"to": "elastic", "compute": 1.0}
    assert f["learning"]["steps"][1] == [2, pytest.approx(0.2), 0.01, 40.0]
    both = json.loads(report(*runs, "--format", "json").stdout)
    assert both[1]["figures"]["learning"]["relative"] == {"to": "elastic", "compute": 1.25}
    assert both[0]["figures"]["speedup"][0]["over"] == "slower" and both[0]["figures"]["speedup"][0]["steps"][-1][1] > 1.2
    assert both[1]["figures"]["speedup"][0]["steps"][-1][1] == pytest.approx(1 / both[0]["figures"]["speedup"][0]["steps"][-1][1])


@pytest.mark.parametrize("width", [30, 72, 200])
def test_text_fits_and_has_no_blanks_at_the_end(runs: tuple[Path, Path], width: int) -> None:
    done = report(*runs, COLUMNS=str(width))
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert all(line == line.rstrip() and len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "\x1b" not in text and "roles of the cells of elastic" in text.replace("\n", " ") and "speed-up of elastic" in text
    assert "learning, means" in text and "staleness, optimizer" in text and "durations, minutes" in text
    assert len({line.rstrip() for line in lines if line.startswith("c0 ")}) >= 2


def test_a_terminal_has_colours_unless_asked_not_to(runs: tuple[Path, Path], tmp_path: Path) -> None:
    coloured = report(runs[0], "--figure", "roles", FORCE_COLOR="1", COLUMNS="80").stdout
    assert b"\x1b[34m" in coloured
    plain = report(runs[0], "--figure", "roles", FORCE_COLOR="1", NO_COLOR="1", COLUMNS="80").stdout
    assert b"\x1b[3" not in plain and "░".encode() in plain and "█".encode() in plain
    report(runs[0], "-o", tmp_path / "out.txt", FORCE_COLOR="1")
    assert "\x1b" not in (tmp_path / "out.txt").read_text()


def test_at_80_columns_nothing_is_dropped_and_legends_hold_together(runs: tuple[Path, Path]) -> None:
    shown = report(runs[0], COLUMNS="80").stdout.decode().splitlines()
    at = next(i for i, line in enumerate(shown) if "░ rollout   > turning to training" in line)
    assert shown[at + 1].startswith("   ") and "|n burst n begins with a publication" in "\n".join(shown[at : at + 3])
    assert any("every 6th slot" in line for line in shown), "\n".join(shown)
    for title in ("mean", "compute, s", "of elastic's", "overall time-out"):
        assert any(title in line for line in shown), title
    drawn = summary.drawing({**SUMMARY, "table": [dict.fromkeys((key for _, key, _ in summary.COLUMNS), 1)]}, 80)
    out = io.StringIO()
    Console(file=out, width=80).print(drawn)
    assert all(title in out.getvalue() for title, _, _ in summary.COLUMNS)


SUMMARY = {
    "run_id": "r", "steps": 4, "total_steps": 4, "counts": {"admitted": 0}, "endings": {}, "eval": {"before": None, "after": None},
    "staleness": dict.fromkeys(("predicted", "mean", "p95", "max")), "logprob_diff": {"mean": None, "max": None},
    "seconds": {"total": None, "trainer": {}, "execution_mean": {"grade": 0.7, "harness": 2.1, "model": 1.4, "other": 1.0, "setup": 0.2}},
    "reward": {"first": 0.25, "last": 0.25, "first_steps": 4, "last_steps": 4}, "table": [{"reward": r} for r in (0.0, 0.25, 0.25, 0.5)],
}  # fmt: skip


def test_means_are_of_steps_that_there_are_and_phases_in_their_order() -> None:
    words = summary.facts(SUMMARY)
    assert words["reward"] == "0.25, mean of 4 steps"
    assert words["an execution"] == "setup 0.200 s, harness 2.100 s (1.400 s of it in model calls), grade 0.700 s, other 1.000 s"
    long = {"first": 0.1, "last": 0.9, "first_steps": 5, "last_steps": 10}
    assert summary.facts({**SUMMARY, "reward": long, "table": [{"reward": 0.5}] * 15})["reward"] == "first 5 steps 0.10, last 10 0.90"


def test_a_page_counts_events_from_where_its_footer_says(tmp_path: Path) -> None:
    said = [(0.0, "term", {"term": 1, "step": 0}), (90.0, "publication", {"step": 0, "cells": ["a"]}), (100.0, "checkpoint", {"step": 1})]
    events = [Event(seq=i, t_wall=1e9 + at, t_mono=at, proc="b", cause="", kind=k, fields=f) for i, (at, k, f) in enumerate(said)]
    (tmp_path / "events.jsonl").write_text("".join(f"{encode(e)}\n" for e in events))
    page = report(tmp_path, "--format", "html").stdout.decode()
    assert "-01:30  term" in page and "00:10  checkpoint" in page and "counted from a run's first publication.</footer>" in page
    (tmp_path / "events.jsonl").write_text(f"{encode(events[0])}\n{encode(events[2])}\n")
    page = report(tmp_path, "--format", "html").stdout.decode()
    assert "00:00  term" in page and "01:40  checkpoint" in page and "from the first event: nothing was published.</footer>" in page


def hostile(folder: Path) -> Path:
    name = "<script>alert(1)</script>$x_1$\x1b[31m & \x07"
    role = {"cell": name, "from": "rollout", "to": "train", "phase": "to_train", "reason": "<img onerror=1>"}
    kinds = [("publication", {"step": 0, "cells": [name]}), ("role", role), ("role", {**role, "phase": "train"}),
             ("failure", {"reason": "verifier said <b onclick=x>\x1b]0;t\x07 & died"}), ("publication", {"step": 0, "cells": []})]  # fmt: skip
    folder.mkdir()
    events = [Event(seq=i, t_wall=1e9 + i, t_mono=i, proc="b", cause="", kind=k, fields=f) for i, (k, f) in enumerate(kinds)]
    (folder / "events.jsonl").write_text("".join(encode(e) + "\n" for e in events))
    return folder


def test_text_of_others_is_escaped_and_stripped(tmp_path: Path) -> None:
    run = hostile(tmp_path / "<i>run")
    page = report(run, "--format", "html").stdout.decode()
    parsed = Page()
    parsed.feed(page)
    assert not {"script", "b", "i", "img"} & set(parsed.tags) and "&lt;b onclick=x&gt; &amp; died" in page and "\x1b" not in page
    svg = report(run, "--format", "svg")
    assert svg.returncode == 0 and "<script>" in texts(svg.stdout), "a name is text"
    text = report(run)
    assert text.returncode == 0 and not {0x1B, 0x07} & set(text.stdout) and b"failed: verifier said <b onclick=x> & died" in text.stdout


def test_damaged_lines_are_left_out_and_said(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = (runs[0] / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join([*lines[:5], b"\xff\xfe\x00garbage\n", b'{"seq": "no"}\n', *lines[5:], b'{"torn']))
    done = report(run, "--format", "json")
    assert done.returncode == 0 and json.loads(done.stdout)["figures"]["bursts"]
    assert done.stderr.count(b"\n") == 1 and b"left out 2 damaged lines" in done.stderr


def test_what_cannot_be_drawn_is_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    cases = {
        (tmp_path / "none",): (2, "holds no ledger.db"),
        (tmp_path, "--format", "svg"): (1, "nothing to draw: the event log names no cell"),
        (runs[0], "--burst", "9"): (2, "--burst: there is no burst 9; the last is 3"),
        (runs[0], "-o", tmp_path / "no" / "file"): (2, "cannot be written"),
    }
    for argv, (code, words) in cases.items():
        done = report(*argv)
        assert done.returncode == code and words in done.stderr.decode() and done.stderr.count(b"\n") == 1, done.stderr
    done = report(tmp_path)
    assert (done.returncode, done.stderr) == (0, b"") and b"nothing was published" in done.stdout


STREAMS = [
    ("report", ["{run}"]), ("report", ["{run}", "--format", "json"]),
    ("dump", ["{ledger}", "--kind", "steps"]), ("dump", ["{ledger}", "--kind", "steps", "--count"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gyre.buffer.ledger import Ledger
    from gyre.wire.rows import MetaRow, StepRow, StepState

    folder = tmp_path_factory.mktemp("ledger")
    made = Ledger(folder)
    made.commit([MetaRow(run_id="r", committed=1), StepRow(1, 1, 10.0, state=StepState.COMMITTED, committed_at=12.0)], [], []).result()
    made.close()
    return folder


@pytest.mark.parametrize(("script", "argv"), STREAMS)
def test_where_output_cannot_go(runs: tuple[Path, Path], ledger: Path, script: str, argv: list[str]) -> None:
    words = [sys.executable, "-m", f"gyre_commands.{script}", *(a.format(run=runs[0], ledger=ledger) for a in argv)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"No space left on device" in done.stderr, done.stderr
    shell = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], stderr=subprocess.PIPE, timeout=120, check=False)
    assert shell.returncode == 1 and shell.stderr.count(b"\n") == 1 and b"stdout is closed" in shell.stderr, shell.stderr
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_that_are_the_same_are_told_apart(tmp_path: Path) -> None:
    made = [synthetic.write(tmp_path / name / "[/run]") for name in ("one", "two")]
    assert b"two/[/run]  1.00" in report(*made, "--figure", "speedup").stdout, "a name is no markup"
    both = json.loads(report(*made, "--format", "json").stdout)
    assert [r["figures"]["speedup"][0]["over"] for r in both] == ["two/[/run]", "one/[/run]"]
