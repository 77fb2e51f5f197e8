"""The vocabulary of gyre: the words of docs/architecture.md as types.

Invariants
- Every execution is in exactly one `RolloutState`; the eight counts add up to the executions admitted.
- `ENDINGS` is the only place that says what an ending means for grading and for training.
- Nothing here imports anything of gyre, does I/O or knows a clock.

Units come last in names (`_s` seconds, `_mb` mebibytes). A *version* is the number of optimizer steps contained in some weights; on the wire
it is named together with the core's term.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class Purpose(StrEnum):
    """Why a ticket exists. Evaluation is outside quota, groups and training."""

    TRAIN = "train"
    EVAL = "eval"


class RolloutState(StrEnum):
    """Where an admitted execution is. The order is the order of a rollout's life."""

    QUEUED = "queued"  # ticket issued, unleased
    RUNNING = "running"
    GRADING = "grading"
    WAITING = "waiting"  # graded, siblings missing
    READY = "ready"
    CLAIMED = "claimed"
    CONSUMED = "consumed"
    DISCARDED = "discarded"


UNFINISHED: Final = (RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.GRADING)
"""States without a terminal outcome: the water level counts these."""


class MicroStepState(StrEnum):
    """queued → claimed(cell) → accumulated(cell, incarnation) → committed(step)."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    ACCUMULATED = "accumulated"
    COMMITTED = "committed"


class Ending(StrEnum):
    """Why an execution ended. What follows from it is `ENDINGS`."""

    FINISHED = "finished"  # the harness ended by itself, whatever its exit status
    HARNESS_TIMEOUT = "harness_timeout"
    CONTEXT_FULL = "context_full"
    TURN_LIMIT = "turn_limit"
    OVERALL_TIMEOUT = "overall_timeout"
    VERIFIER_FAILED = "verifier_failed"  # crash, time-out or no reward, retries included: never reward 0
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_LOST = "engine_lost"
    TASK_SETUP_FAILED = "task_setup_failed"  # nothing to grade, the task is at fault
    INFRA_SETUP_FAILED = "infra_setup_failed"  # nothing to grade, the infrastructure is
    NO_TRAINABLE_TOKEN = "no_trainable_token"


class Training(StrEnum):
    """What training does with an ending."""

    ACCEPT = "accept"
    DISCARD = "discard"
    RETRY = "retry"  # re-issue within budget, then discard
    PLACEHOLDER = "placeholder"  # reward 0, in the group's mean, no loss
    STATISTICS = "statistics"  # graded, in the group's mean, no loss


class EndingRule(msgspec.Struct, frozen=True):
    """One row of the endings table: is the workspace graded, and what becomes of the execution."""

    grade: bool
    training: Training
    infrastructure: bool  # counts towards "too many infrastructure failures in a row"


ENDINGS: Final[dict[Ending, EndingRule]] = {
    Ending.FINISHED: EndingRule(True, Training.ACCEPT, False),
    Ending.HARNESS_TIMEOUT: EndingRule(True, Training.ACCEPT, False),
    Ending.CONTEXT_FULL: EndingRule(True, Training.ACCEPT, False),
    Ending.TURN_LIMIT: EndingRule(True, Training.ACCEPT, False),
    Ending.OVERALL_TIMEOUT: EndingRule(False, Training.DISCARD, False),
    Ending.VERIFIER_FAILED: EndingRule(False, Training.DISCARD, True),  # the verifier was retried; another draw would reward its killer
    Ending.SANDBOX_LOST: EndingRule(False, Training.RETRY, True),
    Ending.ENGINE_LOST: EndingRule(False, Training.RETRY, True),
    Ending.TASK_SETUP_FAILED: EndingRule(False, Training.PLACEHOLDER, False),
    Ending.INFRA_SETUP_FAILED: EndingRule(False, Training.RETRY, True),
    Ending.NO_TRAINABLE_TOKEN: EndingRule(True, Training.STATISTICS, False),
}


class LeafClass(StrEnum):
    """Classes of a prefix graph's leaves, best first; side calls are never trained."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    SIDE = "side"


class CallStatus(StrEnum):
    """How a model call ended. An aborted call's tokens are kept, its mask is 0."""

    COMPLETE = "complete"
    ABORTED = "aborted"
    ERROR = "error"


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names weights on the wire: (term, step). Ordered: a later term is newer whatever its step."""

    term: int
    step: int


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. `top_k` 0 and `top_p` 1 mean off; temperature 0 means greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256


class Ticket(msgspec.Struct, frozen=True):
    """The lease that lets a sandbox run one rollout. Re-issued, it has a new epoch and the old one is refused."""

    rollout_id: str
    epoch: int
    group_id: str
    query_id: str
    index: int  # position in its group, 0-based
    task: str  # path of the Harbor task directory
    purpose: Purpose
    policy: Version  # calls go only to engines at this version or a later one
    seed: int  # every draw of this rollout derives from it
    lease_ttl_s: float


class GraphNode(msgspec.Struct, frozen=True):
    """A segment of a prefix graph. Its tokens are the next `n_tokens` of the arrays that travel with the graph."""

    parent: int  # index of the parent node, -1 at a root; parents come before children
    n_tokens: int
    call_id: str | None = None  # not None: these tokens were sampled by that call


class CallRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model request of a harness with its reply. Times are seconds since the rollout began."""

    call_id: str
    prompt_node: int  # the node at which its prompt ends, -1 if the prompt is empty
    node: int  # the node of its sampled tokens, -1 if none were sampled
    status: CallStatus
    finish_reason: str  # stop | length | tool_calls | abort | context | error
    leaf_class: LeafClass
    cell: str  # the engine that finished it
    started_s: float
    ended_s: float
    n_prompt: int
    n_completion: int
    api: str = "chat"  # the protocol: chat | responses | messages
    asked: dict[str, bool | int | float | str] = {}  # sampling parameters that it gave; the run's held instead


class TrajectoryMeta(msgspec.Struct, frozen=True):
    """One root-to-leaf path chosen for training. `trainable` are the nodes of `nodes` whose tokens bear loss here."""

    index: int
    leaf_class: LeafClass
    nodes: list[int]
    trainable: list[int]
    n_tokens: int
    n_trainable: int


class PackedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory inside a micro-step, with all that the loss needs beside its arrays."""

    trajectory_id: str
    rollout_id: str
    group_id: str
    n_tokens: int
    n_trainable: int
    execution_trainable: int  # trainable tokens of the whole execution, over all its trajectories
    advantage: float
    reward: float
    version_at_dispatch: int


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor lies in a weight snapshot's bytes. `dtype` is a safetensors name (F32, BF16, …)."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
