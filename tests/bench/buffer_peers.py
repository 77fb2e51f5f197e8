"""What buffer_rate.py compares with, in the peers' own environment: `python buffer_peers.py BYTES AT_ONCE TOTAL` prints MB/s in and out, as JSON, of a
Ray queue and of TransferQueue's key-value interface with its default storage. Batches of AT_ONCE rollouts, three arrays each. Neither is durable.
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


def main() -> None:
    size, at_once, total = map(int, sys.argv[1:])
    tokens, batches = size // 12, total // size // at_once
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=2 * total)
    logging.disable(logging.WARNING)

    queue = Queue()
    rollouts = [{k: np.ones(tokens, dtype=d) for k, d in NAMES.items()} for _ in range(at_once)]
    found = {"Ray queue": rates(batches, size * at_once, lambda _: queue.put_nowait_batch(rollouts), lambda _: queue.get_nowait_batch(at_once))}
    queue.shutdown()

    transfer_queue.init()
    fields = TensorDict({k: torch.ones(at_once, tokens, dtype=getattr(torch, d.__name__)) for k, d in NAMES.items()}, batch_size=at_once)

    def keys(batch: int) -> list[str]:
        return [f"{batch}.{i}" for i in range(at_once)]

    found["TransferQueue"] = rates(
        batches,
        size * at_once,
        lambda i: transfer_queue.kv_batch_put(keys=keys(i), partition_id="p", fields=fields, tags=[{} for _ in keys(i)]),
        lambda i: transfer_queue.kv_batch_get(keys=keys(i), partition_id="p"),
    )
    transfer_queue.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
