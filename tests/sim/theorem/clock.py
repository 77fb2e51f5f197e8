"""An asyncio event loop with virtual time, and processes in it that can be stopped, woken and killed at any turn.

Invariants
- `time()` is virtual: it stands still while anything is ready and then jumps to the next timer. No socket, no thread, no wall clock: what runs here
  depends on its own seeds alone.
- A `Process` is the context that its tasks and callbacks inherit. One that is stopped does not run a single turn (what becomes ready meanwhile
  waits, as after SIGSTOP); one that is killed does not run again while the world lasts, not even its `finally` blocks (as after SIGKILL).
- A world that cannot go on says so: nothing ready and nothing scheduled, or the end of its time, is `Stuck`, which names every task and its place.

Not here: what processes say to each other (network).
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, TypeVar

from gyre.errors import GyreError

T = TypeVar("T")


class Stuck(GyreError):
    """The world cannot go on."""


class Life(Enum):
    """Of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class Process:
    """One life of a simulated process: whatever is spawned or called in its context stops, wakes and dies with it."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.life = Life.RUNNING
        self.ended_at_s: float | None = None
        self.turns = 0
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._at: tuple[int, Callable[[], None]] | None = None
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        loop.processes.append(self)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """A task of this process."""
        return self._loop.create_task(coroutine, name=f"{self.name}:{name or 'main'}", context=self.context.copy())

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function in this process, soon."""
        self._loop.call_soon(function, *args, context=self.context)

    def at_turn(self, turn: int, action: Callable[[], None]) -> None:
        """Do something to this process just before its `turn`-th turn from now."""
        self._at = (self.turns + turn, action)

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self._loop.time()

    @property
    def armed(self) -> bool:
        """Is something to happen to it?"""
        return self._at is not None

    def stop(self) -> None:
        """Like SIGSTOP."""
        if self.life is Life.RUNNING:
            self.life = Life.STOPPED

    def kill(self) -> None:
        """Like SIGKILL."""
        if self.life is not Life.DEAD:
            self.life, self.ended_at_s = Life.DEAD, self.now

    def wake(self) -> None:
        """Go on where it was stopped; the dead stay dead."""
        if self.life is Life.STOPPED:
            self.release()

    def release(self, *, last: bool = False) -> None:
        """Go on, also if it is dead. `last`: nothing happens to it any more."""
        self.life = Life.RUNNING
        if last:
            self._at = None
        held, self._held = self._held, []
        self._loop.ready(held)

    def takes(self, handle: asyncio.Handle) -> bool:
        """May this turn run now?"""
        if self.life is Life.RUNNING:
            self.turns += 1
            if self._at is not None and self.turns >= self._at[0]:
                action, self._at = self._at[1], None
                action()
        if self.life is Life.RUNNING:
            return True
        self._held.append(handle)
        return False


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current() -> Process | None:
    """The process whose turn it is."""
    return _process.get()


class _Turn:
    """Mixed into asyncio's handles: asks the process first. `super` is a handle whose private members have no stubs."""

    __slots__ = ()

    def _run(self: Any) -> None:
        process = self._context.get(_process)
        if process is None or process.takes(self):
            super()._run()  # type: ignore[misc]


class _Handle(_Turn, asyncio.Handle):
    __slots__ = ()


class _Timer(_Turn, asyncio.TimerHandle):
    """Timers of one moment go off in the order in which they were set."""

    __slots__ = ("number",)

    def __init__(self, number: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.number = number
        self._scheduled = True

    def __lt__(self, other: Any) -> bool:
        return (self.when(), self.number) < (other.when(), other.number)


class _Selector:
    """Where a real loop waits for sockets, this one moves its clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.advance(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. The world must have ended at `end_s` and after `end_turns`: the second is for one that turns without its time going on."""

    _ready: Any  # asyncio's own: what is to run in this turn, and a heap of timers
    _scheduled: Any

    def __init__(self, end_s: float = 1e6, end_turns: float = 1e6) -> None:
        super().__init__()
        self.end_s, self.end_turns = end_s, end_turns
        self.turns = 0
        self.processes: list[Process] = []
        self.errors: list[str] = []  # exceptions that nobody caught
        self._now = 0.0
        self._timers = 0
        self._selector = _Selector(self)
        self._tasks: list[asyncio.Task[Any]] = []  # held: the interpreter would run the `finally` blocks of the dead
        self.set_exception_handler(self._on_error)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    def time(self) -> float:
        return self._now

    def advance(self, timeout: float | None) -> None:
        """Once per turn of the loop: `timeout` is 0 while something is ready, None if nothing is and nothing is scheduled."""
        self.turns += 1
        if timeout is None:
            raise Stuck(f"at {self._now:.3f} s nothing is ready and nothing is scheduled; {self.places()}")
        if timeout > 0:
            self._now = self._scheduled[0].when()
        if self._now > self.end_s or self.turns > self.end_turns:
            self.end_s = self.end_turns = float("inf")
            raise Stuck(f"not done at {self._now:.3f} s and after {self.turns} turns; {self.places()}")

    def places(self) -> str:
        """Each unfinished task, and where it waits."""
        waiting = [f"{t.get_name()} at {_place(t.get_coro())}" for t in self._tasks if not t.done()]
        lives = [f"{p.name} is {p.life.value}" for p in self.processes if p.life is not Life.RUNNING]
        return "; ".join([f"{len(waiting)} tasks wait: {', '.join(sorted(waiting))}", *lives])

    def create_task(self, coro: Any, *, name: Any = None, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        self._tasks.append(task)
        return task

    def ready(self, handles: list[asyncio.Handle]) -> None:
        """Handles whose time has come, in this order."""
        self._ready.extend(handles)

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:  # fmt: skip
        self._timers += 1
        timer = _Timer(self._timers, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        return timer

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There are no threads."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """There are no threads: it is done at once."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def end(self) -> None:
        """Let what is left come to its end, the dead too, so that nothing is left for the interpreter to tidy up."""
        for process in self.processes:
            process.release(last=True)
        left = [t for t in self._tasks if not t.done()]
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.wait(left))
        self.close()


def _place(coroutine: Any) -> str:
    """Function and line at which a coroutine waits, following what it awaits."""
    where = ""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is None:
            break
        where = f"{frame.f_code.co_name}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return where


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], *, end_s: float = 1e6, end_turns: float = 1e6) -> T:
    """Run a world to the end of its main coroutine. Raises what that raises, `Stuck`, or `AssertionError` for exceptions that nobody caught."""
    loop = VirtualLoop(end_s, end_turns)
    try:
        result = loop.run_until_complete(main(loop))
    finally:
        errors = list(loop.errors)
        loop.end_s, loop.end_turns = loop.time() + 1e4, loop.turns + 1e5
        loop.end()
    assert not errors, errors
    return result
