"""On a GPU, with a real model: log-probs against transformers; updates (gyre's backend, vLLM's ipc), sleep and wake against weights ÷ bandwidth.

`python tests/gpu/role_change.py MODEL_DIR`, started by tests/gpu/run.sh. NOT YET RUN: no GPU was at hand; the calls were checked against the source
of vLLM 0.32.0. The ipc backend unpickles handles (vLLM's own transport), so it is used here alone and not by gyre-rollout.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # ipc handles between processes of ours

import torch
from transformers import AutoModelForCausalLM

from gyre.config import Config, Model, Rollout
from gyre.rollout.engine import EngineRequest
from gyre.rollout.vllm_engine import VllmEngine, open_vllm
from gyre.rollout.vllm_host import Host, arguments
from gyre.types import Sampling, Version
from gyre.weights.snapshot import model_tensors, pack


def seconds(what: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    what()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def disagreement(engine: VllmEngine, model: Any) -> tuple[float, float]:
    """Mean and largest difference of log-probs to a plain forward pass, over 8 requests of 128 tokens."""
    asked = [[100 + 7 * i + j for j in range(64)] for i in range(8)]
    futures = [engine.submit(EngineRequest(f"{time.perf_counter()}.{i}", "r", p, Sampling(max_tokens=128), seed=i)) for i, p in enumerate(asked)]
    found: list[float] = []
    for prompt, future in zip(asked, futures, strict=True):
        done = future.result(120)
        ids = torch.tensor([prompt + done.token_ids], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        found += [abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)]
    return sum(found) / len(found), max(found)


class Weights:
    """What vLLM calls a WeightSource: a model's tensors."""

    def __init__(self, model: Any) -> None:
        self._tensors = model_tensors(model)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


class Client:
    """vLLM's VLLMWeightSyncClient for an AsyncLLM of this process."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def _do(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._host._loop).result(600)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass  # done by Host, with the backend's defaults: unpacked

    def start_weight_update(self) -> None:
        self._do(self._host._llm.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {k: v for k, v in update_info.items() if k != "ipc_handles"}
        info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
        self._do(self._host._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    def finish_weight_update(self) -> None:
        self._do(self._host._llm.finish_weight_update())


def by_ipc(config: Config, model: Any) -> float:
    """Seconds of an update by vLLM's ipc backend, from a model on the same GPU, in an engine of its own."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    host = Host(arguments(config, config.rollout.context), backend="ipc")
    trainer = IPCTrainerWeightTransferEngine.trainer_init(IPCTrainerInitInfo(rank=0), client=Client(host), source=Weights(model))
    try:
        trainer.send_weights()
        return seconds(trainer.send_weights)
    finally:
        host.close()


def main(path: str) -> None:
    rollout = Rollout(engine="vllm", context=2048, slots=64, gpu_memory=0.4)
    config = Config(model=Model(path=path, dtype="bfloat16", device="cuda"), rollout=rollout)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    snapshot = pack(Version(1, 1), model_tensors(model))
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    bandwidth = (1 << 30) / min(seconds(lambda: pinned.cuda(non_blocking=True)) for _ in range(5))
    least = snapshot.nbytes / bandwidth
    print(f"weights {snapshot.nbytes / 1e9:.2f} GB, host to device {bandwidth / 1e9:.1f} GB/s: {least:.3f} s at least")
    engine = open_vllm(config)
    try:
        for step in range(1, 4):
            load = seconds(lambda step=step: engine.load(Version(1, step), snapshot.tensors, snapshot.data).result(600))
            print(f"update: {load:.3f} s, {least / load:.2f} of the bandwidth")
        print("log-probs, mean and largest difference: {:.4f} {:.4f}".format(*disagreement(engine, model)))
        for step in range(4, 7):
            free = torch.cuda.mem_get_info()[0]
            to_train = seconds(lambda: engine.sleep().result(600))
            freed = torch.cuda.mem_get_info()[0] - free
            to_rollout = seconds(lambda: engine.wake().result(600))
            load = seconds(lambda step=step: engine.load(Version(1, step), snapshot.tensors, snapshot.data).result(600))
            change = to_train + to_rollout + load
            print(
                f"sleep {to_train:.3f} s (frees {freed / 1e9:.1f} GB), wake {to_rollout:.3f} s, load {load:.3f} s: {change / least:.1f} x the least"
            )
        print("after sleeping: {:.4f} {:.4f}".format(*disagreement(engine, model)))
    finally:
        engine.close()
    print(f"update by ipc: {by_ipc(config, model):.3f} s")


if __name__ == "__main__":
    main(sys.argv[1])
