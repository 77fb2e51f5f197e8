"""vLLM inside this process: an AsyncLLM, the thread whose event loop it lives in, and the calls that change its weights.

Invariants
- All that touches the AsyncLLM runs in that loop. Methods here are called from other threads, and each that waits has a deadline.
- A token is handed over with the version that vLLM had when it sampled it. Versions change only while vLLM is frozen and has handed over all that it
  had sampled; vLLM's own account of a finished request is compared.
- After `update` there is no key or value of an older version: freezing with cleared caches makes vLLM compute the requests in flight anew.

Not here: which requests there are and when they end (vllm_engine.py), what happens inside vLLM's workers (vllm_worker.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import msgspec

from gyre.config import Config
from gyre.errors import DeadlineExceeded, UsageError
from gyre.rollout.engine import EngineRequest
from gyre.rollout.model import device_of, unloadable
from gyre.types import TensorSpec, Version
from gyre.weights.shared import Shared

log = logging.getLogger(__name__)

_START_S: Final = 600.0
_UPDATE_S: Final = 600.0
_SLEEP_S: Final = 120.0
_CLOSE_S: Final = 20.0
_CPU_KV_MB: Final = 1024
_CPU_BLOCK: Final = 32
"""Tokens of a block of keys and values; vLLM's own choice for a CPU is larger, and reuses less of a prefix."""

T = TypeVar("T")


class Sampled(msgspec.Struct, frozen=True):
    """Tokens with their log-probs, of one version. `finish_reason`: vLLM's word for why there will be no more."""

    token_ids: list[int]
    logprobs: list[float]
    version: Version
    finish_reason: str | None


Put = Callable[["Sampled | BaseException"], None]
"""Where tokens go, and the fault that ends them. Called on the host's thread."""


class Stream:
    """A request that vLLM has."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """In the loop."""
        self._task = self._loop.create_task(coroutine)

    def cancel(self) -> None:
        """Have vLLM drop it; what it samples until then is lost."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task is not None else None)  # behind `begin`, which came first


class Host:
    """An AsyncLLM with these arguments (of vLLM's AsyncEngineArgs). Slow to open. Raises `UsageError`.

    `update` needs the weight-transfer `backend` of vllm_worker.py; another one is for whoever drives it.
    """

    def __init__(self, given: dict[str, Any], *, backend: str = "gyre") -> None:
        self._given, self._backend = given, backend
        self._version = Version(0, 0)
        self._requests = 0
        self._asleep = False
        self._gauges: dict[str, float] = {}
        self._live: set[Any] = set()  # vLLM's collectors of what was not handed over yet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._call(self._open(), "vLLM to start", _START_S)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # vLLM's processes inherit it: a terminal's Ctrl-C is for us alone
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str, deadline_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(what, deadline_s) from None

    async def _open(self) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from gyre.rollout.vllm_stats import Stats

        transfer = WeightTransferConfig(backend=self._backend)
        try:
            self._llm: Any = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**self._given, weight_transfer_config=transfer, disable_log_stats=True), stat_loggers=[Stats.of(self._gauges)]
            )
        except (OSError, ValueError) as e:
            raise unloadable(self._given["model"], e) from None
        except RuntimeError as e:  # of vLLM's process, which has said what it was
            remedy = "mend what it says above; if that is memory, raise rollout.kv_memory_mb or lower rollout.context"
            raise UsageError("run.toml", f"vLLM does not start ({str(e).splitlines()[0].rstrip('.')})", remedy, "rollout.engine") from None
        self.vocabulary: int = self._llm.model_config.get_vocab_size()
        await self._llm.collective_rpc("gyre_prepare")
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    # --- requests -----------------------------------------------------------------------------------------------------------------------------

    def generate(self, request: EngineRequest, stop_ids: Iterable[int], most: int, put: Put) -> Stream:
        """Have vLLM continue `request` up to `most` tokens, or one of `stop_ids`."""
        stream = Stream(self._loop)
        self._loop.call_soon_threadsafe(lambda: stream.begin(self._generate(request, sorted(stop_ids), most, put)))
        return stream

    async def _generate(self, request: EngineRequest, stop_ids: list[int], most: int, put: Put) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        s = request.sampling
        params = SamplingParams(
            temperature=s.temperature, top_p=s.top_p, top_k=max(0, s.top_k), max_tokens=most, stop_token_ids=stop_ids, ignore_eos=True,
            detokenize=False, logprobs=0, output_kind=RequestOutputKind.DELTA, skip_clone=True,
            seed=None if self.on_cpu else request.seed & (2**63 - 1), extra_args={"gyre": [request.seed & (2**64 - 1), request.drawn]},
        )  # fmt: skip
        self._requests += 1
        collector = None
        try:
            prompt = tokens_input([int(t) for t in request.prompt_ids])
            collector = await self._llm.add_request(f"{request.request_id}#{self._requests}", prompt, params)
            self._live.add(collector)
            versions: list[tuple[str, int]] = []
            n = 0
            while True:
                out = (collector.get_nowait() or await collector.get()).outputs[0]
                version = self._version
                if out.token_ids and (not versions or versions[-1][0] != label(version)):
                    versions.append((label(version), n))
                n += len(out.token_ids)
                logprobs = [row[token].logprob for token, row in zip(out.token_ids, out.logprobs or (), strict=True)]
                put(Sampled(list(out.token_ids), logprobs, version, out.finish_reason))
                if out.finish_reason is not None:
                    break
            if [(s.version, s.start) for s in out.weight_versions or ()] != versions:
                raise RuntimeError(f"vLLM says that {out.weight_versions} sampled a request for which we noted {versions}")
        except asyncio.CancelledError:
            if collector is not None:
                await self._llm.abort(collector.request_id, internal=True)
        except Exception as e:
            put(e)
        finally:
            self._live.discard(collector)

    # --- weights ------------------------------------------------------------------------------------------------------------------------------

    def update(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        """Serve these weights (none given: those it has) as `version` from the next token on."""
        self._call(self._update(version, tensors, data), f"vLLM to load version {label(version)}", _UPDATE_S)

    async def _update(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        await self._handed_over()
        if tensors:
            shared = Shared(len(data))
            await asyncio.to_thread(lambda: memoryview(shared).__setitem__(slice(len(data)), data))
            info = {"path": shared.path, "nbytes": len(data), "tensors": [msgspec.structs.asdict(t) for t in tensors]}
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await llm.finish_weight_update(label(version))
        else:
            await llm.update_weight_version(label(version))
        self._version = version
        await llm.resume_generation()

    async def _handed_over(self) -> None:
        """Until all that vLLM had sampled when it froze is handed over. It answered the freezing after it sent that."""
        queue = self._llm.engine_core.outputs_queue
        turns = 0
        while turns < 8:  # for what was taken off the queue, and is not in its collector yet
            turns = turns + 1 if queue.empty() and all(c.output is None for c in self._live) else 0
            await asyncio.sleep(0)

    # --- sleep --------------------------------------------------------------------------------------------------------------------------------

    @property
    def on_cpu(self) -> bool:
        return "enable_sleep_mode" not in self._given

    def sleep(self) -> None:
        """Free weights, keys and values where the device can. No request is there."""
        self._asleep = True
        if not self.on_cpu:
            self._call(self._llm.sleep(level=2), "vLLM to sleep", _SLEEP_S)

    def wake(self) -> None:
        """Make room for them again; `update` must follow."""
        if self._asleep and not self.on_cpu:
            self._call(self._llm.wake_up(), "vLLM to wake", _SLEEP_S)
        self._asleep = False

    def gauges(self) -> dict[str, float]:
        """vLLM's own figures."""
        return dict(self._gauges)

    def close(self) -> None:
        """End vLLM's processes and this thread."""
        if self._thread.is_alive():
            try:
                self._call(self._shutdown(), "vLLM to end", _CLOSE_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_CLOSE_S)

    async def _shutdown(self) -> None:
        self._llm.shutdown()
        del self._llm  # it shuts down once more when it goes, and the interpreter's end is too late for that


def label(version: Version) -> str:
    """What vLLM calls a version."""
    return f"{version.term}.{version.step}"


def arguments(config: Config, context: int) -> dict[str, Any]:
    """vLLM's arguments for a configuration; sets what it reads from the environment. Raises `UsageError`."""
    r, cpu = config.rollout, device_of(config.model.device) == "cpu"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if cpu else "WARNING")  # on a CPU it warns of all that is for GPUs
    given: dict[str, Any] = {
        "model": config.model.path, "dtype": config.model.dtype, "skip_tokenizer_init": True, "generation_config": "vllm", "max_model_len": context,
        "max_num_seqs": r.slots, "tensor_parallel_size": r.tensor_parallel, "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "gyre.rollout.vllm_worker.Extension",
    }  # fmt: skip
    if r.kv_memory_mb or cpu:
        given["kv_cache_memory_bytes"] = (r.kv_memory_mb or _CPU_KV_MB) << 20
    if not cpu:
        return {**given, "gpu_memory_utilization": r.gpu_memory, "enable_sleep_mode": True}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several engines share this machine, and bound they would share one core
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would have a C++ compiler make one small function, with requests waiting
    if r.threads:
        os.environ["OMP_NUM_THREADS"] = str(r.threads)
    if r.tensor_parallel == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process of its own for the one worker; the engine's core has one all the same
    return {**given, "enforce_eager": True, "block_size": _CPU_BLOCK}
