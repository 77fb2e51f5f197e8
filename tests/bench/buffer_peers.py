"""What buffer_rate.py compares with, in the peers' own environment: a Ray queue, and TransferQueue's key-value interface with its default storage.
Given one of their names and, as JSON, the bytes that pass, and of each size a rollout's bytes and how many are a batch, it prints MB/s in and out.
Neither is durable.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from ray.util.queue import Queue
from tensordict import TensorDict

NAMES = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}


def rates(batches: int, nbytes: int, put: Callable[[int], Any], get: Callable[[int], Any]) -> list[float]:
    """MB/s of so many batches; what one call warms up is not measured."""
    put(-1), get(-1)
    times = []
    for action in (put, get):
        started = time.perf_counter()
        for i in range(batches):
            action(i)
        times.append(time.perf_counter() - started)
    return [batches * nbytes / 1e6 / t for t in times]


def ray_queue(size: int, at_once: int, total: int) -> list[float]:
    queue = Queue()
    rollouts = [{k: np.ones(size // 12, dtype=d) for k, d in NAMES.items()} for _ in range(at_once)]
    try:
        return rates(total // size // at_once, size * at_once, lambda _: queue.put_nowait_batch(rollouts), lambda _: queue.get_nowait_batch(at_once))
    finally:
        queue.shutdown()


def keys_and_values(size: int, at_once: int, total: int) -> list[float]:
    fields = TensorDict({k: torch.ones(at_once, size // 12, dtype=getattr(torch, d.__name__)) for k, d in NAMES.items()}, batch_size=at_once)
    partition, tags = f"p{size}", [{} for _ in range(at_once)]

    def keys(batch: int) -> list[str]:
        return [f"{batch}.{i}" for i in range(at_once)]

    try:
        return rates(
            total // size // at_once,
            size * at_once,
            lambda i: transfer_queue.kv_batch_put(keys=keys(i), partition_id=partition, fields=fields, tags=tags),
            lambda i: transfer_queue.kv_batch_get(keys=keys(i), partition_id=partition),
        )
    finally:
        transfer_queue.kv_clear(keys=[k for i in range(-1, total // size // at_once) for k in keys(i)], partition_id=partition)


def main() -> None:
    name, (total, sizes) = sys.argv[1], json.loads(sys.argv[2])
    ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=4 * total)
    logging.disable(logging.WARNING)
    if name == "TransferQueue":
        transfer_queue.init()
    print(json.dumps([(ray_queue if name == "Ray queue" else keys_and_values)(*s, total) for s in sizes]))
    if name == "TransferQueue":
        transfer_queue.close()


if __name__ == "__main__":
    main()
