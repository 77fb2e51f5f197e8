"""What a step is measured by: sums over its tokens, seconds by phase, the numbers of a commit, TensorBoard.

Invariants
- A number that cannot be had (no token of the current version, no graded execution) is None, never NaN.
- The seconds of a step are those between two commits; publication and checkpoint count where they were waited for, so the phases of all steps
  add up to the loop's time.

Not here: what becomes of the numbers in the event log (the buffer's) and in reports.

Shapes: N trainable tokens of a micro-batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.wire.messages import StepStats

log = logging.getLogger(__name__)

PHASES = ("wait", "compute", "reduce", "update", "broadcast", "publish", "checkpoint", "idle")


@dataclass(slots=True)
class Difference:
    """|log π_trainer - log π_engine| over some tokens."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, difference_N: Tensor) -> None:
        if len(difference_N):
            self.tokens += len(difference_N)
            self.total += float(difference_N.sum())
            self.largest = max(self.largest, float(difference_N.max()))

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None

    @property
    def max(self) -> float | None:
        return self.largest if self.tokens else None


@dataclass(slots=True)
class Tally:
    """Sums over the tokens accumulated so far in a step."""

    trainable: int = 0
    loss_numerator: float = 0.0
    entropy: float = 0.0
    outside: int = 0
    all_versions: Difference = field(default_factory=Difference)
    current_version: Difference = field(default_factory=Difference)
    too_old: int = 0  # trainable, but beyond train.max_version_lag

    def add(
        self,
        *,
        numerator: float,
        new_logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        entropy_N: Tensor,
        outside_N: Tensor,
        versions_N: Tensor,
        version: int,
    ) -> None:
        """Add a micro-batch. `version` is that of the weights in training; `outside_N` is of the tokens that bear loss, which may be fewer."""
        self.trainable += len(new_logprobs_N)
        self.loss_numerator += numerator
        self.entropy += float(entropy_N.sum())
        self.outside += int(outside_N.sum())
        self.too_old += len(new_logprobs_N) - len(outside_N)
        difference_N = (new_logprobs_N - old_logprobs_N).abs()
        self.all_versions.add(difference_N)
        self.current_version.add(difference_N[versions_N == version])

    def numbers(self) -> list[float]:
        """As it travels; `merged` reads it."""
        parts = [x for d in (self.all_versions, self.current_version) for x in (float(d.tokens), d.total, d.largest)]
        return [float(self.trainable), self.loss_numerator, self.entropy, float(self.outside), *parts, float(self.too_old)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Tally:
        """The inverse of `numbers`. Raises `ValueError` for what is no tally."""
        trainable, loss, entropy, outside, n, total, largest, n_current, total_current, largest_current, too_old = numbers
        both = Difference(int(n), total, largest), Difference(int(n_current), total_current, largest_current)
        return cls(int(trainable), loss, entropy, int(outside), *both, int(too_old))


def merged(tallies: Sequence[Tally]) -> Tally:
    """The tally of a whole step from those of its cells."""
    columns = list(zip(*(t.numbers() for t in tallies), strict=True))
    return Tally.of([max(c) if i in (6, 9) else sum(c) for i, c in enumerate(columns)])


class Stopwatch:
    """Seconds by phase since the last lap, by the given clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - started

    def lap(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


def step_metrics(
    tally: Tally, stats: StepStats, *, updated: bool, grad_norm: float | None, lr: float, seconds: Mapping[str, float], divisor: float | None = None
) -> dict[str, float | None]:
    """The numbers of a step, as they go into the commit. `divisor` is the objective's, default the step's executions."""
    n = tally.trainable
    divisor = stats.executions if divisor is None else divisor
    numbers: dict[str, float | None] = {
        "loss": tally.loss_numerator / divisor if divisor else None,
        "grad_norm": grad_norm,
        "lr": lr,
        "updated": float(updated),
        "reward": stats.reward_mean,
        "entropy": tally.entropy / n if n else None,
        "clip_fraction": tally.outside / n if n else None,
        "too_old_tokens": float(tally.too_old),
        "logprob_diff_mean": tally.all_versions.mean,
        "logprob_diff_max": tally.all_versions.max,
        "logprob_diff_current_mean": tally.current_version.mean,
        "logprob_diff_current_max": tally.current_version.max,
        "current_version_tokens": float(tally.current_version.tokens),
        "staleness_mean": stats.staleness_mean,
        "staleness_p95": stats.staleness_p95,
        "staleness_max": stats.staleness_max,
        "staleness_interpolated": stats.staleness_interpolated,
        "staleness_predicted": stats.staleness_predicted,
        "groups": float(stats.groups),
        "executions": float(stats.executions),
        "tokens": float(stats.tokens),
        "trainable_tokens": float(stats.trainable_tokens),
        **{f"seconds_{phase}": s for phase, s in seconds.items()},
    }
    return {k: v if v is None or math.isfinite(v) else None for k, v in numbers.items()}


class Board:
    """TensorBoard scalars under the run directory. A resumed run hides what an earlier life wrote after step `purge_after`."""

    def __init__(self, directory: Path, purge_after: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.warning("no TensorBoard scalars: the package tensorboard is not installed")
            self._writer: Any = None
            return
        self._writer = SummaryWriter(str(directory), purge_step=purge_after + 1)

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        if self._writer is None:
            return
        for name, value in numbers.items():
            if value is not None:
                table = name.partition("_")[0] if name.startswith(("seconds_", "staleness_", "logprob_")) else "train"
                self._writer.add_scalar(f"{table}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def detached(stats_N: Tensor) -> Tensor:
    """A statistic without gradient, on the CPU."""
    return stats_N.detach().to("cpu", torch.float32)
