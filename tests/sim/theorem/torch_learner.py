"""The production learner in the deterministic world, on a tiny model in fp32; and one cell alone with it, from scratch.

The judge's step is one loss over the step's executions, a trajectory at a time through the whole model, and torch's AdamW: no packing, no
micro-batches, no accumulator. Gating and loss are written out again (`dis` of train.objective).
"""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gyre.config import Train
from gyre.train.model import MicroStepData, Policy
from gyre.train.objective import region
from gyre.train.optimizer import Learner
from gyre.train.protocols import Update
from theorem.chronicle import Vector
from theorem.feeder import VOCABULARY, Execution
from theorem.learner import WIDTH, Observe, Stepped, named, number
from theorem.plan import Plan
from theorem.reference import advantages

TOLERANCE: Final = 1e-5


def flat(tensors: Any) -> Vector:
    """Tensors in one row, in float64."""
    row: Vector = torch.cat([t.detach().reshape(-1).double() for t in tensors]).numpy()
    return row


class CountingLearner(Learner):
    """The learner, with how often each trajectory is in its sums beside them (see `learner.TableLearner`)."""

    def __init__(self, policy: Policy, train: Train, groups: int, rollouts_per_group: int, observe: Observe, stepped: Stepped) -> None:
        super().__init__(policy, train, train.steps)
        self._counts = torch.zeros(groups * rollouts_per_group * WIDTH)
        self._per_group, self._observe, self._stepped = rollouts_per_group, observe, stepped

    @property
    def sums(self) -> list[Tensor]:
        return [*super().sums, self._counts]

    @property
    def vector(self) -> Vector:
        return flat(self.parameters.values())

    def zero(self) -> None:
        super().zero()
        self._counts.zero_()

    def accumulate(self, data: MicroStepData, version: int) -> None:
        self._observe(version, self.vector)
        super().accumulate(data, version)
        for t in data.trajectories:
            self._counts[number(t.trajectory_id, self._per_group)] += 1

    def update(self, step: int, executions: int, trainable: int | None = None) -> Update:
        *sums, counts = self.sums if self.totals is None else self.totals
        self.totals = sums
        gradient = flat(sums) / max(1, executions)
        done = super().update(step, executions, trainable)
        times = Counter({named(int(k), self._per_group): int(counts[k]) for k in counts.nonzero().flatten()})
        self._stepped(step, gradient, self.vector, times)
        return done

    def saved(self) -> Any:
        """What a checkpoint holds."""
        return copy.deepcopy(([p.detach() for p in self.parameters.values()], self.adam.state_dict()))

    def restore(self, saved: Any) -> None:
        weights, adam = copy.deepcopy(saved)
        with torch.no_grad():
            for p, w in zip(self.parameters.values(), weights, strict=True):
                p.copy_(w)
        self.adam.load_state_dict(adam)


class Torches:
    """Learners of one world, all alike, and one cell alone (`world.Kind`)."""

    tolerance = TOLERANCE

    def __init__(self, plan: Plan) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self._plan = plan
        torch.manual_seed(plan.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
        )  # fmt: skip
        self._model: Any = LlamaForCausalLM(config).float().eval()  # type: ignore[no-untyped-call]
        self.start = self.learner(lambda *_: None, lambda *_: None).saved()
        self.alone = Alone(self._model, plan.config.train)

    def learner(self, observe: Observe, stepped: Stepped) -> CountingLearner:
        policy = Policy(copy.deepcopy(self._model), Path(), 1.0)
        return CountingLearner(policy, self._plan.config.train, self._plan.groups, self._plan.config.system.rollouts_per_group, observe, stepped)


class Alone:
    """See the module. A state is a model and its optimizer's state."""

    def __init__(self, model: Any, train: Train) -> None:
        self._model, self._train = model, train

    def begin(self) -> Any:
        return copy.deepcopy(self._model), None

    def weights(self, state: Any) -> Vector:
        return flat(state[0].parameters())

    def step(self, state: Any, groups: list[list[Execution]], step: int) -> tuple[Any, Vector]:
        model, moments = copy.deepcopy(state)
        model.zero_grad()
        loss = torch.zeros(())
        low, high = region(self._train)
        for group in groups:
            for e, advantage in zip(group, advantages(group), strict=True):
                trainable = sum(sum(b.trainable) for b in e.branches)
                for b in e.branches:
                    logprobs = torch.log_softmax(model(input_ids=torch.tensor([b.tokens])).logits[0], -1)
                    for t in range(1, len(b.tokens)):
                        if b.trainable[t]:
                            new = logprobs[t - 1, b.tokens[t]]
                            ratio = float(torch.exp(new.detach() - torch.tensor(b.logprobs[t])))
                            if low < ratio < high:
                                loss = loss - ratio * advantage * new / trainable
        graded = sum(len(g) for g in groups)
        if graded and loss.requires_grad:
            (loss / graded).backward()  # type: ignore[no-untyped-call]
        parameters = list(model.parameters())
        gradient = flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
        if not gradient.any():
            return state, gradient
        if self._train.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, self._train.clip_norm)
        adam = torch.optim.AdamW(parameters, lr=self._train.lr, betas=(self._train.beta1, self._train.beta2), weight_decay=0.0)
        if moments is not None:
            adam.load_state_dict(moments)
        adam.step()
        return (model, adam.state_dict()), gradient
