"""An engine that recites: completions from a JSON-lines script, under the contract of every engine. For tests and demonstrations; needs no torch.

A line is an object with `text` (tokenised by the model's tokenizer; an end-of-turn id is appended unless `"eos": false`) or `token_ids`. It may have

- `match`: a regular expression searched in the prompt's text, or `suffix_ids`: ids the prompt ends with. The first such line that fits is recited.
- neither: ordered lines. A rollout's next one is the first that is not yet in its prompt, looking for one behind the other: this needs no
  memory, so another engine, or a re-issued rollout, recites the same.
- `rollout`: a regular expression searched in the rollout's id; the line is for those only.
- `token_delay_s`: pause before each token.

Every token has log-prob -0.5. When no line fits, the request is refused as an error that says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre import inputs
from gyre.config import Config
from gyre.errors import UsageError
from gyre.rollout.engine import EngineRefused, EngineRequest, Transcript
from gyre.rollout.model import eos_ids, model_dir
from gyre.rollout.threaded import Row, ThreadedEngine
from gyre.types import TensorSpec

LOGPROB: Final = -0.5


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a script."""

    text: str | None = None
    token_ids: list[int] | None = None
    match: str | None = None
    suffix_ids: list[int] | None = None
    rollout: str | None = None
    token_delay_s: float = 0.0
    eos: bool = True


class Script:
    """The lines, with their tokens. `decode` gives the text of ids; only scripts with `match` need it."""

    def __init__(self, lines: Sequence[tuple[Line, list[int]]], decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._lines = lines
        self._decode = decode

    def find(self, request: EngineRequest) -> tuple[Line, list[int]]:
        """The line for a request, with all its tokens. Raises `EngineRefused`."""
        prompt = [int(t) for t in request.prompt_ids]
        before, drawn = prompt[: len(prompt) - request.drawn], prompt[len(prompt) - request.drawn :]
        ours = [(line, ids) for line, ids in self._lines if line.rollout is None or re.search(line.rollout, request.rollout_id)]
        line, ids = self._conditional(ours, before) or self._ordered(ours, before)
        if ids[: len(drawn)] != drawn:
            raise EngineRefused("error", "the tokens to continue from are not those of the script's line")
        return line, ids

    def _conditional(self, lines: Sequence[tuple[Line, list[int]]], prompt: list[int]) -> tuple[Line, list[int]] | None:
        text: str | None = None
        for line, ids in lines:
            if line.suffix_ids is not None and prompt[-len(line.suffix_ids) :] == line.suffix_ids:
                return line, ids
            if line.match is not None and self._decode is not None:
                text = self._decode(prompt) if text is None else text
                if re.search(line.match, text):
                    return line, ids
        return None

    def _ordered(self, lines: Sequence[tuple[Line, list[int]]], prompt: list[int]) -> tuple[Line, list[int]]:
        at = 0
        for line, ids in lines:
            if line.match is not None or line.suffix_ids is not None:
                continue
            found = find_ids(prompt, ids, at)
            if found < 0:
                return line, ids
            at = found + len(ids)
        raise EngineRefused("error", "no line of the script fits this prompt")


def find_ids(haystack: Sequence[int], needle: Sequence[int], start: int) -> int:
    """Position of `needle` in `haystack` at or after `start`, or -1."""
    n = len(needle)
    return next((i for i in range(start, len(haystack) - n + 1) if haystack[i] == needle[0] and list(haystack[i : i + n]) == needle), -1)


class _Recital(Row):
    def __init__(self, transcript: Transcript, line: Line, ids: list[int]) -> None:
        super().__init__(transcript)
        self.left = ids[transcript.request.drawn :]
        self.delay_s = line.token_delay_s
        self.due = 0.0


class ScriptedEngine(ThreadedEngine[_Recital]):
    """See `Engine`. Weights are taken note of, not looked at."""

    def __init__(self, script: Script, *, eos: frozenset[int], context: int, slots: int, queue: int) -> None:
        super().__init__(eos=eos, context=context, slots=slots, queue=queue)
        self._script = script
        self._start()

    def _row(self, transcript: Transcript) -> _Recital:
        line, ids = self._script.find(transcript.request)
        if transcript.request.drawn >= len(ids):
            raise EngineRefused("error", "the script's line has no more tokens to continue with")
        return _Recital(transcript, line, ids)

    def _install(self, tensors: list[TensorSpec], data: memoryview) -> None:
        pass

    def _joined(self, first: int) -> None:
        now = time.monotonic()
        for row in self.rows[first:]:
            row.due = now + row.delay_s

    def _ended(self, row: _Recital) -> bool:
        return not row.left

    def _pause_s(self) -> float | None:
        return max(0.0, min(row.due for row in self.rows) - time.monotonic()) if self.rows else None

    def _step(self) -> list[tuple[int, int, float]]:
        now = time.monotonic()
        drawn = [(i, row.left[0], LOGPROB) for i, row in enumerate(self.rows) if row.due <= now]
        for i, _, _ in drawn:
            row = self.rows[i]
            row.due = max(row.due + row.delay_s, now)
            del row.left[0]
        return drawn


def load_script(file: Path, tokenizer: Any | None, eos: frozenset[int]) -> Script:
    """Read a script. `tokenizer` is a tokenizers.Tokenizer, needed for `text` and `match`. Raises `UsageError` naming the line."""
    texts = inputs.text(file, "give a JSON-lines file of completions", "rollout.script").splitlines()
    lines: list[tuple[Line, list[int]]] = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            where = f"{file}:{number}"
            line = _parse(where, text)
            if tokenizer is None and (line.text is not None or line.match is not None):
                raise UsageError(where, "text and match need a tokenizer", "set model.path, or use token_ids and suffix_ids")
            lines.append((line, _tokens(where, line, tokenizer, eos)))
    if not lines:
        raise UsageError(str(file), "holds no completion", 'write lines like {"text": "Hello"}', "rollout.script")
    return Script(lines, None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))


def _parse(where: str, text: str) -> Line:
    try:
        line = msgspec.json.decode(text, type=Line)
        for pattern in (line.match, line.rollout):
            re.compile(pattern or "")
    except (msgspec.MsgspecError, re.error) as e:
        raise UsageError(where, f"not a line of a script ({str(e).lower()})", 'write lines like {"match": "regex", "text": "Hello"}') from None
    if (line.text is None) == (line.token_ids is None):
        raise UsageError(where, "needs either text or token_ids", 'write lines like {"text": "Hello"}')
    return line


def _tokens(where: str, line: Line, tokenizer: Any, eos: frozenset[int]) -> list[int]:
    if line.token_ids is not None:
        ids = line.token_ids
    else:
        ids = list(tokenizer.encode(line.text, add_special_tokens=False).ids)
        if line.eos and eos and (not ids or ids[-1] not in eos):
            ids.append(end_of_turn(tokenizer, eos))
    if not ids:
        raise UsageError(where, "a completion without tokens", "give at least one token, or leave eos on")
    return ids


def end_of_turn(tokenizer: Any, eos: frozenset[int]) -> int:
    """Which of several end ids ends an assistant's turn: ChatML's if it is one of them, else the highest."""
    chatml = tokenizer.token_to_id("<|im_end|>")
    return chatml if chatml in eos else max(eos)


def open_scripted(config: Config) -> ScriptedEngine:
    """The engine of a configuration. Raises `UsageError`."""
    r = config.rollout
    if not r.script:
        raise UsageError("run.toml", "not set, and the scripted engine recites it", "give a JSON-lines file of completions", "rollout.script")
    tokenizer, eos = None, frozenset[int]()
    if config.model.path:
        directory = model_dir(config.model.path)
        eos = eos_ids(directory)
        file = directory / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
    return ScriptedEngine(load_script(Path(r.script), tokenizer, eos), eos=eos, context=r.context, slots=r.slots, queue=r.queue)
