"""Losses and advantages as published implementations compute them: TRL's trainer, verl's advantage. `python tests/train/published.py` (where both are
installed, for example `pip install trl verl ray`) writes published.json, which the tests compare with wherever they run.

What stands in for the trainer around the published code is its configuration and a model that answers with given log-probs.
"""

from __future__ import annotations

import json
import random
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

GOLDEN = Path(__file__).with_name("published.json")
ROWS, WIDTH, CONSTANT = 4, 6, 50
REGIONS = {"grpo": (0.8, 1.2), "dapo": (0.8, 1.28), "dr_grpo": (0.8, 1.2), "gspo": (0.95, 1.06), "cispo": (0.0, 1.5), "tis": (0.0, 1.3)}
GROUPS = 3


def inputs(seed: int) -> dict[str, Any]:
    """Log-probs of ROWS executions of up to WIDTH tokens, some not trainable; advantages; rewards of GROUPS groups."""
    draw = random.Random(seed)
    mask = [[int(t == 0 or draw.random() < 0.7) for t in range(WIDTH)] for _ in range(ROWS)]
    old = [[draw.uniform(-3, -0.1) for _ in range(WIDTH)] for _ in range(ROWS)]
    return {
        "mask": mask,
        "old": old,
        "new": [[o + draw.gauss(0, 0.3) for o in row] for row in old],
        "advantages": [draw.choice([-1, 1]) * draw.uniform(0.2, 2) for _ in range(ROWS)],
        "rewards": [[draw.uniform(0, 1) for _ in range(draw.randint(2, 5))] for _ in range(GROUPS)],
    }


def loss(name: str, given: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """The loss of a step and its gradient by the new log-probs, by TRL."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    low, high = REGIONS[name]
    mask, old, new = (torch.tensor(given[k], dtype=torch.float64) for k in ("mask", "old", "new"))
    new.requires_grad_()
    zeros = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    batch = {
        "prompt_ids": zeros, "prompt_mask": zeros, "completion_ids": zeros, "completion_mask": mask, "old_per_token_logps": old,
        "advantages": torch.tensor(given["advantages"], dtype=torch.float64), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if name == "tis":  # the policy before the update is the policy: the ratio to the sampler is all there is, truncated as for vllm's log-probs
        batch |= {"old_per_token_logps": None, "importance_sampling_ratio": torch.clamp(torch.exp(new.detach() - old), min=None, max=high)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        loss_type={"gspo": "grpo", "tis": "grpo"}.get(name, name), importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=1 - low, epsilon_high=high if name == "cispo" else high - 1, beta=0.0, max_completion_length=CONSTANT,
        use_vllm=name == "tis", vllm_importance_sampling_correction=True, args=SimpleNamespace(delta=None, steps_per_generation=1),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=False), _metrics={"eval": defaultdict(list)}, current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    )  # fmt: skip
    value = GRPOTrainer._compute_loss(trainer, None, batch)
    (gradient,) = torch.autograd.grad(value, new)
    return float(value.detach()), gradient.tolist()


def rloo(rewards: list[float]) -> list[float]:
    """Advantages of a group, by verl."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage

    one = torch.ones(len(rewards), 1, dtype=torch.float64)
    advantages, _ = compute_rloo_outcome_advantage(torch.tensor(rewards, dtype=torch.float64)[:, None], one, ["g"] * len(rewards))
    return [float(a) for a in advantages[:, 0]]


if __name__ == "__main__":
    cases = []
    for seed in range(3):
        given = inputs(seed)
        cases.append(
            {**given, "losses": {n: loss(n, given) for n in REGIONS}, "rloo": [rloo(r) for r in given["rewards"]]},
        )
    GOLDEN.write_text(json.dumps(cases) + "\n")
