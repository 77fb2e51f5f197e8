"""A tiny random Qwen3 model directory, and micro-steps made by hand."""

from __future__ import annotations

import array
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 32


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: two layers, random weights, tied embeddings, a stub of a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.float().save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.fixture(scope="session")
def micro_step() -> Callable[..., Any]:
    """Make a `MicroStepData` of trajectories given as (ids, mask, advantage, execution_trainable, log-probs or None, version)."""
    from gyre.train.model import MicroStepData
    from gyre.types import PackedTrajectory

    def make(*trajectories: tuple[list[int], list[int], float, int, list[float] | None, int]) -> MicroStepData:
        packed, ids, masks, logprobs, versions = [], [], [], [], []
        for i, (tokens, mask, advantage, execution_trainable, old, version) in enumerate(trajectories):
            one = PackedTrajectory(
                trajectory_id=f"t{i}", rollout_id=f"r{i}", group_id="g", n_tokens=len(tokens), n_trainable=sum(mask),
                execution_trainable=execution_trainable, advantage=advantage, reward=0.0, version_at_dispatch=version,
            )  # fmt: skip
            packed.append(one)
            ids += tokens
            masks += mask
            logprobs += old if old is not None else [-3.0 if m else float("nan") for m in mask]
            versions += [version if m else -1 for m in mask]
        return MicroStepData.from_arrays(
            packed,
            {
                "token_ids": memoryview(array.array("i", ids)).toreadonly(),
                "loss_mask": memoryview(array.array("b", masks)).toreadonly(),
                "logprobs": memoryview(array.array("f", logprobs)).toreadonly(),
                "versions": memoryview(array.array("i", versions)).toreadonly(),
            },
        )

    return make
