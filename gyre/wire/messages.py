"""Every message of gyre, one union per socket direction (the table `DIRECTIONS` at the end).

Invariants
- Each message has `id` (minted by its sender) and `cause` (the id of the message that led to it, "" at the start of a story). A reply's cause
  is its request's id; a push has the cause of what triggered it.
- A message is one MessagePack map with the tag `op`; fields unknown to a reader are ignored, missing optional ones take their default. So fields are
  only ever added, with defaults: the golden bytes in tests/wire decode for ever.
- Bulk arrays never enter the map. A class that has them names them, with their element type, in `ARRAYS`; they follow as raw frames.
- `WIRE_VERSION` is agreed once, in `Hello`.

Requests are idempotent: a client that saw no answer sends the same message again.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

import msgspec

from gyre.types import CallRecord, Ending, GraphNode, PackedTrajectory, Sampling, TensorSpec, Ticket, TrajectoryMeta, Version

WIRE_VERSION: Final = 2

Wait = Annotated[float, msgspec.Meta(ge=0, le=3600)]
"""Seconds in which an answer may come. Never NaN: one would stand before all other timers."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
ExitCode = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""What the ledger and JSON can hold."""


class Message(msgspec.Struct, tag_field="op", tag=str, frozen=True, kw_only=True):
    """Base of all messages."""

    ARRAYS: ClassVar[dict[str, str]] = {}

    id: str
    cause: str = ""


# --- any client -> any server ------------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message on a connection, and again whenever a server says `HelloRequired`."""

    wire_version: int
    kind: str  # buffer | sandbox | rollout | train | coord | observer
    name: str
    incarnation: str  # one life of the sender's process
    run_id: str = ""  # "" : whatever run the server has
    host: str = ""
    pid: int = 0


class Welcome(Message, frozen=True, kw_only=True):
    """The connection stands. `incarnation` is the server's: a new one means that it was restarted."""

    wire_version: int
    run_id: str
    incarnation: str


class Refuse(Message, frozen=True, kw_only=True):
    """The request, or the connection, is refused for good. `stale` says that a newer term or epoch exists."""

    reason: str
    stale: bool = False


class HelloRequired(Message, frozen=True, kw_only=True):
    """The server was restarted and does not know this client: say hello, then repeat the request."""


class Ack(Message, frozen=True, kw_only=True):
    """Done, and durable where the request changed the ledger."""

    beat_s: float = 0.0  # of a worker's status: beat next after so long; 0: as ever


class Note(Message, frozen=True, kw_only=True):
    """An event for the run's event log, from a process that is not the buffer. Answered by `Ack`. Its fields are what JSON can say."""

    event: str
    fields: dict[str, Any] = {}

    def __post_init__(self) -> None:
        msgspec.json.encode(self.fields)  # raises what the decoder makes a refusal of


# --- gyre-sandbox -> gyre-buffer ---------------------------------------------------------------------------------------------------------


class LeaseTickets(Message, frozen=True, kw_only=True):
    """Ask for up to `n` tickets; answered by `Tickets` when there are some, or empty after `wait_s`."""

    n: int
    wait_s: Wait


class Tickets(Message, frozen=True, kw_only=True):
    """Leased tickets. `finished`: the run needs no more rollouts, the sandbox may end."""

    tickets: list[Ticket]
    finished: bool = False


class LeaseRef(msgspec.Struct, frozen=True, array_like=True):
    """A lease: the rollout and the epoch of its ticket."""

    rollout_id: str
    epoch: int


class RenewLeases(Message, frozen=True, kw_only=True):
    """Heartbeat for all leases held; answered by `LeasesRenewed`."""

    leases: list[LeaseRef]


class LeasesRenewed(Message, frozen=True, kw_only=True):
    """`lost` are leases that expired or were re-issued: stop those rollouts, their results would be refused."""

    lost: list[LeaseRef]


class GradingStarted(Message, frozen=True, kw_only=True):
    """The agent of this rollout is dead and its workspace is being graded. Answered by `Ack` or `Refuse`."""

    rollout_id: str
    epoch: int


class RolloutEnded(Message, frozen=True, kw_only=True):
    """One execution's outcome with its prefix graph. Answered by `Ack` once durable, or `Refuse` (stale epoch).

    Arrays are over all nodes' tokens in node order; `logprobs` is NaN and `versions` -1 where a token was not sampled.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "i32", "logprobs": "f32", "versions": "i32"}

    rollout_id: str
    epoch: int
    ending: Ending
    reward: float | None = None
    rewards: dict[str, float] = {}
    detail: str = ""
    harness: str = ""
    harness_exit: ExitCode | None = None
    nodes: list[GraphNode] = []
    calls: list[CallRecord] = []
    trajectories: list[TrajectoryMeta] = []
    left_tokens: Count = 0  # trainable, and on no chosen trajectory
    left_leaves: Count = 0
    cells: list[str] = []
    seconds: dict[str, float] = {}  # by phase: setup, harness, model, grade


# --- gyre-train -> gyre-buffer -----------------------------------------------------------------------------------------------------------


class AcquireTerm(Message, frozen=True, kw_only=True):
    """A core starts from a checkpoint at `step` and asks for a new term; steps above it are replayed. Answered by `TermGranted`.

    `fresh`: it means to begin a run, and is refused where steps are committed already. `checkpoint_term`: in which the checkpoint was written (0: not
    told); one of a lineage that was left since is refused as stale, another may do.
    """

    cell: str
    step: int
    fresh: bool = False
    checkpoint_term: int = 0


class TermGranted(Message, frozen=True, kw_only=True):
    """`term` is the highest ever granted; every later message of the core carries it. `total_steps` is where the run ends."""

    term: int
    step: int
    total_steps: int


class ClaimMicroStep(Message, frozen=True, kw_only=True):
    """Claim a micro-step of `step` (the number the optimizer step will have: committed + 1); waits up to `wait_s`."""

    term: int
    step: int
    cell: str
    incarnation: str
    wait_s: Wait


class MicroStepClaimed(Message, frozen=True, kw_only=True):
    """A pack of trajectories; arrays are the trajectories' tokens one behind the other. The claim is a lease of `lease_ttl_s`.

    `logprobs` is NaN and `versions` -1 where `loss_mask` is 0 for want of sampling.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "i32", "loss_mask": "i8", "logprobs": "f32", "versions": "i32"}

    micro_step_id: str
    step: int
    lease_ttl_s: float
    trajectories: list[PackedTrajectory]


class NothingToClaim(Message, frozen=True, kw_only=True):
    """No micro-step now. `drained`: the step has all its groups and every micro-step is claimed or accumulated; seal it. Else `waiting_for` says."""

    drained: bool
    waiting_for: str = ""


class RenewClaims(Message, frozen=True, kw_only=True):
    """Heartbeat for a cell's claims. Answered by `Ack`, or `Refuse(stale)` when the incarnation was voided."""

    term: int
    cell: str
    incarnation: str


class Accumulated(Message, frozen=True, kw_only=True):
    """The gradients of this micro-step are in the accumulator of (cell, incarnation, step). Answered by `Ack` or `Refuse(stale)`."""

    term: int
    step: int
    micro_step_id: str
    cell: str
    incarnation: str


class SealStep(Message, frozen=True, kw_only=True):
    """No claims after this. Answered by `Manifest` once nothing is outstanding, or `NothingToClaim(drained=False)` after `wait_s`."""

    term: int
    step: int
    wait_s: Wait


class ManifestEntry(msgspec.Struct, frozen=True):
    """What one cell's accumulator holds."""

    cell: str
    incarnation: str
    micro_steps: list[str]


class StepStats(msgspec.Struct, frozen=True):
    """What the ledger knows about a step's groups. Rewards are over graded executions, staleness over groups."""

    groups: int
    executions: int  # graded, those without a trainable token included: the denominator of the two-level mean
    trajectories: int
    tokens: int
    trainable_tokens: int
    reward_mean: float | None
    staleness_mean: float | None
    staleness_p95: float | None
    staleness_max: float | None
    staleness_interpolated: float | None
    staleness_predicted: float | None
    discarded_groups: int  # groups this step closed without
    uniform_groups: int  # groups whose rewards are all equal


class Manifest(Message, frozen=True, kw_only=True):
    """What the sealed step consists of; `hash` names exactly this content in the commit."""

    term: int
    step: int
    entries: list[ManifestEntry]
    stats: StepStats
    hash: str


class Member(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One life of a cell's trainer, as a taker-part in a step."""

    cell: str
    incarnation: str


class VoidIncarnations(Message, frozen=True, kw_only=True):
    """These accumulators are lost: queue again all that they hold of `step`, and refuse them from now on. A sealed step opens again.

    The core sends it for cells that failed the reduction, a cell for itself when it leaves a step that cannot end yet. Idempotent; answered by `Ack`
    or `Refuse(stale)`.
    """

    term: int
    step: int
    cells: list[Member]
    reason: str


class CommitStep(Message, frozen=True, kw_only=True):
    """The core has updated. Idempotent by (term, step, hash). `metrics` goes to the event log. Answered by `Ack` or `Refuse`."""

    term: int
    step: int
    hash: str
    metrics: dict[str, float | None]


class Published(Message, frozen=True, kw_only=True):
    """Engines named in `cells` acknowledged this version: it is the policy. Answered by `Ack` once durable."""

    version: Version
    cells: list[str]
    seconds: Seconds


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """A checkpoint at `step` is complete on disk: payloads consumed up to it may go. Answered by `Ack`."""

    term: int
    step: Count
    path: str


# --- observers (gyre-coord, gyre-dump) <-> gyre-buffer ----------------------------------------------------------------


class Subscribe(Message, frozen=True, kw_only=True):
    """Push `Counters` at every change (at most each `min_interval_s`), and events if asked. Answered at once by `Counters`."""

    events: bool = False
    min_interval_s: Wait = 0.2


class Counters(Message, frozen=True, kw_only=True):
    """The buffer's snapshot. The values of `states` add up to `admitted`, always."""

    seq: int
    admitted: int
    states: dict[str, int]
    water_level: int
    step: int
    total_steps: int
    published: Version
    term: int
    groups_open: int  # admitted and not yet taken by a step
    eval_outstanding: int
    finished: bool  # all steps committed, the last policy published, its evaluation graded
    failure: str = ""  # not "": the run cannot go on, and why
    ready_groups: int = 0  # complete and not yet taken by a step
    taken_groups: int = 0  # of the open step
    publications: int = 0  # so far, the first included


class Events(Message, frozen=True, kw_only=True):
    """New lines of the event log, as JSON text without newlines."""

    lines: list[str]


class AskRecords(Message, frozen=True, kw_only=True):
    """An observer asks for records of the run, as gyre-dump's options choose them, after the first `have`. Answered by `Records` or `Refuse`."""

    kind: str
    first_step: int | None = None
    last_step: int | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    evaluation: bool = False
    tokens: bool = True
    redact_system: bool = False
    have: int = 0


class Records(Message, frozen=True, kw_only=True):
    """Records: `data` is one MessagePack array of maps. `done`: there are no more."""

    ARRAYS: ClassVar[dict[str, str]] = {"data": "u8"}

    done: bool


# --- gyre-sandbox (gateway) <-> gyre-rollout ---------------------------------------------------------------------------------------------


class Generate(Message, frozen=True, kw_only=True):
    """Continue `prompt_ids`. Answered by `Generated`, or `EngineRefuse` at once.

    A continuation of a request that another engine gave back sends the tokens it already has at the end of `prompt_ids`, their number in `drawn`
    (the sampling state: draw number k of a request depends on `seed` and k alone), the remaining budget in `sampling.max_tokens`, and the
    version of its last token in `min_version`.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"prompt_ids": "i32"}

    request_id: str
    rollout_id: str
    min_version: Version
    sampling: Sampling
    seed: int
    drawn: int = 0
    stop_ids: list[int] = []  # beside the model's own end-of-turn ids
    moved: bool = False  # another engine gave it back, maybe before its first token: it goes into the room kept for such


class Abort(Message, frozen=True, kw_only=True):
    """End a request now: it is answered by `Generated(finish_reason="abort")` with the tokens it has. Unknown requests are ignored."""

    request_id: str


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a completion were sampled by `version`."""

    version: Version
    start: int
    end: int


class Generated(Message, frozen=True, kw_only=True):
    """Sampled tokens with the log-prob of each under the distribution it was drawn from. `cell` names the engine."""

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "i32", "logprobs": "f32"}

    request_id: str
    finish_reason: str  # stop | length | abort | context
    spans: list[VersionSpan]
    cell: str


class EngineRefuse(Message, frozen=True, kw_only=True):
    """The engine does not take this request: full | closing | behind (its version is too old) | context (prompt too long) | error."""

    request_id: str
    reason: str
    detail: str = ""
    context_limit: int = 0


class Ping(Message, frozen=True, kw_only=True):
    """Which of my requests do you hold? Answered by `Pong`."""


class Pong(Message, frozen=True, kw_only=True):
    """The engine's state: requests of the asking client that are in flight, its version (null until it acknowledged one), room for more."""

    incarnation: str
    cell: str
    version: Version | None
    request_ids: list[str]
    free_slots: int
    context_limit: int
    slots: int = 0  # requests decoded together (0: not said)
    open: int = 0  # requests of all clients, decoding or waiting


# --- gyre-rollout <-> gyre-train (weights) -----------------------------------------------------------------------------------------------


class WatchPolicy(Message, frozen=True, kw_only=True):
    """An engine asks to be told of every policy. Answered at once, and then at every publication, by `PolicyAvailable`.

    `leaving`: it sleeps now, no publication is to wait for it. Not answered.
    """

    cell: str
    have: Version | None = None
    leaving: bool = False


class PolicyAvailable(Message, frozen=True, kw_only=True):
    """A snapshot to pull: its tensors and its bytes, chunk by chunk."""

    version: Version
    tensors: list[TensorSpec]
    nbytes: int
    checksum: str  # XXH3-128 of all bytes, hex


class PullChunk(Message, frozen=True, kw_only=True):
    """Ask for bytes [offset, offset + nbytes) of a snapshot. Answered by `Chunk`, or `SnapshotGone`."""

    version: Version
    offset: int
    nbytes: int


class Chunk(Message, frozen=True, kw_only=True):
    """Bytes of a snapshot."""

    ARRAYS: ClassVar[dict[str, str]] = {"data": "u8"}

    version: Version
    offset: int


class SnapshotGone(Message, frozen=True, kw_only=True):
    """That snapshot was replaced and its lease ran out: pull `latest` instead."""

    latest: Version


class PolicyLoaded(Message, frozen=True, kw_only=True):
    """The engine serves this version from now on. Answered by `Ack`."""

    version: Version
    cell: str
    seconds: Seconds


# --- gyre-train (satellite) <-> gyre-train (core) ----------------------------------------------------------------------------------------


class JoinStep(Message, frozen=True, kw_only=True):
    """A cell asks for the open step's weights. Answered by `StepOffer`, or by `Hold` after `wait_s`. `host` is the kernel's boot id.

    A cell with other `ranks` than the core's is refused: rank meets rank.
    """

    cell: str
    incarnation: str
    host: str
    wait_s: Wait
    ranks: int = 1


class StepOffer(Message, frozen=True, kw_only=True):
    """The weights of the open step, which is number `version.step` + 1: pull their chunks, or map `memory` (a path, "" if on another host)."""

    version: Version
    tensors: list[TensorSpec]
    nbytes: int
    checksum: str  # XXH3-128 of all bytes, hex
    memory: str = ""


class AttendStep(Message, frozen=True, kw_only=True):
    """Nothing is left to claim: this cell waits for the step's end, its accumulator holding exactly `micro_steps`.

    Answered by `ReduceOrder`, `StepEnded`, or `Hold` after `wait_s`; by `Refuse(stale)` under another term. `attempt` is the last reduction in
    which it took part (0: none) and `failed` why that failed for it: so this is the answer to a `ReduceOrder` too. `tally`: sums for metrics.
    """

    term: int
    step: int
    cell: str
    incarnation: str
    micro_steps: list[str]
    tally: list[float]
    wait_s: Wait
    attempt: int = 0
    failed: str = ""
    leaving: bool = False


class ReduceOrder(Message, frozen=True, kw_only=True):
    """Reduce your accumulator to the core (the roster's first), out of place, in the group `group` that meets at `store`, within `deadline_s`."""

    term: int
    step: int
    attempt: int
    hash: str  # of the manifest
    roster: list[Member]
    group: str
    store: str
    deadline_s: float


class StepEnded(Message, frozen=True, kw_only=True):
    """The step is committed: zero the accumulator. `version` is that of the new weights, broadcast to `roster` if it is not empty; else join again.

    `finished`: it was the run's last.
    """

    version: Version
    roster: list[Member]
    group: str = ""
    store: str = ""
    deadline_s: float = 0.0
    finished: bool = False


class Hold(Message, frozen=True, kw_only=True):
    """Nothing for this cell now: claim again, then ask again. `idle`: the step cannot end now, its groups are missing or the core rolls out."""

    waiting_for: str = ""
    idle: bool = False


# --- workers <-> gyre-coord --------------------------------------------------------------------------------------------------------------


class WorkerStatus(Message, frozen=True, kw_only=True):
    """A worker's heartbeat: what it does, with gauges for the live view. Answered by `Ack`."""

    phase: str  # starting | ready | working | draining | failed
    detail: str = ""
    gauges: dict[str, float] = {}
    cell: str = ""  # the cell it belongs to, for engines and trainers
    address: str = ""  # what it listens on
    role: str = ""  # engines: serving | closing | asleep | waking; trainers: idle | joining | training | leaving; "" for others
    epoch: int = 0  # of the newest role command that it has taken up; sandboxes: of the route table; 0: of none
    version: Version | None = None  # engines: what they serve; trainers: the weights they hold


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process as its coordinator knows it: its last `WorkerStatus`, or that it is started again, or how it ended."""

    name: str
    kind: str
    phase: str
    detail: str = ""
    cell: str = ""
    role: str = ""
    gauges: dict[str, float] = {}
    version: Version | None = None


class AskStatus(Message, frozen=True, kw_only=True):
    """An observer asks how the run stands, and for the events after number `after`. Answered by `RunStatus`."""

    after: int = -1


class RunStatus(Message, frozen=True, kw_only=True):
    """What the coordinator knows: all processes, the phase of each cell, the buffer's counters (null: not heard yet), lines of the event log.

    Of the lines it keeps those that a view shows, the last few hundred.
    """

    run_id: str
    processes: list[ProcessStatus]
    cells: dict[str, str]
    counters: Counters | None = None
    lines: list[str] = []


class Stop(Message, frozen=True, kw_only=True):
    """End in order, exit 0."""

    reason: str


class Route(msgspec.Struct, frozen=True, array_like=True):
    """One engine of the route table. `open`: it takes calls. Of two alike the higher `rank` is preferred: it will stay longer."""

    cell: str
    address: str
    rank: int
    open: bool


class Routes(Message, frozen=True, kw_only=True):
    """All engines there are. A gateway takes up the highest `epoch`; the table is advice, an engine alone decides what it admits."""

    epoch: int
    engines: list[Route]


class SetRole(Message, frozen=True, kw_only=True):
    """What a cell is to be. Idempotent by `epoch`, which only grows: a worker takes up the highest and reports it in its status.

    An engine told `train` closes, gives its requests back and sleeps; told `rollout` it wakes, pulls the policy from `core` and serves. A trainer
    told `train` joins the open step (or is the core, where `core_cell` is its own); told `rollout` it takes part in the open step's end if it has
    accumulated, then idles.
    """

    role: str  # train | rollout
    epoch: int
    core: str  # where the core's trainer listens
    core_cell: str


ToBuffer = (
    Hello | Note | LeaseTickets | RenewLeases | GradingStarted | RolloutEnded
    | AcquireTerm | ClaimMicroStep | RenewClaims | Accumulated | SealStep | VoidIncarnations | CommitStep | Published | CheckpointSaved
    | Subscribe | AskRecords
)  # fmt: skip
FromBuffer = (
    Welcome | Refuse | HelloRequired | Ack | Tickets | LeasesRenewed
    | TermGranted | MicroStepClaimed | NothingToClaim | Manifest | Counters | Events | Records
)  # fmt: skip
ToRollout = Hello | Generate | Abort | Ping
FromRollout = Welcome | Refuse | HelloRequired | Generated | EngineRefuse | Pong
ToTrain = Hello | WatchPolicy | PullChunk | PolicyLoaded | JoinStep | AttendStep
FromTrain = Welcome | Refuse | HelloRequired | Ack | PolicyAvailable | Chunk | SnapshotGone | StepOffer | ReduceOrder | StepEnded | Hold
ToCoord = Hello | Note | WorkerStatus | AskStatus
FromCoord = Welcome | Refuse | HelloRequired | Ack | Stop | SetRole | Routes | RunStatus

DIRECTIONS: Final[dict[str, Any]] = {
    "any -> gyre-buffer": ToBuffer,
    "gyre-buffer -> any": FromBuffer,
    "gyre-sandbox -> gyre-rollout": ToRollout,
    "gyre-rollout -> gyre-sandbox": FromRollout,
    "gyre-rollout, gyre-train -> gyre-train": ToTrain,
    "gyre-train -> gyre-rollout, gyre-train": FromTrain,
    "any worker, gyre-top -> gyre-coord": ToCoord,
    "gyre-coord -> any worker, gyre-top": FromCoord,
}
