"""What runs inside vLLM's workers: how a snapshot's bytes become its model's weights, and how tokens are drawn on a CPU.

vLLM loads this module by name (`worker_extension_cls`) in each worker process, so importing it does register the weight-transfer backend.

Invariants
- After `finish_weight_update` every tensor that the model computes with is of the snapshot: on a CPU the tied output layer is prepared anew, since
  it computes with a copy of its own that vLLM's reload forgets.
- On a CPU the token is the inverse of the cumulative distribution at draw (seed, k), exactly as the torch engine draws. On a GPU vLLM's own draws
  depend on the request's seed and the token's position, so a continued request goes on as it would have; they are not those of the torch engine.

Not here: when weights change (vllm_host.py).
"""

from __future__ import annotations

import ctypes
import signal
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from gyre.errors import WorkFailed
from gyre.rollout.engine import uniform
from gyre.rollout.sampling import pick
from gyre.types import TensorSpec
from gyre.weights.shared import attach
from gyre.weights.snapshot import unpack

BACKEND: Final = "gyre"
DRAWS: Final = "gyre"
"""Key of a request's extra arguments: its seed, and the number of its first draw."""
_PR_SET_PDEATHSIG: Final = 1


@dataclass
class MappedInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: any process of this host can map the bytes."""


@dataclass
class MappedUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A snapshot: where its bytes can be mapped, and the tensors in them (fields of `TensorSpec`)."""

    path: str
    nbytes: int
    tensors: list[dict[str, Any]]


class MappedWeights(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer from shared memory of this host: each worker maps the whole snapshot and takes its part."""

    init_info_cls = MappedInit
    update_info_cls = MappedUpdate

    def init_transfer_engine(self, init_info: MappedInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MappedUpdate) -> None:
        data = attach(update_info.path, update_info.nbytes)
        if data is None:
            raise WorkFailed(f"vLLM's worker cannot map {update_info.path}; it must run on the host of gyre-rollout, as the same user")
        self.model.load_weights(unpack([TensorSpec(**t) for t in update_info.tensors], data).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
            head = self.model.lm_head
            head.weight = self.model.model.embed_tokens.weight
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, MappedWeights)


class Extension:
    """Methods that each worker has besides its own; called by name (`collective_rpc`)."""

    model_runner: Any  # the worker's
    parallel_config: Any

    def gyre_prepare(self) -> None:
        """Die with the process that started this one (several workers have vLLM's own guard), and on a CPU draw as gyre does."""
        if self.parallel_config.world_size == 1:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.model_runner.device.type == "cpu":
            sampler = self.model_runner.sampler
            sampler.topk_topp_sampler.forward = Draw(self.model_runner, sampler.topk_topp_sampler.forward)


class Draw:
    """In place of the last step of vLLM's sampler (V1 model runner): from logits after temperature to tokens, and the log-probs they are drawn by."""

    def __init__(self, runner: Any, own: Any) -> None:
        self._runner, self._own = runner, own

    def __call__(self, logits_BV: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._runner.input_batch.req_ids
        if len(ids) != logits_BV.shape[0]:  # vLLM trying itself out
            answer: tuple[torch.Tensor, torch.Tensor] = self._own(logits_BV, generators, k, p)
            return answer
        logprobs_BV = apply_top_k_top_p(logits_BV, k, p).log_softmax(-1, dtype=torch.float32)
        return pick(logprobs_BV, [self._draw(self._runner.requests[i]) for i in ids]), logprobs_BV

    @staticmethod
    def _draw(request: Any) -> float:
        seed, drawn = request.sampling_params.extra_args[DRAWS]
        return uniform(seed, drawn + len(request.output_token_ids))
