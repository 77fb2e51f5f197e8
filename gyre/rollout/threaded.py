"""What engines inside this process share: one thread that takes turns, and a desk where other threads leave requests.

A turn is, in this order: aborts, orders (updates, sleep, wake) as they were given, joins, one token for each row in flight. So an abort never waits
for an update, an update falls between two tokens, a request joins under the weights that decode its first token, and when an engine falls asleep
nothing is open.

Invariants
- Only the engine's thread touches `rows` and what the hooks use; `_lock` guards the desk.
- Rows in flight are `rows[0..n-1]` without gaps: when one leaves, the last takes its place (`_moved` says so).
- What the thread raises ends the engine: it is the exception of every open future, and of `stopped`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

from gyre.errors import WorkFailed
from gyre.rollout.engine import Completion, EngineRefused, EngineRequest, EngineState, FinishReason, Transcript, check
from gyre.types import TensorSpec, Version

JOIN_TOKENS: Final = 8192
"""Prompt tokens that may join between two decode steps; one prompt always may."""
_CLOSE_S: Final = 60.0


class Row:
    """A request in flight or waiting. `ids` are its prompt and what was sampled."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.ids: list[int] = list(transcript.request.prompt_ids)
        self.future: Future[Completion] = Future()
        self.future.set_running_or_notify_cancel()  # nobody but the engine ends it

    @property
    def request(self) -> EngineRequest:
        return self.transcript.request


R = TypeVar("R", bound=Row)


class _Order:
    """What is to happen between two tokens."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()


class ThreadedEngine(ABC, Generic[R]):
    """See `Engine`. A subclass ends its `__init__` with `self._start()`."""

    def __init__(self, *, eos: frozenset[int], context: int, slots: int, queue: int) -> None:
        self.context = context
        self.eos = eos
        self.rows: list[R] = []
        self.version: Version | None = None  # written by the engine's thread under the lock
        self._slots, self._capacity = slots, slots + queue
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._open: dict[str, R] = {}
        self._waiting: deque[R] = deque()
        self._aborts: set[str] = set()
        self._orders: deque[_Order] = deque()
        self._generated = 0
        self._closing = False  # for good
        self._shut = False  # admission, until the next wake
        self._asleep = False
        self._stopped: Future[None] = Future()
        self._stopped.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- hooks ----------------------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _row(self, transcript: Transcript) -> R:
        """A row for a request, or `EngineRefused`. Called from any thread."""

    @abstractmethod
    def _install(self, tensors: list[TensorSpec], data: memoryview) -> None:
        """Change the weights (none given: they stay), make what is cached for `rows` theirs. Raises `WorkFailed` with nothing changed."""

    @abstractmethod
    def _joined(self, first: int) -> None:
        """`rows[first:]` have just joined."""

    @abstractmethod
    def _step(self) -> list[tuple[int, int, float]]:
        """Tokens drawn now: (row, token, log-prob), rows ascending, at most one for each."""

    def _moved(self, source: int, target: int) -> None:
        """`rows[target]` was at position `source`."""

    def _drop(self) -> None:
        """Hold no weights, and nothing computed with them. No row is in flight."""

    def _restore(self) -> None:
        """Make room for the weights of the next `_install`."""

    def _ended(self, row: R) -> bool:
        """The engine has no more tokens for this row, whatever the last one was."""
        return False

    def _pause_s(self) -> float | None:
        """With rows in flight: how long until a step has something to do (None: nothing is in flight)."""
        return 0.0 if self.rows else None

    # --- any thread -----------------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start()

    def _check(self, request: EngineRequest) -> None:
        check(
            request,
            version=self.version,
            context=self.context,
            open_requests=len(self._open),
            capacity=self._capacity * (2 if request.moved or request.drawn else 1),
            closing=self._closing or self._shut,
        )
        if request.request_id in self._open:
            raise EngineRefused("error", f"request {request.request_id} is open already")

    def submit(self, request: EngineRequest) -> Future[Completion]:
        with self._lock:
            self._check(request)
        row = self._row(Transcript(request, self.eos, self.context))
        if request.sampling.max_tokens < 1:
            row.future.set_result(row.transcript.completion("length"))
            return row.future
        with self._work:
            self._check(request)  # again: others may have submitted meanwhile
            self._open[request.request_id] = row
            if request.moved or request.drawn:
                self._waiting.insert(sum(r.request.moved or r.request.drawn > 0 for r in self._waiting), row)
            else:
                self._waiting.append(row)
            self._work.notify()
        return row.future

    def abort(self, request_id: str) -> None:
        with self._work:
            if request_id in self._open:
                self._aborts.add(request_id)
                self._work.notify()

    def load(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> Future[None]:
        return self._order(lambda: self._update(version, tensors, data))

    def drain(self) -> Future[None]:
        return self._order(lambda: None, shut=True)  # aborts come before orders

    def sleep(self) -> Future[None]:
        return self._order(self._fall_asleep, shut=True)

    def wake(self) -> Future[None]:
        return self._order(self._wake_up)

    def _order(self, act: Callable[[], None], *, shut: bool = False) -> Future[None]:
        order = _Order(act)
        with self._work:
            if self._closing:
                raise EngineRefused("closing", "this engine is closing")
            if shut:
                self._shut = True
                self._aborts.update(self._open)
            self._orders.append(order)
            self._work.notify()
        return order.future

    def state(self) -> EngineState:
        with self._lock:
            n, waiting = len(self._open), len(self._waiting)
            free = 0 if self._shut else max(0, self._capacity - n)
            return EngineState(self.version, n - waiting, waiting, free, self._generated, self._slots)

    @property
    def stopped(self) -> Future[None]:
        return self._stopped

    def close(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(_CLOSE_S)

    # --- the engine's thread --------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as e:  # the thread's last words: whoever waits for it learns of the bug
            self._fail(e)
            self._stopped.set_exception(e)
        else:
            self._stopped.set_result(None)

    def _turn(self) -> bool:
        """One round; returns False when the engine has closed."""
        with self._work:
            while not (self._waiting_room() or self._aborts or self._orders or self._closing):
                pause_s = self._pause_s()
                if pause_s == 0 or not self._work.wait(pause_s):
                    break
            aborts, self._aborts = self._aborts, set()
            if self._closing:
                aborts = set(self._open)
            orders, closing = list(self._orders), self._closing
            if closing:
                self._orders.clear()
        self._abort(aborts)
        if closing:
            for order in orders:
                order.future.set_exception(EngineRefused("closing", "this engine is closing"))
            return False
        for order in orders:
            self._obey(order)
        self._join()
        self._decode()
        return True

    def _waiting_room(self) -> bool:
        """Somebody waits and can join."""
        return bool(self._waiting) and len(self.rows) < self._slots

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._closing = True
            futures: list[Future[Any]] = [row.future for row in self._open.values()] + [o.future for o in self._orders]
            self._open.clear()
            self._orders.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _abort(self, request_ids: set[str]) -> None:
        if not request_ids:
            return
        with self._lock:
            gone = [row for row in self._waiting if row.request.request_id in request_ids]
            self._waiting = deque(row for row in self._waiting if row.request.request_id not in request_ids)
        for row in gone:
            self._complete(row, "abort")
        self._leave([(i, "abort") for i, row in enumerate(self.rows) if row.request.request_id in request_ids])

    def _obey(self, order: _Order) -> None:
        """Between two tokens. A refusal, or weights that do not fit, changed nothing and is told to whoever asked."""
        try:
            order.act()
        except (WorkFailed, EngineRefused) as e:
            order.future.set_exception(e)
        else:
            order.future.set_result(None)
        with self._lock:
            self._orders.remove(order)

    def _update(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        if self._asleep:
            raise EngineRefused("closing", "this engine is asleep")
        self._install(tensors, data)
        with self._lock:
            self.version = version

    def _fall_asleep(self) -> None:
        with self._lock:
            assert not self._open, "it falls asleep with requests open"
            already, self.version, self._asleep = self._asleep, None, True
        if not already:
            self._drop()

    def _wake_up(self) -> None:
        if self._asleep:
            self._restore()
        with self._lock:
            self._asleep = self._shut = False

    def _join(self) -> None:
        room, first = JOIN_TOKENS, len(self.rows)
        with self._lock:
            while self._waiting_room() and (room >= len(self._waiting[0].ids) or room == JOIN_TOKENS):
                row = self._waiting.popleft()
                room -= len(row.ids)
                self.rows.append(row)
        if len(self.rows) > first:
            self._joined(first)

    def _decode(self) -> None:
        if not self.rows:
            return
        version = self.version
        assert version is not None  # nothing is taken before the first load
        finished: list[tuple[int, FinishReason]] = []
        drawn = self._step()
        for i, token, logprob in drawn:
            row = self.rows[i]
            row.ids.append(token)
            reason = row.transcript.add(token, logprob, version)
            if reason is None and self._ended(row):
                reason = "stop"
            if reason is not None:
                finished.append((i, reason))
        self._generated += len(drawn)
        self._leave(finished)

    def _leave(self, finished: list[tuple[int, FinishReason]]) -> None:
        """Complete rows, given in ascending order of position; the last row moves into each gap."""
        for i, reason in reversed(finished):
            row, last = self.rows[i], self.rows.pop()
            if last is not row:
                self.rows[i] = last
                self._moved(len(self.rows), i)
            self._complete(row, reason)

    def _complete(self, row: R, reason: FinishReason) -> None:
        with self._lock:
            del self._open[row.request.request_id]
            self._aborts.discard(row.request.request_id)
        row.future.set_result(row.transcript.completion(reason))
