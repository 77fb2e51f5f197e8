"""Who may say what: the kinds of process, and which messages each server takes from each of them.

A server refuses, and counts, what is not in `MAY`, with keys and without. With keys a process's kind is that of its key (gyre/net/keys.py), so
that a sandbox cannot commit steps and an engine cannot publish. The kinds are as fine as it gets: all gyre-train of a run may do the same.
"""

from __future__ import annotations

from typing import Any, Final

from gyre.wire import messages as w

KINDS: Final = ("buffer", "sandbox", "rollout", "train", "coord", "observer")
"""`observer` reads: dumps and live views that follow a running buffer."""

ANSWERED_BY: Final[dict[Any, str]] = {w.FromBuffer: "buffer", w.FromRollout: "rollout", w.FromTrain: "train", w.FromCoord: "coord"}
"""The kind of process whose answers a union is."""

_WORKER = w.Note | w.WorkerStatus

MAY: Final[dict[str, dict[str, Any]]] = {
    "buffer": {
        "sandbox": w.LeaseTickets | w.RenewLeases | w.GradingStarted | w.RolloutEnded | w.Note,
        "train": w.AcquireTerm | w.ClaimMicroStep | w.RenewClaims | w.Accumulated | w.SealStep | w.VoidIncarnations | w.CommitStep
        | w.Published | w.CheckpointSaved | w.Subscribe | w.Note,
        "coord": w.Subscribe | w.Note,
        "observer": w.Subscribe | w.AskRecords,
    },
    "rollout": {"sandbox": w.Generate | w.Abort | w.Ping, "observer": w.Ping},
    "train": {
        "rollout": w.WatchPolicy | w.PullChunk | w.PolicyLoaded,
        "train": w.WatchPolicy | w.PullChunk | w.PolicyLoaded | w.JoinStep | w.AttendStep,
    },
    "coord": {**dict.fromkeys(("buffer", "sandbox", "rollout", "train"), _WORKER), "observer": w.AskStatus},
}  # fmt: skip
"""Server, client: the messages, hellos aside."""


def may(server: str, client: str, message: w.Message) -> bool:
    """Does a server of this kind take this message from that kind of client?"""
    allowed = MAY.get(server, {}).get(client)
    return allowed is not None and isinstance(message, allowed)
