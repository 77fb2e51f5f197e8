"""The algorithm, on one page.

    for step in 1..T:
        until the step is drained:  claim a micro-step, add the gradient of its numerators      (every cell does)
        seal                        the manifest says what the step consists of, and which cell holds it
        reduce                      the accumulators of exactly these cells, out of place; who is lost meanwhile is voided, its part claimed again
        divide, clip, AdamW         once, by the objective's denominator                        (the core alone, from here on)
        commit                      from here on the step counts
        broadcast                   the new weights to the cells that stay
        every μ steps               publish, while the next step may already be gathering
        every k steps               checkpoint

Departures from textbook policy gradient:
- Streaming: a step begins with its first groups, and its batch is whatever the ledger's manifest says, not a number known beforehand.
- Elastic: cells join and leave within a step. The sum of the numerators does not depend on who adds them, nor does the update.
- Asynchronous: groups were sampled by older policies, mixed even within a trajectory. The ratio to the rollout's own log-probs corrects per token,
  and double-sided importance sampling drops tokens outside [ratio_low, ratio_high] instead of clipping them.
- Two-level mean: tokens are averaged within an execution and executions within the step, so long executions do not weigh more; an execution without
  a trainable token counts in the denominator.
- One update per batch, no critic, no KL, no entropy bonus. Advantages come with the micro-steps.
- A step in which nothing can be learned (no micro-step, no trainable token, every group uniform) is committed without an update, so momentum does
  not drift on; its number and its learning rate are used up.

Invariants: the weights change between a manifest and its commit, nowhere else. Publications happen in the order of their versions, one at a time.
What was published or broadcast is not newer than what was committed. No thread, socket, clock but the event loop's: see protocols.py.

Not here: the wire (ledger.py, peers.py, shell.py), arithmetic (optimizer.py, objective.py), a satellite's life (satellite.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.train.ledger import Ledger
from gyre.train.metrics import Stopwatch, Tally, merged, step_metrics
from gyre.train.objective import divisor
from gyre.train.optimizer import learning_rate
from gyre.train.peers import Peers
from gyre.train.protocols import Claimed, Compute, Duty, Learning, Lost, Publisher, Update, Voided
from gyre.types import Version
from gyre.wire.messages import Manifest, Member

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.2  # how often a wait for engines looks whether the cell is to roll out itself
_GRACE_S: Final = 10.0  # for an update under way when the process is told to stop


class Scalars(Protocol):
    """Where the numbers of steps are drawn."""

    def write(self, step: int, numbers: dict[str, float | None]) -> None: ...


class Loop:
    """The core's life from `step` to `total_steps`. `save(term, step, lr)` writes a checkpoint."""

    def __init__(
        self,
        learner: Learning,
        ledger: Ledger,
        publisher: Publisher,
        peers: Peers,
        duty: Duty,
        compute: Compute,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        save: Callable[[int, int, float], Path],
        board: Scalars,
        config: Config,
        *,
        step: int,
        report: Callable[[str, dict[str, float]], None] = lambda detail, gauges: None,
    ) -> None:
        self.step = step
        self.saved = step  # the step of the last checkpoint; a fresh start has none and needs none
        self.dirty = False  # the weights are ahead of the last commit
        self._learner, self._ledger, self._publisher, self._peers, self._duty = learner, ledger, publisher, peers, duty
        self._compute, self._spawn, self._save, self._board, self._config, self._report = compute, spawn, save, board, config, report
        self._total_steps = learner.total_steps
        self._published = step
        self._announcement: asyncio.Task[None] | None = None
        self._watch = Stopwatch(self._now)

    async def run(self) -> None:
        """Train until the last step is committed, published and saved."""
        await self._publish()
        if self._duty.trains:
            self._duty.phase("training")
        while self.step < self._total_steps:
            await self._one_step(self.step + 1)
        await self._announced()

    async def _one_step(self, step: int) -> None:
        self._peers.opened(self._version)
        manifest, tally = await self._gather(step)
        finishing = asyncio.ensure_future(self._finish(manifest, tally))
        try:
            update, metrics = await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait([finishing], timeout=_GRACE_S)  # told to stop: between update and commit is no place for it
            finishing.cancel()
            raise
        last = step == self._total_steps
        await self._broadcast(last)
        await self._tell(manifest, tally, update, metrics)
        if last or step - self._published >= self._config.system.steps_per_burst:
            await self._publish()
        every = self._config.train.checkpoint_every
        if last or (every and step % every == 0):
            await self._checkpoint(update.lr)

    async def _finish(self, manifest: Manifest, tally: Tally) -> tuple[Update, dict[str, float | None]]:
        """Update and commit: from the first to the last, the weights are those of no step that counts."""
        self._peers.closing()
        update = await self._update(manifest, tally)
        by = divisor(self._config.train, manifest.stats.executions, tally.trainable)
        metrics = step_metrics(
            tally, manifest.stats, updated=update.updated, grad_norm=update.grad_norm, lr=update.lr, seconds=self._watch.lap(), divisor=by
        )
        await self._ledger.commit(manifest, metrics)
        self.step, self.dirty = manifest.step, False
        return update, metrics

    # --- until the manifest's gradient is whole ---

    async def _gather(self, step: int) -> tuple[Manifest, Tally]:
        """Accumulate a step's micro-steps until it is sealed and reduced. An accumulator that the buffer gave up is emptied and begun again."""
        in_vain = attempt = 0
        while True:
            await self._compute(self._learner.zero)
            held: list[str] = []
            try:
                while True:
                    manifest = await self._fill(step, held)
                    attempt += 1
                    try:
                        return manifest, await self._reduce(manifest, attempt)
                    except Lost as e:
                        log.warning("step %d, reduction %d: %s; lost: %s", step, attempt, e, ", ".join(c.cell for c in e.cells) or "none")
                        if e.cells:
                            await self._ledger.void(step, e.cells, f"lost in the reduction: {e}")
                        self._peers.again()
            except Voided as e:
                in_vain = 0 if held else in_vain + 1
                if in_vain > 1:  # a fresh incarnation is refused too: it is not about this one's gradients
                    raise WorkFailed(f"this core was replaced at step {step}: {e}") from None
                log.warning("step %d: %d micro-steps are computed again: %s", step, len(held), e)
                self._ledger.rejoin()

    async def _fill(self, step: int, held: list[str]) -> Manifest:
        while True:
            if not self._duty.trains:
                await self._rest(step)
            with self._watch.phase("wait"):
                claim = await self._ledger.claim(step)
            self._peers.idle = not isinstance(claim, Claimed) and not claim.drained
            if isinstance(claim, Claimed):
                held.append(claim.micro_step_id)
                self._report(f"step {step}: micro-step {len(held)}", {"step": step})
                with self._watch.phase("compute"):
                    await self._compute(self._learner.accumulate, claim.data, self.step)
                with self._watch.phase("wait"):
                    await self._ledger.accumulated(step, claim.micro_step_id)
            elif claim.drained:
                with self._watch.phase("wait"):
                    sealed = await self._ledger.seal(step)
                if isinstance(sealed, Manifest):
                    self._compare(sealed, held)
                    return sealed
                self._peers.again()
            else:
                self._report(f"step {step} waits for {claim.waiting_for or 'groups'}", {"step": step})

    async def _rest(self, step: int) -> None:
        """The cell rolls out: optimizer and accumulator are kept, snapshots go on being lent, nothing is claimed."""
        self._peers.idle = True
        await self._compute(self._learner.sleep)
        self._duty.phase("idle")
        self._report(f"step {step} waits for this cell to train", {"step": step})
        with self._watch.phase("idle"):
            await self._duty.to_train()
        await self._wake()

    async def _wake(self) -> None:
        """Take the device. An order that comes meanwhile must not be answered with `idle`."""
        self._duty.phase("joining")
        await self._compute(self._learner.wake)
        self._duty.phase("training")

    def _compare(self, manifest: Manifest, held: list[str]) -> None:
        """The manifest must name exactly what the accumulator holds."""
        own = Member(self._ledger.cell, self._ledger.incarnation)
        named = sorted(m for e in manifest.entries if Member(e.cell, e.incarnation) == own for m in e.micro_steps)
        if named != sorted(held):
            raise Voided(f"the manifest names {len(named)} of this accumulator's {len(held)} micro-steps")

    async def _reduce(self, manifest: Manifest, attempt: int) -> Tally:
        """The whole step's sums into the learner; returns its tally. Raises `Lost`."""
        own = Member(self._ledger.cell, self._ledger.incarnation)
        others = [e.cell for e in manifest.entries if e.micro_steps and Member(e.cell, e.incarnation) != own]
        if not others:
            return self._learner.tally
        started = self._now()
        with self._watch.phase("reduce"):
            tallies = await self._peers.reduce(manifest, own, attempt)
        self._note("reduced", step=manifest.step, attempt=attempt, cells=[own.cell, *others], seconds=self._now() - started)
        return merged([self._learner.tally, *tallies])

    # --- what the core does alone ---

    async def _update(self, manifest: Manifest, tally: Tally) -> Update:
        if not any(entry.micro_steps for entry in manifest.entries):
            return Update(False, None, learning_rate(self._config.train, manifest.step, self._total_steps))
        started = self._now()
        with self._watch.phase("update"):
            self.dirty = True
            update: Update = await self._compute(self._learner.update, manifest.step, manifest.stats.executions, tally.trainable)
        self._note("update", step=manifest.step, seconds=self._now() - started)
        return update

    async def _broadcast(self, finished: bool) -> None:
        started = self._now()
        with self._watch.phase("broadcast"):
            cells = await self._peers.committed(self._version, finished=finished)
        if cells:
            self._note("broadcast", step=self.step, cells=cells, seconds=self._now() - started)

    async def _publish(self) -> None:
        """Lend the weights; the rest goes on beside the next step. The publication before must have ended."""
        with self._watch.phase("publish"):
            await self._announced()
            version = self._version
            await self._publisher.lend(version)
            self._published = self.step
            self._announcement = self._spawn(self._announce(version))

    async def _announced(self) -> None:
        """Wait for the publication before. It may be this very cell's engine that it waits for: told to roll out, the cell rests meanwhile."""
        resting = False
        while self._announcement is not None and not self._announcement.done():
            if resting is self._duty.trains:
                resting = not resting
                if resting:
                    await self._compute(self._learner.sleep)
                    self._duty.phase("idle")
                else:
                    await self._wake()
            await asyncio.wait([self._announcement], timeout=_LOOK_S)
        if resting and self._duty.trains:
            await self._wake()
        if self._announcement is not None:
            self._announcement.result()

    async def _announce(self, version: Version) -> None:
        started = self._now()
        cells = await self._publisher.acknowledged(version)
        seconds = self._now() - started
        await self._ledger.published(version, cells, seconds)
        log.info("version %d.%d is the policy of %s after %.2f s", version.term, version.step, ", ".join(cells), seconds)

    async def _checkpoint(self, lr: float) -> None:
        with self._watch.phase("checkpoint"):
            path = await self._compute(self.save, lr)
            await self._ledger.checkpoint_saved(self.step, path)

    def save(self, lr: float | None = None) -> Path:
        """Write a checkpoint of the last committed step."""
        rate = learning_rate(self._config.train, self.step, self._total_steps) if lr is None else lr
        path = self._save(self._ledger.term, self.step, rate)
        self.saved = self.step
        return path

    # --- telling ---

    @property
    def _version(self) -> Version:
        return Version(self._ledger.term, self.step)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _note(self, event: str, **fields: Any) -> None:
        """An event for the run's log, off the step's path."""
        self._spawn(self._ledger.note(event, **fields))

    async def _tell(self, manifest: Manifest, tally: Tally, update: Update, metrics: dict[str, float | None]) -> None:
        """Numbers to TensorBoard and the log, and what an operator must know to the event log."""
        self._board.write(self.step, metrics)
        told = {k: v for k, v in metrics.items() if v is not None}
        self._report(f"step {self.step} of {self._total_steps}", {"step": self.step, **{k: told[k] for k in ("reward", "loss") if k in told}})
        shown = ("reward", "loss", "grad_norm", "entropy", "clip_fraction", "staleness_mean", "logprob_diff_current_max")
        log.info("step %d: %s", self.step, " ".join(f"{k} {told[k]:.4g}" for k in shown if k in told))
        stats = manifest.stats
        if not update.updated:
            reasons = {
                "executions": stats.executions,
                "trainable_tokens": tally.trainable,
                "discarded_groups": stats.discarded_groups,
                "uniform_groups": stats.uniform_groups,
                "gradient_not_finite": int(update.grad_norm is None and tally.trainable > 0 and stats.executions > 0),
            }
            log.warning("step %d changed nothing: %s", self.step, ", ".join(f"{k} {v}" for k, v in reasons.items()))
            await self._ledger.note("step_without_update", step=self.step, **reasons)
        worst = metrics["logprob_diff_current_max"]
        if worst is not None and worst > self._config.train.logprob_alarm:
            log.warning("step %d: trainer and engine differ by %.3g on a log-prob of the current version", self.step, worst)
            await self._ledger.note(
                "logprob_alarm", step=self.step, max=worst, mean=metrics["logprob_diff_current_mean"], limit=self._config.train.logprob_alarm
            )
