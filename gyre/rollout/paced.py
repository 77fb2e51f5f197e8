"""An engine that sleeps instead of computing: tokens come by the clock, under the contract of every engine. For time-compressed runs; needs no torch.

Invariants
- Every row in flight gets a token each `token_s(rows in flight)` seconds: the same for any number of rows where a row stands for a slot, slower
  with more of them where they share the engine. At most `slots` rows are in flight, the rest queue.
- Progress is a number, not a loop: the thread wakes when the next row has its last token, so thousands of rows cost nothing between two events.
- What a request has when it is aborted is its progress, rounded to the nearest token: over many moves of an execution nothing is lost or gained.
- Token k of a request is a function of (seed, k) alone, so an execution that moves between engines has the tokens it would have had here.

Every token has log-prob -0.5. Weights are looked at no further than their layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gyre.config import Config
from gyre.rollout.engine import FinishReason, Transcript
from gyre.rollout.threaded import Row, ThreadedEngine
from gyre.rules.pace import open_pace
from gyre.types import TensorSpec
from gyre.wire.messages import VersionSpan

LOGPROB: Final = -0.5
VOCABULARY: Final = 1000
_LOOK_S: Final = 0.1  # progress is counted at least so often, for gauges and for whoever waits for a token
_LATE_S: Final = 0.001  # a row this near to its end has ended


class PacedRow(Row):
    """A request by the clock. `progress` is in tokens, and ahead of what was handed out by less than one or (rounded up) behind by a half."""

    def __init__(self, transcript: Transcript, total: int) -> None:
        super().__init__(transcript)
        self.total = total
        self.progress = 0.0

    def take(self, n: int) -> list[int]:
        """The next tokens, up to number `n` of this request."""
        request, have = self.request, len(self.transcript.token_ids)
        first = request.seed + request.drawn
        return [(first + k) % VOCABULARY for k in range(have, n)]


class PacedEngine(ThreadedEngine[PacedRow]):
    """See `Engine`. `token_s` gives the seconds of a token when so many rows are in flight; falling asleep and waking take theirs."""

    def __init__(
        self, token_s: Callable[[int], float], *, context: int, slots: int, queue: int, to_train_s: float = 0.0, to_rollout_s: float = 0.0
    ) -> None:
        super().__init__(eos=frozenset(), context=context, slots=slots, queue=queue)
        self._token_s, self._to_train_s, self._to_rollout_s = token_s, to_train_s, to_rollout_s
        self._at = time.monotonic()  # the time that the rows' progress is of
        self._start()

    def _row(self, transcript: Transcript) -> PacedRow:
        request = transcript.request
        return PacedRow(transcript, min(request.sampling.max_tokens, self.context - len(request.prompt_ids)))

    def _install(self, tensors: list[TensorSpec], data: memoryview) -> None:
        self._advance()
        self._decode()  # what came before is of the version before

    def _drop(self) -> None:
        time.sleep(self._to_train_s)

    def _restore(self) -> None:
        time.sleep(self._to_rollout_s)

    def _joined(self, first: int) -> None:
        pass

    def _step(self) -> list[tuple[int, int, float]]:
        raise AssertionError("this engine draws no token by itself: _decode is by the clock")

    def _pause_s(self) -> float | None:
        if not self.rows:
            return None
        left = min(row.total - row.progress for row in self.rows) * self._token_s(len(self.rows))
        return max(0.0, min(left - (time.monotonic() - self._at), _LOOK_S))

    # --- by the clock, before anything happens to the rows ----------------------------------------------------------------------------------

    def _abort(self, request_ids: set[str]) -> None:
        self._advance()
        if request_ids:
            for row in self.rows:
                if row.request.request_id in request_ids:
                    self._hand_out(row, min(row.total, round(row.progress)))
        super()._abort(request_ids)

    def _join(self) -> None:
        self._advance()
        super()._join()

    def _decode(self) -> None:
        self._leave([(i, reason) for i, row in enumerate(self.rows) if (reason := self._hand_out(row, int(row.progress))) is not None])

    def _advance(self) -> None:
        """Bring every row's progress to now."""
        now = time.monotonic()
        if self.rows:
            token_s = self._token_s(len(self.rows))
            done, near = (now - self._at) / token_s, _LATE_S / token_s
            for row in self.rows:
                row.progress += done
                if row.progress > row.total - near:
                    row.progress = row.total
        self._at = now

    def _hand_out(self, row: PacedRow, n: int) -> FinishReason | None:
        """Put tokens up to number `n` into the transcript; returns why the request is finished, if it is."""
        transcript, version = row.transcript, self.version
        assert version is not None  # nothing is taken before the first load
        have = len(transcript.token_ids)
        ids = row.take(min(n, row.total))
        stop = next((k for k, token in enumerate(ids) if token in row.request.stop_ids), None) if row.request.stop_ids else None
        if stop is not None:
            del ids[stop + 1 :]
        if ids:
            start = have
            if transcript.spans and transcript.spans[-1].version == version:
                start = transcript.spans.pop().start
            transcript.spans.append(VersionSpan(version, start, have + len(ids)))
            transcript.token_ids.extend(ids)
            transcript.logprobs.extend([LOGPROB] * len(ids))
            self._generated += len(ids)
        if stop is not None:
            return "stop"
        if len(transcript.token_ids) < row.total:
            return None
        return "length" if row.total == row.request.sampling.max_tokens else "context"


def open_paced(config: Config) -> PacedEngine:
    """The engine of a configuration. Raises `UsageError`."""
    pace = open_pace(config.run.workload, config.run.compress)
    limits = {"context": config.rollout.context, "slots": config.rollout.slots * pace.soft, "queue": config.rollout.queue}
    return PacedEngine(pace.token_s, **limits, to_train_s=pace.to_train_s, to_rollout_s=pace.to_rollout_s)
