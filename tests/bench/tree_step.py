"""A step's forward and backward at J_max = 5 with prefix trees against the same trajectories as rows: `tree_step.py [ROUNDS]` prints seconds.

Executions at a tenth of their size: S is the system prompt with tools and task, H a span of work of which a third was sampled.

- edited: S+H is compacted once (a call behind it), then S+H again, whose late history the harness edits twice (a reminder that moves, thoughts that a
  template strips), so that two more branches leave it at 70 and 85 %.
- compacted: S+H is compacted twice: three contexts that share S alone, and two calls that share all.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gyre.config import Train
from gyre.train.model import MicroStepData, Policy, micro_batches
from gyre.train.optimizer import Learner
from gyre.train.tree import lay_out
from gyre.types import PackedTrajectory

SYSTEM, SPAN, SUMMARY = 1000, 2000, 60
EXECUTIONS, TOKENS = 1, 16384


def paths(draw: random.Random, shape: str) -> list[tuple[list[int], list[int]]]:
    """Ids and masks of one execution's five trajectories."""

    def words(n: int) -> list[int]:
        return [draw.randrange(3, 600) for _ in range(n)]

    def path(above: list[int], own: int, rate: float = 0.33) -> tuple[list[int], list[int]]:
        return above + words(own), [0] * len(above) + [int(draw.random() < rate) for _ in range(own)]

    system = words(SYSTEM)
    first, second = path(system, SPAN), path(system, SPAN)
    found = [first, path(first[0], SUMMARY, 1.0), second]
    if shape == "compacted":
        return [*found, path(second[0], SUMMARY, 1.0), path(system, SPAN)]
    whole = SYSTEM + SPAN
    return [*found, *(path(second[0][: int(kept * whole)], whole - int(kept * whole)) for kept in (0.7, 0.85))]


def micro_step(shape: str) -> MicroStepData:
    """One execution, as claimed."""
    draw = random.Random(0)
    trajectories, ids, masks = [], [], []
    for e in range(EXECUTIONS):
        rows = paths(draw, shape)
        total = sum(sum(m) for _, m in rows)
        for i, (tokens, mask) in enumerate(rows):
            trajectories.append(PackedTrajectory(f"{e}.{i}", f"e{e}", "g", len(tokens), sum(mask), total, (-1.0) ** e, 0.0, 0))
            ids += tokens
            masks += mask
    n = len(ids)
    return MicroStepData(
        trajectories, torch.tensor(ids, dtype=torch.int32), torch.tensor(masks, dtype=torch.int8), torch.full((n,), -6.0),
        torch.zeros(n, dtype=torch.int32),
    )  # fmt: skip


def model(hidden: int = 512, layers: int = 2) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=668, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()  # type: ignore[no-untyped-call]


def floor(data: MicroStepData) -> float:
    """Multiplications of the tree over those of the rows: what the ratio would be if each cost the same. Per token those of the model's matrices, per
    pair of tokens that attend those of scores and values."""
    sizes = [t.n_tokens for t in data.trajectories]
    rows = torch.split(data.token_ids_S, sizes)
    tree, m = lay_out(rows), model()
    matrices = sum(p.numel() for p in m.parameters() if p.ndim == 2)
    pair = 2 * m.config.num_hidden_layers * m.config.num_attention_heads * m.config.head_dim
    own = [(b.stop - b.start, sum(z - a for a, z in b.above)) for b in tree.branches]
    pairs = (sum(n * (above + n / 2) for n, above in own), sum(n * n / 2 for n in sizes))
    return (len(tree.ids_T) * matrices + pairs[0] * pair) / (sum(sizes) * matrices + pairs[1] * pair)


def seconds(data: MicroStepData, *, tree: bool) -> float:
    """Of one processor, for one accumulation: other load on the machine does not count."""
    learner = Learner(Policy(model(), Path(), 1.0, tree=tree), Train(micro_step_tokens=TOKENS, ratio_low=0.0, ratio_high=1e9), 1)
    started = time.process_time()
    learner.accumulate(data, 0)
    return time.process_time() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    for shape in ("edited", "compacted"):
        data = micro_step(shape)
        tree = next(micro_batches(data, TOKENS, torch.device("cpu"), tree=True)).ids_RT.numel()
        rounds = int(sys.argv[1]) if sys.argv[1:] else 3
        pairs = [(seconds(data, tree=True), seconds(data, tree=False)) for _ in range(rounds)]
        told = ", ".join(f"{a:.2f} s / {b:.2f} s = {a / b:.2f}" for a, b in pairs)
        print(f"{shape}: {tree} tokens as a tree, {len(data.token_ids_S)} as rows, {floor(data):.2f} of the multiplications; {told}", flush=True)
