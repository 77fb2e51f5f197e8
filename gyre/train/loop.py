"""The algorithm, on one page.

    for step in 1..T:
        until the step is drained:  claim a micro-step, add the gradient of its numerators
        seal                        the manifest says what the step consists of
        divide, clip, AdamW         once, by the step's graded executions
        commit                      from here on the step counts
        every μ steps               publish, while the next step may already be gathering
        every k steps               checkpoint

Departures from textbook policy gradient:
- Streaming: a step begins with its first groups, and its batch is whatever the ledger's manifest says, not a number known beforehand.
- Asynchronous: groups were sampled by older policies, mixed even within a trajectory. The ratio to the rollout's own log-probs corrects per token,
  and double-sided importance sampling drops tokens outside [ratio_low, ratio_high] instead of clipping them.
- Two-level mean: tokens are averaged within an execution and executions within the step, so long executions do not weigh more; an execution without
  a trainable token counts in the denominator.
- One update per batch, no critic, no KL, no entropy bonus. Advantages come with the micro-steps.
- A step in which nothing can be learned (no micro-step, no trainable token, every group uniform) is committed without an update, so momentum does
  not drift on; its number and its learning rate are used up.

Invariants: the weights change between a manifest and its commit, nowhere else. Publications happen in the order of their versions, one at a time.
What was published is not newer than what was committed.

Not here: the wire (ledger.py, shell.py), arithmetic (optimizer.py, objective.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.train import checkpoint
from gyre.train.ledger import Claim, Ledger, Voided
from gyre.train.metrics import Board, Stopwatch, step_metrics
from gyre.train.optimizer import Learner, Update, learning_rate
from gyre.types import Version
from gyre.wire.messages import Manifest

log = logging.getLogger(__name__)

_GRACE_S: Final = 10.0  # for an update under way when the process is told to stop

Compute = Callable[..., Awaitable[Any]]
"""Runs a function with arguments in the thread that computes."""


class Publisher(Protocol):
    """How weights become the policy."""

    async def lend(self, version: Version) -> None:
        """Copy the weights and offer them to engines; afterwards they may change."""

    async def acknowledged(self, version: Version) -> list[str]:
        """Wait for the engines that load it. Returns their cells."""


class Loop:
    """The core's life from `step` to `total_steps`."""

    def __init__(
        self,
        learner: Learner,
        ledger: Ledger,
        publisher: Publisher,
        compute: Compute,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        board: Board,
        config: Config,
        directory: Path,
        *,
        step: int,
        total_steps: int,
        report: Callable[[str, dict[str, float]], None] = lambda detail, gauges: None,
    ) -> None:
        self.step = step
        self.saved = step  # the step of the last checkpoint; a fresh start has none and needs none
        self.dirty = False  # the weights are ahead of the last commit
        self._learner, self._ledger, self._publisher, self._compute, self._spawn = learner, ledger, publisher, compute, spawn
        self._board, self._config, self._directory, self._report = board, config, directory, report
        self._total_steps = total_steps
        self._published = step
        self._announcement: asyncio.Task[None] | None = None
        self._watch = Stopwatch()

    async def run(self) -> None:
        """Train until the last step is committed, published and saved."""
        await self._publish()
        while self.step < self._total_steps:
            await self._one_step(self.step + 1)
        if self._announcement is not None:
            await self._announcement

    async def _one_step(self, step: int) -> None:
        manifest = await self._gather(step)
        finishing = asyncio.ensure_future(self._finish(manifest))
        try:
            update, metrics = await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait([finishing], timeout=_GRACE_S)  # told to stop: between update and commit is no place for it
            finishing.cancel()
            raise
        await self._tell(manifest, update, metrics)
        last = step == self._total_steps
        if last or step - self._published >= self._config.system.steps_per_burst:
            await self._publish()
        every = self._config.train.checkpoint_every
        if last or (every and step % every == 0):
            await self._checkpoint(update.lr)

    async def _finish(self, manifest: Manifest) -> tuple[Update, dict[str, float | None]]:
        """Update and commit: from the first to the last, the weights are those of no step that counts."""
        update = await self._update(manifest)
        metrics = step_metrics(
            self._learner.tally, manifest.stats, updated=update.updated, grad_norm=update.grad_norm, lr=update.lr, seconds=self._watch.lap()
        )
        await self._ledger.commit(manifest, metrics)
        self.step, self.dirty = manifest.step, False
        return update, metrics

    async def _gather(self, step: int) -> Manifest:
        """Accumulate a step's micro-steps until it is sealed. An accumulator that the buffer gave up is emptied and begun again."""
        in_vain = 0
        while True:
            self._learner.zero()
            held: list[str] = []
            try:
                return await self._fill(step, held)
            except Voided as e:
                in_vain = 0 if held else in_vain + 1
                if in_vain > 1:  # a fresh incarnation is refused too: it is not about this one's gradients
                    raise WorkFailed(f"this core was replaced at step {step}: {e}") from None
                log.warning("step %d: %d micro-steps are computed again: %s", step, len(held), e)
                self._ledger.rejoin()

    async def _fill(self, step: int, held: list[str]) -> Manifest:
        while True:
            with self._watch.phase("wait"):
                claim = await self._ledger.claim(step)
            if isinstance(claim, Claim):
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
            else:
                self._report(f"step {step} waits for {claim.waiting_for or 'groups'}", {"step": step})

    def _compare(self, manifest: Manifest, held: list[str]) -> None:
        """The manifest must name exactly what the accumulator holds."""
        named = sorted(m for entry in manifest.entries if entry.incarnation == self._ledger.incarnation for m in entry.micro_steps)
        others = [entry.incarnation for entry in manifest.entries if entry.micro_steps and entry.incarnation != self._ledger.incarnation]
        if named != sorted(held) or others:
            raise Voided(f"the manifest names {len(named)} of this accumulator's {len(held)} micro-steps, and those of {len(others)} others")

    async def _update(self, manifest: Manifest) -> Update:
        if not any(entry.micro_steps for entry in manifest.entries):
            return Update(False, None, learning_rate(self._config.train, manifest.step, self._total_steps))
        with self._watch.phase("update"):
            self.dirty = True
            update: Update = await self._compute(self._learner.update, manifest.step, manifest.stats.executions)
        return update

    async def _publish(self) -> None:
        """Lend the weights; the rest goes on beside the next step. The publication before must have ended."""
        with self._watch.phase("publish"):
            if self._announcement is not None:
                await self._announcement
            version = Version(self._ledger.term, self.step)
            await self._publisher.lend(version)
            self._published = self.step
            self._announcement = self._spawn(self._announce(version))

    async def _announce(self, version: Version) -> None:
        started = asyncio.get_running_loop().time()
        cells = await self._publisher.acknowledged(version)
        seconds = asyncio.get_running_loop().time() - started
        await self._ledger.published(version, cells, seconds)
        log.info("version %d.%d is the policy of %s after %.2f s", version.term, version.step, ", ".join(cells), seconds)

    async def _checkpoint(self, lr: float) -> None:
        with self._watch.phase("checkpoint"):
            path = await self._compute(self.save, lr)
            await self._ledger.checkpoint_saved(self.step, path)

    def save(self, lr: float | None = None) -> Path:
        """Write a checkpoint of the last committed step."""
        rate = learning_rate(self._config.train, self.step, self._total_steps) if lr is None else lr
        keep = self._config.train.keep_checkpoints
        path = checkpoint.save(self._directory, self._learner, term=self._ledger.term, step=self.step, lr=rate, keep=keep)
        self.saved = self.step
        return path

    async def _tell(self, manifest: Manifest, update: Update, metrics: dict[str, float | None]) -> None:
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
                "trainable_tokens": self._learner.tally.trainable,
                "discarded_groups": stats.discarded_groups,
                "uniform_groups": stats.uniform_groups,
                "gradient_not_finite": int(update.grad_norm is None and self._learner.tally.trainable > 0 and stats.executions > 0),
            }
            log.warning("step %d changed nothing: %s", self.step, ", ".join(f"{k} {v}" for k, v in reasons.items()))
            await self._ledger.note("step_without_update", step=self.step, **reasons)
        worst = metrics["logprob_diff_current_max"]
        if worst is not None and worst > self._config.train.logprob_alarm:
            log.warning("step %d: trainer and engine differ by %.3g on a log-prob of the current version", self.step, worst)
            await self._ledger.note(
                "logprob_alarm", step=self.step, max=worst, mean=metrics["logprob_diff_current_mean"], limit=self._config.train.logprob_alarm
            )
