"""Prometheus metrics of a process, at a port of the loopback.

A coordinator has those of all its workers, so one target is enough; by hand each process has its own. A scrape never waits for the process's loop: it
reads what was last said. Gauges of a worker are `gyre_KIND_NAME`, with the process and its cell as labels; the run's are named below.

Not here: other hosts' access. Put an agent or a tunnel in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import start_http_server
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gyre.errors import UsageError
from gyre.wire.messages import Counters, ProcessStatus

Sample = tuple[str, dict[str, str], float]

_COUNTS: Final = ("refused", "strangers", "ended", "prefix_hit_tokens", "preempted")  # gauges that only grow
_STALENESS: Final = ("predicted", "mean", "p95", "max", "interpolated")


def of_process(p: ProcessStatus) -> Iterator[Sample]:
    labels = {"process": p.name, "cell": p.cell}
    for name, value in p.gauges.items():
        yield f"gyre_{p.kind}_{name}" + ("_total" if name in _COUNTS else ""), labels, value
    yield "gyre_process", {**labels, "kind": p.kind, "phase": p.phase, "role": p.role}, 1.0


def of_run(c: Counters | None, stats: dict[str, Any]) -> Iterator[Sample]:
    """The buffer's counters, and the staleness of the last step, of its `stats`."""
    if c is not None:
        numbers = {
            "water_level": c.water_level, "step": c.step, "steps_wanted": c.total_steps, "policy_version": c.published.step, "term": c.term,
            "publications": c.publications, "admitted": c.admitted, "failed": bool(c.failure),
        }  # fmt: skip
        for name, value in numbers.items():
            yield f"gyre_{name}", {}, float(value)
        for state, n in c.states.items():
            yield "gyre_executions", {"state": state}, float(n)
        groups = {"open": c.groups_open - c.ready_groups, "ready": c.ready_groups, "taken": c.taken_groups}
        for state, n in groups.items():
            yield "gyre_groups", {"state": state}, float(n)
    for which in _STALENESS:
        if (d := stats.get(f"staleness_{which}")) is not None:
            yield "gyre_staleness", {"of": which}, d


class _Reading(Collector):
    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, labels, value in self._read():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = families.setdefault(name, kind(name, "docs/commands/gyre-coord.md#metrics", labels=list(labels)))
            family.add_metric(list(labels.values()), value)
        return families.values()


def serve(port: int, read: Callable[[], Iterable[Sample]]) -> None:
    """Answer scrapes until the process ends. `read` is called in other threads. Raises `UsageError`."""
    registry = CollectorRegistry()
    registry.register(_Reading(read))
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as e:
        raise UsageError("--metrics-port", f"{port} cannot be listened at ({e.strerror})", "give another port") from None
