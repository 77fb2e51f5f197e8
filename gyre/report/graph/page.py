"""A prefix graph as one HTML file: the SVG picture, a script that folds subtrees and shows what a segment says. Nothing is loaded from elsewhere.

Invariant: words of a run reach the page as escaped text or as JSON that is shown with `textContent`; and the page's own policy lets no script run but
ours, named by its digest.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

import msgspec

from gyre.report.graph import svg
from gyre.report.graph.layout import Layout

_CSS: Final = """
body { margin: 0; height: 100vh; display: grid; grid-template: auto 1fr / 1fr 24rem; font: 14px/1.45 system-ui, sans-serif; color: #222 }
header { grid-column: 1 / 3; padding: .6rem 1rem; border-bottom: 1px solid #ddd }
h1 { font-size: 1rem; margin: 0 1rem 0 0; display: inline }
header p { margin: .2rem 0 }
header ul { margin: 0; padding: 0; list-style: none; max-height: 5rem; overflow: auto }
header li { margin-right: 1.2rem; display: inline-block }
header b { color: #fff; border-radius: 1em; padding: 0 .45em; font-size: .8em }
main { overflow: auto; padding: 14px }
main > svg { overflow: visible }
aside { overflow: auto; border-left: 1px solid #ddd; padding: .6rem 1rem }
aside h2 { font-size: .9rem; margin: 0 }
aside h3 { font-size: .75rem; margin: 1rem 0 .2rem; color: #6a6a6a }
aside pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 12px }
.s, .k { cursor: pointer }
.s.on > rect:first-child { fill: #fff6dd }
.k circle { fill: #fff; stroke: #222 }
.k text { text-anchor: middle }
.k:focus, .s:focus { outline: 2px solid #0072B2 }
"""
_JS: Final = """
const svg = document.getElementById('graph'), said = JSON.parse(document.getElementById('said').textContent), size = JSON.parse(svg.dataset.size)
const boxes = [...svg.querySelectorAll('.s')], edges = boxes.map((_, i) => svg.getElementById('e' + i)), parent = boxes.map(b => +b.dataset.p)
const children = boxes.map(() => []), below = boxes.map(() => 0), knobs = [], roots = [], folded = new Set()
parent.forEach((p, i) => (p < 0 ? roots : children[p]).push(i))
for (let i = boxes.length - 1; i >= 0; i--) if (parent[i] >= 0) below[parent[i]] += below[i] + 1

function make(parent, tag, attributes, text = '') {
  const e = document.createElementNS('http://www.w3.org/2000/svg', tag)
  for (const k in attributes) e.setAttribute(k, attributes[k])
  e.textContent = text
  return parent.appendChild(e)
}
function draw() {
  const rows = boxes.map(() => -1), stack = roots.map(i => [i, -1]).reverse()
  let row = -1
  while (stack.length) {
    const [i, beside] = stack.pop()
    rows[i] = beside < 0 ? ++row : beside
    if (!folded.has(i)) for (let n = children[i].length - 1; n >= 0; n--) stack.push([children[i][n], n ? -1 : rows[i]])
  }
  boxes.forEach((b, i) => {
    const hidden = rows[i] < 0 ? 'none' : '', column = +b.dataset.c, p = parent[i]
    b.style.display = hidden
    b.setAttribute('transform', `translate(${column * size.x},${rows[i] * size.y})`)
    if (p >= 0) {
      const turn = column * size.x - 22, y = rows[p] * size.y + size.middle
      edges[i].style.display = hidden
      edges[i].setAttribute('d', `M${+boxes[p].dataset.c * size.x + size.width} ${y}H${turn}V${rows[i] * size.y + size.middle}H${turn + 22}`)
    }
    if (knobs[i]) {
      knobs[i].setAttribute('aria-expanded', !folded.has(i))
      knobs[i].lastChild.textContent = folded.has(i) ? '+' + below[i] : '−'
    }
  })
  svg.setAttribute('height', (row + 1) * size.y)
}
function fold(i) { folded.has(i) ? folded.delete(i) : folded.add(i); draw() }
function show(i) {
  boxes.forEach((b, n) => b.classList.toggle('on', n === i))
  const aside = document.querySelector('aside')
  const add = (tag, text) => { const e = document.createElement(tag); e.textContent = text; aside.appendChild(e) }
  aside.textContent = ''
  add('h2', said[i][0])
  for (const [role, words] of said[i][1]) { add('h3', role || 'unknown'); add('pre', words) }
}
function press(element, act) {
  element.setAttribute('tabindex', 0)
  element.setAttribute('role', 'button')
  element.addEventListener('click', e => { e.stopPropagation(); act() })
  element.addEventListener('keydown', e => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); e.stopPropagation(); act() } })
}
boxes.forEach((b, i) => {
  press(b, () => show(i))
  if (!children[i].length) return
  knobs[i] = make(b, 'g', {class: 'k', transform: `translate(${size.width},${size.middle})`, 'aria-label': 'fold'})
  make(knobs[i], 'circle', {r: 9})
  make(knobs[i], 'text', {y: 3.5})
  press(knobs[i], () => fold(i))
})
document.getElementById('fold').onclick = () => { boxes.forEach((b, i) => children[i].length && !b.classList.contains('c') && folded.add(i)); draw() }
document.getElementById('unfold').onclick = () => { folded.clear(); draw() }
draw()
if (boxes.length) show(0)
"""


def page(layout: Layout) -> str:
    """The file's text."""
    digest = base64.b64encode(hashlib.sha256(_JS.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    said = [(", ".join([s.head(), *s.notes]), s.messages) for s in layout.segments]
    data = msgspec.json.encode(said).decode().replace("<", "\\u003c")
    marks = "".join(f'<li><b style="background:{svg.colour_of(i)}">{i + 1}</b> {svg.text(words)}</li>' for i, words in layout.chosen)
    columns = max((s.column for s in layout.segments), default=0) + 1
    rows = max((s.row for s in layout.segments), default=0) + 1
    size = f'{{"x":{svg.STEP_X},"y":{svg.STEP_Y},"width":{svg.WIDTH},"middle":{svg.MIDDLE}}}'
    picture = (f'<svg id="graph" xmlns="http://www.w3.org/2000/svg" width="{columns * svg.STEP_X}" height="{rows * svg.STEP_Y}" '
               f"data-size='{size}'><style>{svg.CSS}</style>{svg.body(layout)}</svg>")  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{svg.text(layout.title)}</title><style>{_CSS}</style></head><body>\n"
        f'<header><h1>{svg.text(layout.title)}</h1><button id="fold">fold what is not chosen</button> <button id="unfold">unfold all</button>'
        f"<p>{svg.text(layout.facts)}</p><ul>{marks}</ul></header>\n<main>{picture}</main><aside></aside>\n"
        f'<script type="application/json" id="said">{data}</script>\n<script>{_JS}</script>\n</body></html>\n'
    )
