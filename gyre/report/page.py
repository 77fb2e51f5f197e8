"""One self-contained HTML file: a run's summary, its steps, and the figures as SVG inside. No script, nothing loaded from elsewhere.

Whatever came from a run (names, reasons, an agent's words in a failure) is escaped and without control sequences.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from gyre.report import plots, stall
from gyre.report.figures import brief, plain
from gyre.report.live import RunView
from gyre.report.show import WIDTH, text_of
from gyre.report.summary import COLUMNS, cells, facts
from gyre.report.timeline import Timeline

_CSS: Final = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
figure { margin: 1rem 0; background: #fff; color: #222; border-radius: 6px; padding: .5rem; overflow-x: auto }
figure svg { width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
th, td { text-align: right; padding: .1rem .6rem; border-bottom: 1px solid #8884 } th:first-child, td:first-child { text-align: left }
table.facts td, table.facts th { text-align: left } pre { margin: 0; font-size: .8rem }
div.wide { overflow: auto; max-height: 30rem } .bad { color: #D55E00 } footer { margin-top: 3rem; opacity: .6; font-size: .8rem }
"""


def page(runs: Sequence[Timeline], summaries: Sequence[dict[str, Any]], chosen: Sequence[plots.Drawing], views: Sequence[RunView]) -> str:
    """The file's text. `summaries` are those of the runs that have a ledger; `views` have taken in all events of each run."""
    title = _text(", ".join(t.name for t in runs))
    body = [f"<h1>gyre: {title}</h1>"]
    for t in runs:
        if t.failure:
            body.append(f'<p class="bad">{_text(t.name)} failed: {_text(t.failure)}</p>')
        body += [f"<p>{_text(t.name)}: {_text(m)}</p>" for m in t.messages]
    if summaries:
        columns = [facts(s) for s in summaries]  # one for each run
        rows = [[label, *(c[label] for c in columns)] for label in columns[0]]
        body.append(_table(["run", *(s["run_id"] for s in summaries)], rows, "facts"))
    for i, drawing in enumerate(chosen):
        svg = plots.save([drawing], "svg", salt=f"gyre-{i}").decode()
        body.append(f"<figure>{svg[svg.index('<svg') :]}</figure>")
    for s in summaries:
        if s["table"]:
            body += [f"<h2>Steps of {_text(s['run_id'])}</h2>", _table([h for h, _, _ in COLUMNS], cells(s["table"]))]
        if evals := s["eval"]["all"]:
            kinds = sorted({k for e in evals for k in e["by_kind"]})
            rows = [[str(e["version"]), brief(e["reward_mean"]), str(e["graded"])] for e in evals]
            for row, e in zip(rows, evals, strict=True):
                row += [brief(e["by_kind"].get(k, {}).get("reward_mean")) for k in kinds]
            body += [f"<h2>Held-out tasks of {_text(s['run_id'])}</h2>", _table(["version", "reward", "graded", *kinds], rows)]
    for t, view in zip(runs, views, strict=True):
        if view.recent:
            body += [f"<h2>Events of {_text(t.name)}</h2>", _lines(view.recent)]
        if view.stall is not None:
            body += [f"<h2>The last stall of {_text(t.name)}</h2>", _lines(text_of(partial(stall.drawing, view.stall), WIDTH).splitlines())]
    unpublished = [t.name for t in runs if not t.bursts]
    origin = "Where nothing else is said, times are counted from a run's first publication"
    origin += f", of {_text(', '.join(unpublished))} from the first event: nothing was published" if unpublished else ""
    body.append(f"<footer>Written by gyre-report. {origin}.</footer>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>gyre: {title}</title><style>{_CSS}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _text(value: object) -> str:
    return html.escape(plain(str(value)))


def _lines(lines: Iterable[str]) -> str:
    return '<div class="wide"><pre>' + "\n".join(_text(line) for line in lines) + "</pre></div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    lines = ["<tr>" + "".join(f"<th>{_text(h)}</th>" for h in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{_text(c)}</td>" for c in row) + "</tr>" for row in rows]
    return f'<div class="wide"><table class="{kind}">' + "\n".join(lines) + "</table></div>"
