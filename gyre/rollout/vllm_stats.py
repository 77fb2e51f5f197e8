"""vLLM's metrics as gauges: what its scheduler reports after each step, kept as a few numbers.

Not here: who shows them. Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Stats(StatLoggerBase):  # type: ignore[misc]
    """Writes into `gauges`, in the loop of the AsyncLLM."""

    def __init__(self, gauges: dict[str, float]) -> None:
        self._gauges = gauges
        gauges.update(kv_use=0.0, prefix_hit_tokens=0.0, preempted=0.0)

    @staticmethod
    def of(gauges: dict[str, float]) -> Callable[..., Stats]:
        """What vLLM wants: a factory."""
        return lambda vllm_config, engine_index=0: Stats(gauges)

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if scheduler_stats is not None:
            self._gauges["kv_use"] = scheduler_stats.kv_cache_usage
            self._gauges["prefix_hit_tokens"] += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._gauges["preempted"] += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass
