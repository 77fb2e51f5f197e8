"""A satellite's life: it only adds gradients.

    join                        pull the open step's weights from the core, as a new incarnation with an empty accumulator
    until the step is drained:  claim a micro-step, add the gradient of its numerators
    attend                      the core says: reduce · the step ended, here are the new weights · claim again, something came back
    told to roll out:           take part in the step's end if it is near; if it cannot end now, give back what was accumulated; idle

Invariants
- What it accumulated is counted once or not at all: it stays untouched through any number of reductions until the step has ended, and is thrown
  away whole as soon as anybody refuses this incarnation.
- It claims for one step only, the one after its weights' version. Weights that may be torn, or are older, are never used: it joins again.
- It owns nothing that lasts: killed at any moment, its part is voided and claimed by others.

No thread, socket, clock but the event loop's: see protocols.py. Not here: the core's side (loop.py, peers.py), the wire (corelink.py, ledger.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gyre.train.corelink import CoreLink
from gyre.train.ledger import Ledger
from gyre.train.protocols import Claimed, Collective, CollectiveFailed, Compute, Duty, Ended, Finished, Learning, Reduce, Voided, Wait
from gyre.types import Version
from gyre.wire.messages import Member

log = logging.getLogger(__name__)


class Satellite:
    """One cell's trainer beside the core, until the run's end."""

    def __init__(
        self,
        learner: Learning,
        ledger: Ledger,
        core: CoreLink,
        collective: Collective,
        duty: Duty,
        compute: Compute,
        *,
        report: Callable[[str, dict[str, float]], None] = lambda detail, gauges: None,
    ) -> None:
        self._learner, self._ledger, self._core, self._collective = learner, ledger, core, collective
        self._duty, self._compute, self._report = duty, compute, report
        self._reduced = False  # it took part in a reduction of the open step

    async def run(self) -> None:
        """Idle while the cell rolls out, take part while it trains. Returns when the run's last step is committed."""
        try:
            while True:
                if not self._duty.trains:
                    await self._compute(self._learner.sleep)
                    self._duty.phase("idle")
                    self._report("idle", {})
                    await self._duty.to_train()
                await self._take_part()
        except Finished:
            log.info("the run is over")
            await self._compute(self._learner.sleep)
            self._duty.phase("idle")  # the cell's engine may wake before this process has ended

    async def _take_part(self) -> None:
        self._duty.phase("joining")
        await self._compute(self._learner.wake)
        version = await self._join()
        while version is not None:
            step = version.step + 1
            try:
                version = await self._one_step(version)
            except Voided as e:
                log.warning("step %d: zeroed, joining again: %s", step, e)
                self._duty.phase("joining")
                version = await self._join()

    async def _join(self) -> Version | None:
        """Begin a new incarnation at the open step. None: told to roll out before one was open."""
        started = asyncio.get_running_loop().time()
        self._ledger.rejoin()
        self._ledger.term = 0  # of no core, until it has pulled one's weights
        await self._compute(self._learner.zero)
        self._report("joining", {})
        while self._duty.trains:
            version = await self._core.join(self._ledger.incarnation)
            if version is not None:
                self._ledger.term = version.term
                self._duty.phase("training")
                seconds = asyncio.get_running_loop().time() - started
                await self._ledger.note("joined", cell=self._ledger.cell, step=version.step + 1, seconds=seconds)
                return version
        return None

    async def _one_step(self, version: Version) -> Version | None:
        """From the weights of `version` to the next ones. None: the cell left. Raises `Voided`."""
        self._reduced = False
        held: list[str] = []
        try:
            return await self._until_ended(version, held)
        except asyncio.CancelledError:
            if held and not self._reduced:  # what was reduced may count by now
                self._ledger.abandon(version.step + 1)
            raise

    async def _until_ended(self, version: Version, held: list[str]) -> Version | None:
        own = Member(self._ledger.cell, self._ledger.incarnation)
        attempt, failed = 0, ""
        while True:
            await self._fill(version, held)
            leaving = not self._duty.trains
            if leaving:
                self._duty.phase("leaving")
                if not held:
                    await self._leave(version)
                    return None
            end = await self._core.attend(version, own, held, self._learner.tally, attempt=attempt, failed=failed, leaving=leaving)
            match end:
                case Reduce():
                    attempt, failed, self._reduced = end.attempt, "", True
                    self._report(f"step {version.step + 1}: reduction {attempt}", {"step": version.step + 1})
                    try:
                        await self._collective.reduce(end.group, end.deadline_s)
                    except CollectiveFailed as e:
                        failed = str(e) or "failed"
                        log.warning("step %d, reduction %d: %s", version.step + 1, attempt, e)
                case Ended():
                    return await self._follow(version, end)
                case Wait(idle=True) if leaving:
                    await self._ledger.void(version.step + 1, [own], "the cell turns to rollout")
                    await self._leave(version)
                    return None
                case Wait():
                    pass

    async def _fill(self, version: Version, held: list[str]) -> None:
        """Claim and accumulate until there is nothing to claim in this step, or the cell is told to roll out."""
        step = version.step + 1
        while self._duty.trains:
            claim = await self._ledger.claim(step)
            if isinstance(claim, Claimed):
                held.append(claim.micro_step_id)
                self._report(f"step {step}: micro-step {len(held)}", {"step": step})
                await self._compute(self._learner.accumulate, claim.data, version.step)
                await self._ledger.accumulated(step, claim.micro_step_id)
            elif claim.drained:
                return
            else:
                self._report(f"step {step} waits for {claim.waiting_for or 'groups'}", {"step": step})

    async def _follow(self, version: Version, end: Ended) -> Version | None:
        """The step is committed: empty the accumulator, take the new weights, or leave."""
        await self._compute(self._learner.zero)
        if end.finished:
            raise Finished
        if end.group is not None:  # the others count on this cell, even if it is to leave by now
            try:
                await self._collective.broadcast(end.group, end.deadline_s)
            except CollectiveFailed as e:
                log.warning("the weights of step %d did not arrive, pulling them: %s", end.version.step, e)
                return await self._join()
        if not self._duty.trains:
            self._duty.phase("leaving")
            await self._leave(version)
            return None
        return end.version if end.group is not None else await self._join()

    async def _leave(self, version: Version) -> None:
        await self._ledger.note("left", cell=self._ledger.cell, step=version.step + 1)
