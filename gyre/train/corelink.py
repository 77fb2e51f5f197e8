"""The core as a satellite sees it: join its open step, attend the step's end.

Invariants
- Bytes are verified before they are loaded, shared memory too.
- A pull that broke off goes on where it was, while the core still lends that snapshot.
- It waits for a core that is away, since another life of it, or of another cell, will come; `train.core_timeout_s` long.

Not here: what to do about the answers (satellite.py), sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.net.sockets import mint
from gyre.train.metrics import Tally
from gyre.train.protocols import Compute, Ended, Finished, Group, Reduce, Voided, Wait
from gyre.types import TensorSpec, Version
from gyre.weights.shared import attach, host_id
from gyre.weights.snapshot import checksum_of
from gyre.weights.transfer import Partial, Requester, pull
from gyre.wire.messages import AttendStep, Hold, JoinStep, Member, Message, ReduceOrder, Refuse, StepEnded, StepOffer

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0  # how long the core may sit on a question
_PAUSE_S: Final = 0.2  # after a pull that broke off

Install = Callable[[list[TensorSpec], memoryview], None]


class CoreLink:
    """The core behind `client`. `install` loads weights, in `compute`."""

    def __init__(
        self,
        client: Requester,
        install: Install,
        compute: Compute,
        config: Config,
        *,
        cell: str,
        mint: Callable[[], str] = mint,
        host: str | None = None,
        ranks: int = 1,
    ) -> None:
        self._client, self._install, self._compute, self._cell, self._mint = client, install, compute, cell, mint
        self._host = host_id() if host is None else host
        self._ranks = ranks
        self._core_s, self._chunk_s = config.train.core_timeout_s, config.net.request_timeout_s
        self._partial: Partial | None = None
        self._asked: JoinStep | AttendStep | None = None

    async def join(self, incarnation: str) -> Version | None:
        """Pull the open step's weights and load them. None: no step is open yet, or they went away; try again. Raises `Finished`."""
        asked = JoinStep(id=self._mint(), cell=self._cell, incarnation=incarnation, host=self._host, wait_s=WAIT_S, ranks=self._ranks)
        match reply := await self._ask(asked, "the core's open step"):
            case StepOffer():
                return await self._load(reply)
            case StepEnded(finished=True):
                raise Finished
            case Hold() | StepEnded():
                return None
            case Refuse():
                raise WorkFailed(f"the core does not let cell {self._cell} join: {reply.reason}")
            case _:
                raise AssertionError(f"unexpected answer {type(reply).__name__}")

    async def _load(self, offer: StepOffer) -> Version | None:
        data = attach(offer.memory, offer.nbytes) if offer.memory else None
        if data is None:
            if self._partial is None or (self._partial.version, self._partial.checksum) != (offer.version, offer.checksum):
                self._partial = Partial(offer.version, offer.checksum, bytearray(offer.nbytes))
            failure = await pull(self._client, self._partial, timeout_s=self._chunk_s)
            if failure:
                log.warning("the weights of version %d.%d did not come: %s", offer.version.term, offer.version.step, failure)
                await asyncio.sleep(_PAUSE_S)
                return None
            data, self._partial = memoryview(self._partial.data), None
        if await self._compute(checksum_of, data) != offer.checksum:
            log.warning("the weights of version %d.%d do not have their checksum", offer.version.term, offer.version.step)
            await asyncio.sleep(_PAUSE_S)
            return None
        await self._compute(self._install, offer.tensors, data)
        return offer.version

    async def attend(
        self, version: Version, own: Member, held: list[str], tally: Tally, *, attempt: int, failed: str, leaving: bool
    ) -> Reduce | Ended | Wait:
        """What becomes of the open step, whose weights are `version`. Raises `Voided` when the core is another."""
        asked = AttendStep(
            id=self._mint(), term=version.term, step=version.step + 1, cell=own.cell, incarnation=own.incarnation, micro_steps=list(held),
            tally=tally.numbers(), wait_s=WAIT_S, attempt=attempt, failed=failed, leaving=leaving,
        )  # fmt: skip
        match reply := await self._ask(asked, f"the end of step {version.step + 1}"):
            case ReduceOrder():
                return Reduce(reply.attempt, _group(reply, own), reply.deadline_s)
            case StepEnded():
                group = _group(reply, own) if own in reply.roster else None
                return Ended(reply.version, group, reply.deadline_s, reply.finished)
            case Hold():
                return Wait(reply.idle)
            case Refuse():
                raise Voided(reply.reason)
            case _:
                raise AssertionError(f"unexpected answer {type(reply).__name__}")

    def hurry(self, *, leaving: bool) -> None:
        """The cell's role changed: have the question that waits answered now."""
        match self._asked:
            case JoinStep():
                self._client.send(msgspec.structs.replace(self._asked, wait_s=0.0))
            case AttendStep():
                self._client.send(msgspec.structs.replace(self._asked, wait_s=0.0, leaving=leaving))

    async def _ask(self, message: JoinStep | AttendStep, what: str) -> Message:
        self._asked = message
        try:
            return (await self._client.request(message, deadline_s=self._core_s, what=what))[0]
        finally:
            self._asked = None


def _group(reply: ReduceOrder | StepEnded, own: Member) -> Group:
    return Group(reply.group, reply.store, reply.roster.index(own), len(reply.roster))
