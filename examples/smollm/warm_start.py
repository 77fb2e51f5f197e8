"""Imitate demonstrations for a short while, so that tool calls are well-formed often enough for rewards to differ.

    gyre-dump RUN --fields token_ids,loss_mask,reward | python warm_start.py --model DIR --out DIR [--epochs 1] [--batch 4] [--lr 1e-4] [--seed 0]

Demonstrations are the trajectories of a run, so prompts, answers of tools and the places where a turn ends are as they will be. Cross-entropy on
what the demonstrator said. All demonstrations begin alike: a batch is packed as a tree, as gyre-train packs an execution, and each shared token is
computed once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: threads that spin take a busy machine ten times as long

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gyre.train import tree as trees

Example = tuple[Tensor, Tensor]
"""Token ids, and where the demonstrator's tokens are (never the first)."""


def read(lines: list[str]) -> list[Example]:
    """Demonstrations that the verifier liked, in the order of their tokens: the order of a dump depends on who ended first."""
    rows = sorted((row["token_ids"], row["loss_mask"]) for row in map(json.loads, lines) if row["reward"] == 1)
    return [(torch.tensor(ids), torch.tensor(mask).nonzero().flatten()) for ids, mask in rows]


def loss_of(model: Any, batch: list[Example]) -> Tensor:
    """Mean over the batch's trainable tokens."""
    tree = trees.lay_out([ids for ids, _ in batch])
    hidden_TD = model.base_model(
        input_ids=tree.ids_T[None], position_ids=tree.depth_T[None], use_cache=False, **{trees.NAME: tree}
    ).last_hidden_state[0]  # fmt: skip
    at_N = torch.cat([path[spoken - 1] for path, (_, spoken) in zip(tree.paths, batch, strict=True)])
    targets_N = torch.cat([ids[spoken] for ids, spoken in batch])
    return cross_entropy(model.get_output_embeddings()(hidden_TD[at_N]), targets_N)


def imitate(model: Any, examples: list[Example], *, epochs: int, batch: int, lr: float, seed: int) -> None:
    """AdamW, the learning rate falling to nothing."""
    trees.install(model)
    rng, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    batches = [order[i : i + batch] for _ in range(epochs) for order in [rng.sample(examples, len(examples))] for i in range(0, len(order), batch)]
    start = time.monotonic()
    for n, each in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (n + 1) / 4) * (1 - n / len(batches))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, each)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"update {n + 1} of {len(batches)}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Imitate the demonstrations of a run, as gyre-dump writes them, read from standard input.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to begin with")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model in")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the demonstrations (default 1)")
    parser.add_argument("--batch", type=int, default=4, help="demonstrations of an update (default 4)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate in the beginning (default 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their order (default 0)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    disable_progress_bar()
    examples = read(sys.stdin.readlines())
    if not examples:
        raise SystemExit("warm_start: no demonstration has a reward of 1; look at the dump's endings: gyre-dump RUN --kind rollouts")
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    imitate(model, examples, epochs=options.epochs, batch=options.batch, lr=options.lr, seed=options.seed)
    shutil.copytree(options.model, options.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(options.out)
    print(f"{len(examples)} demonstrations, {sum(len(spoken) for _, spoken in examples)} tokens imitated in each of {options.epochs} passes")


if __name__ == "__main__":
    main()
