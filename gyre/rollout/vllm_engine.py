"""vLLM as the engine: an AsyncLLM of this process, behind the desk and the turns of the other engines.

vLLM schedules, caches and batches; the desk (threaded.py) bounds, orders and aborts requests. An update freezes vLLM's requests and drops all keys
and values, so those in flight are computed anew and no prefix of an older version is used again, changes the weights through vLLM's weight-transfer
API, and lets the requests go on.

Invariants: those of engine.py. Draws are ours (vllm_worker.py), so draw k depends on (seed, k) alone here too.

What is vLLM's own: temperatures between 0 and 0.01 are sampled as 0.01, and the log-probs are those of 0.01. On a CPU its sleep frees nothing:
asleep, the engine holds its memory, but no version and nobody's request.

Not here: vLLM and its event loop (vllm_host.py), what runs in its workers (vllm_worker.py). This module is imported without vLLM.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.rollout.engine import INITIAL, EngineRefused, EngineState, FinishReason, Transcript
from gyre.rollout.model import eos_ids, model_dir, model_shapes, position_limit
from gyre.rollout.threaded import Row, ThreadedEngine
from gyre.types import TensorSpec, Version
from gyre.weights.snapshot import check_fit

if TYPE_CHECKING:
    from gyre.rollout.vllm_host import Host, Sampled, Stream

_LOOK_S: Final = 1.0
"""With requests in flight a turn is taken at least so often."""


class VllmRow(Row):
    """A request, and vLLM's answer to it as it comes."""

    stream: Stream | None = None  # None: it waits here


class VllmEngine(ThreadedEngine[VllmRow]):
    """See `Engine`. A publication must have tensors of these `shapes`. `owned`: the host ends with the engine."""

    def __init__(
        self, host: Host, shapes: dict[str, list[int]], *, eos: frozenset[int], context: int, slots: int, queue: int, owned: bool = True
    ) -> None:
        super().__init__(eos=eos, context=context, slots=slots, queue=queue)
        self._host, self._shapes, self._owned = host, shapes, owned
        self._arrived: list[tuple[VllmRow, Sampled | BaseException]] = []  # by the host's thread, under the lock
        self._blank = False  # awake again, and without weights
        self._broken: BaseException | None = None
        self._coming = INITIAL  # the version of the update under way
        self._start()

    def state(self) -> EngineState:
        return msgspec.structs.replace(super().state(), gauges=self._host.gauges())

    def close(self) -> None:
        super().close()
        if self._owned:
            self._host.close()

    def _row(self, transcript: Transcript) -> VllmRow:
        row = VllmRow(transcript)
        if min(row.ids) < 0 or max(row.ids) >= self._host.vocabulary:
            raise EngineRefused("error", f"token ids must lie in 0..{self._host.vocabulary - 1}")
        return row

    def _update(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        self._coming = version
        super()._update(version, tensors, data)

    def _install(self, tensors: list[TensorSpec], data: memoryview) -> None:
        if tensors:
            check_fit(self._shapes, {t.name: t.shape for t in tensors})
        elif self._blank:
            raise WorkFailed("there are no weights to keep: the engine has slept")
        try:
            self._host.update(self._coming, tensors, data)
        except BaseException as e:  # nobody knows which weights it has now
            self._broken = e
            raise
        self._blank = False

    def _drop(self) -> None:
        self._host.sleep()

    def _restore(self) -> None:
        self._host.wake()
        self._blank = True

    def _joined(self, first: int) -> None:
        for row in self.rows[first:]:
            row.stream = self._host.generate(row.request, row.transcript.stop_ids, row.transcript.most, partial(self._put, row))

    def _put(self, row: VllmRow, sampled: Sampled | BaseException) -> None:
        """On the host's thread."""
        with self._work:
            self._arrived.append((row, sampled))
            self._work.notify()

    def _pause_s(self) -> float | None:
        if self._arrived or self._broken is not None:
            return 0.0
        return _LOOK_S if self.rows else None

    def _step(self) -> list[tuple[int, int, float]]:
        raise AssertionError("this engine draws no token by itself: _decode takes what vLLM has drawn")

    def _abort(self, request_ids: set[str]) -> None:
        if request_ids:
            self._decode()  # what has arrived is theirs
        super()._abort(request_ids)

    def _decode(self) -> None:
        if self._broken is not None:
            raise self._broken
        with self._lock:
            arrived, self._arrived = self._arrived, []
        ended: dict[VllmRow, FinishReason] = {}
        for row, sampled in arrived:
            if row.future.done() or row in ended:
                continue  # aborted meanwhile
            if isinstance(sampled, BaseException):
                raise sampled
            reason = self._take(row, sampled)
            if reason is not None:
                ended[row] = reason
        if ended:
            self._leave([(i, ended[row]) for i, row in enumerate(self.rows) if row in ended])

    def _take(self, row: VllmRow, sampled: Sampled) -> FinishReason | None:
        """Put tokens into the transcript; returns why the request is finished, if it is."""
        reason: FinishReason | None = None
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
            if math.isnan(logprob):
                raise WorkFailed(f"the weights of version {sampled.version} give no finite probabilities: the policy has diverged")
            reason = row.transcript.add(token, 0.0 if row.request.sampling.temperature == 0 else logprob, sampled.version)
        self._generated += len(sampled.token_ids)
        if (reason is not None) != (sampled.finish_reason is not None):
            raise RuntimeError(f"vLLM ended a request as {sampled.finish_reason} where its tokens say {reason}")
        return reason

    def _complete(self, row: VllmRow, reason: FinishReason) -> None:
        if reason == "abort" and row.stream is not None:
            row.stream.cancel()
        super()._complete(row, reason)


def open_vllm(config: Config) -> VllmEngine:
    """The engine of a configuration; it has no version until the first `load`. Raises `UsageError`."""
    r = config.rollout
    directory = model_dir(config.model.path)
    shapes = model_shapes(directory)
    context = min(r.context, position_limit(directory) or r.context)
    from gyre.rollout.vllm_host import Host, arguments

    host = Host(arguments(config, context))
    return VllmEngine(host, shapes, eos=eos_ids(directory), context=context, slots=r.slots, queue=r.queue)
