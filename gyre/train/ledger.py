"""The buffer as a cell's trainer sees it: questions in, answers or exceptions out.

Invariants
- Every request carries the term; a refusal of one that only the core may make means that a newer core exists, and is `WorkFailed`.
- An accumulator belongs to (cell, incarnation): when the buffer voids it, `Voided` is raised and `rejoin` begins a new incarnation.
- The client repeats requests while the buffer is away, so the caller just waits, at most net.request_timeout_s beyond what it asked for.

Not here: what to do about any of it (loop.py, satellite.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre.config import Config
from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.net.sockets import mint
from gyre.train.model import MicroStepData
from gyre.train.protocols import Claimed, LeftLineage, Voided
from gyre.types import Version
from gyre.weights.transfer import Requester
from gyre.wire import messages as w
from gyre.wire.codec import Arrays

log = logging.getLogger(__name__)

GONE_S: Final = 5.0
LOOK_S: Final = 0.5  # how often a core that is done asks whether the run is finished
WAIT_S: Final = 2.0  # how long the buffer may sit on a claim or a seal; below the client's resend_s


class Ledger:
    """One cell's trainer at the buffer. A core begins with `acquire`, a satellite sets `term` to that of the weights it pulled."""

    def __init__(self, client: Requester, config: Config, *, cell: str, incarnation: str,
                 decode: Callable[..., Any] = MicroStepData.from_arrays, mint: Callable[[], str] = mint) -> None:  # fmt: skip
        self.term = 0
        self.incarnation = incarnation
        self.cell = cell
        self._client = client
        self._decode, self._mint = decode, mint
        self._claim: w.ClaimMicroStep | None = None  # asked and not answered
        self._life = 0
        self._first = incarnation
        self._timeout_s = config.net.request_timeout_s
        self._renew_s = config.train.claim_ttl_s / 3
        self._voided = False

    async def acquire(self, step: int, *, fresh: bool = False, checkpoint_term: int = 0) -> int:
        """Become the core from the checkpoint at `step`, written under `checkpoint_term`. Returns the run's total of steps. Raises `LeftLineage`."""
        asked = w.AcquireTerm(id=self._mint(), cell=self.cell, step=step, fresh=fresh, checkpoint_term=checkpoint_term)
        reply = await self._ask(asked, "gyre-buffer to grant a term")
        match reply:
            case w.Refuse(stale=True):
                raise LeftLineage(reply.reason)
            case w.TermGranted():
                self.term = reply.term
                return reply.total_steps
            case w.Refuse():
                raise WorkFailed(f"the buffer grants no term from step {step}: {reply.reason}")
            case _:
                raise self._unexpected(reply)

    async def claim(self, step: int) -> Claimed | w.NothingToClaim:
        """The next micro-step of `step`, or why there is none now. Raises `Voided`."""
        message = w.ClaimMicroStep(id=self._mint(), term=self.term, step=step, cell=self.cell, incarnation=self.incarnation, wait_s=WAIT_S)
        self._check()
        self._claim = message
        try:
            reply, arrays = await self._request(message, f"a micro-step of step {step}")
        finally:
            self._claim = None
        match reply:
            case w.MicroStepClaimed():
                return Claimed(reply.micro_step_id, self._decode(reply.trajectories, arrays))
            case w.NothingToClaim():
                return reply
            case _:
                raise self._refused(reply)

    def hurry(self) -> None:
        """Have the claim that waits for a micro-step answered now, with one or without."""
        if self._claim is not None:
            self._client.send(msgspec.structs.replace(self._claim, wait_s=0.0))

    async def accumulated(self, step: int, micro_step_id: str) -> None:
        """Tell that a claim's gradient is in the accumulator. Raises `Voided`."""
        self._check()
        message = w.Accumulated(id=self._mint(), term=self.term, step=step, micro_step_id=micro_step_id, cell=self.cell, incarnation=self.incarnation)
        reply = await self._ask(message, f"gyre-buffer to note micro-step {micro_step_id}")
        if not isinstance(reply, w.Ack):
            raise self._refused(reply)

    async def seal(self, step: int) -> w.Manifest | w.NothingToClaim:
        """Close the step; its manifest, or what is missing for it. Raises `Voided`."""
        self._check()
        reply = await self._ask(w.SealStep(id=self._mint(), term=self.term, step=step, wait_s=WAIT_S), f"the manifest of step {step}")
        if isinstance(reply, w.Manifest | w.NothingToClaim):
            return reply
        raise self._refused(reply)

    async def void(self, step: int, cells: list[w.Member], reason: str) -> None:
        """Give up these accumulators of `step`. Raises `Voided` when the step is over."""
        message = w.VoidIncarnations(id=self._mint(), term=self.term, step=step, cells=cells, reason=reason)
        reply = await self._ask(message, f"gyre-buffer to void {', '.join(c.cell for c in cells)}")
        if not isinstance(reply, w.Ack):
            raise self._refused(reply)

    def abandon(self, step: int) -> None:
        """Tell, without waiting for an answer, that this cell ends and its accumulator of `step` with it."""
        own = w.Member(self.cell, self.incarnation)
        self._client.send(w.VoidIncarnations(id=self._mint(), term=self.term, step=step, cells=[own], reason="the cell was told to end"))

    async def commit(self, manifest: w.Manifest, metrics: dict[str, float | None]) -> None:
        """Make the update of a manifest count."""
        message = w.CommitStep(id=self._mint(), term=self.term, step=manifest.step, hash=manifest.hash, metrics=metrics)
        await self._must(message, f"gyre-buffer to commit step {manifest.step}")

    async def published(self, version: Version, cells: list[str], seconds: float) -> None:
        """Tell that the engines of `cells` serve `version`."""
        message = w.Published(id=self._mint(), version=version, cells=cells, seconds=seconds)
        await self._must(message, f"gyre-buffer to note the publication of step {version.step}")

    async def checkpoint_saved(self, step: int, path: Path) -> None:
        """Tell that a restart will need nothing before `step`."""
        message = w.CheckpointSaved(id=self._mint(), term=self.term, step=step, path=str(path))
        await self._must(message, f"gyre-buffer to note the checkpoint of step {step}")

    async def note(self, event: str, **fields: Any) -> None:
        """An event for the run's log."""
        await self._must(w.Note(id=self._mint(), event=event, fields=fields), f"gyre-buffer to log {event}")

    async def until_finished(self) -> None:
        """Wait until nothing is left to do: the last policy evaluated, or the run failed, or the buffer gone, which ends by itself then."""
        while True:
            question = w.Subscribe(id=self._mint(), min_interval_s=3600.0)
            try:
                reply, _ = await self._client.request(question, deadline_s=GONE_S, what="gyre-buffer to tell how far the run is")
            except DeadlineExceeded:
                return
            if not isinstance(reply, w.Counters) or reply.finished or reply.failure:
                return
            await asyncio.sleep(LOOK_S)

    def rejoin(self) -> None:
        """Begin a new incarnation, with an empty accumulator."""
        self._life += 1
        self.incarnation = f"{self._first}.{self._life}"
        self._voided = False

    async def renew_for_ever(self) -> None:
        """Keep the claims' leases alive, until cancelled."""
        while True:
            await asyncio.sleep(self._renew_s)
            term, incarnation = self.term, self.incarnation
            if term == 0:
                continue  # has not joined anything
            message = w.RenewClaims(id=self._mint(), term=term, cell=self.cell, incarnation=incarnation)
            reply = await self._ask(message, "gyre-buffer to renew claims")
            if isinstance(reply, w.Refuse) and (term, incarnation) == (self.term, self.incarnation):
                self._voided = True

    def _check(self) -> None:
        if self._voided:
            raise Voided("its lease ran out")

    async def _ask(self, message: w.Message, what: str) -> w.Message:
        return (await self._request(message, what))[0]

    async def _request(self, message: w.Message, what: str) -> tuple[w.Message, Arrays]:
        answer = await self._client.request(message, deadline_s=self._timeout_s, what=what)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # before Python 3.12, asyncio.wait_for swallows a cancellation that meets its answer
        return answer

    async def _must(self, message: w.Message, what: str) -> None:
        match reply := await self._ask(message, what):
            case w.Ack():
                return
            case w.Refuse():
                newer = "a newer core exists: " if reply.stale else ""
                raise WorkFailed(f"the buffer refused {type(message).__name__}: {newer}{reply.reason}")
            case _:
                raise self._unexpected(reply)

    def _refused(self, reply: w.Message) -> Exception:
        """What a refusal of a cell's request means: voided if stale."""
        match reply:
            case w.Refuse(stale=True):
                return Voided(reply.reason)
            case w.Refuse():
                return WorkFailed(f"the buffer refused: {reply.reason}")
            case _:
                return self._unexpected(reply)

    @staticmethod
    def _unexpected(reply: w.Message) -> Exception:
        return AssertionError(f"unexpected answer {type(reply).__name__}")
