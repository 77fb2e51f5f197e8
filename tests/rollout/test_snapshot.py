"""Weights as bytes, and the store that lends them (pains 7: weights deleted while being read)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gyre.types import Version
from gyre.weights.snapshot import Gone, Snapshot, SnapshotStore, checksum_of, install, model_tensors, pack, unpack

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def snapshot(version: Version, nbytes: int = 100) -> Snapshot:
    data = bytes([version.step]) * nbytes
    return Snapshot(version, [], memoryview(data), checksum_of(data))


def step_of(read: memoryview | Gone) -> int | Gone:
    """Which version's bytes these are; they must be one version's."""
    if isinstance(read, Gone):
        return read
    (step,) = set(read)
    return step


def test_tensors_come_back_as_they_were() -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3).t(),  # not contiguous
        "b": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    s = pack(V1, tensors)
    assert [(t.name, t.dtype, t.shape) for t in s.tensors] == [
        ("a", "F32", [3, 2]), ("b", "BF16", [2]), ("scalar", "I64", []), ("none", "F32", [0, 4]), ("flags", "BOOL", [3]),
    ]  # fmt: skip
    assert all(t.offset % 64 == 0 for t in s.tensors) and s.checksum == checksum_of(s.data) and s.data.readonly
    for data in (s.data, bytearray(s.data)):
        back = unpack(s.tensors, data)
        assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)


def test_a_snapshot_does_not_follow_the_model(kit: Any) -> None:
    model = kit.qwen3(0)
    s = pack(V1, model_tensors(model))
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    assert unpack(s.tensors, s.data)["model.embed_tokens.weight"].abs().sum() > 0
    assert checksum_of(s.data) == s.checksum


def test_a_tied_model_is_stored_once_and_tied_again(kit: Any) -> None:
    source, target = kit.qwen3(1), kit.qwen3(2)
    tensors = model_tensors(source)
    assert tensors.keys() == source.state_dict().keys() - {"lm_head.weight"}
    s = pack(V1, tensors)
    install(target, unpack(s.tensors, s.data))
    assert target.lm_head.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True))


def test_nothing_published_is_gone_without_a_latest() -> None:
    assert SnapshotStore().read(0, "r", V1, 0, 1) == Gone(None)


@pytest.mark.pain(7)
def test_the_latest_is_for_all_and_the_one_before_for_those_who_read_it() -> None:
    store = SnapshotStore(lease_ttl_s=10)
    store.publish(0, snapshot(V1))
    assert step_of(store.read(0, "slow", V1, 0, 50)) == 1
    store.publish(1, snapshot(V2))
    assert store.held == [V2, V1]
    assert step_of(store.read(2, "slow", V1, 50, 50)) == 1  # the slow reader finishes
    assert step_of(store.read(2, "new", V2, 0, 100)) == 2
    assert store.read(2, "new", V1, 0, 1) == Gone(V2)  # without a lease, what was replaced is gone
    store.release(3, "slow", V1)
    assert store.held == [V2]


def test_a_lease_that_runs_out_is_told_so() -> None:
    store = SnapshotStore(lease_ttl_s=10)
    store.publish(0, snapshot(V1))
    store.lease(0, "slow", V1)
    store.publish(1, snapshot(V2))
    assert step_of(store.read(9, "slow", V1, 0, 1)) == 1  # renews: until 19
    assert step_of(store.read(18, "slow", V1, 0, 1)) == 1
    assert store.read(28, "slow", V1, 0, 1) == Gone(V2)
    store.expire(28)
    assert store.held == [V2]


def test_without_readers_one_snapshot_is_held() -> None:
    store = SnapshotStore()
    for version in (V1, V2, V3):
        store.publish(0, snapshot(version))
        assert store.held == [version]


@pytest.mark.pain(7)
def test_at_most_two_are_held_and_bytes_lent_stay_whole() -> None:
    store = SnapshotStore(lease_ttl_s=1000)
    store.publish(0, snapshot(V1))
    lent = store.read(0, "slow", V1, 0, 100)
    store.publish(1, snapshot(V2))
    store.lease(1, "other", V2)
    store.publish(2, snapshot(V3))
    assert store.held == [V3, V2]
    assert store.read(2, "slow", V1, 0, 1) == Gone(V3)  # although its lease lasts: memory is bounded
    assert step_of(lent) == 1  # what was on its way to the slow reader is not torn


def test_versions_only_grow_and_a_new_term_is_newer() -> None:
    store = SnapshotStore()
    store.publish(0, snapshot(V3))
    with pytest.raises(ValueError, match="not newer"):
        store.publish(0, snapshot(V2))
    store.publish(0, snapshot(Version(2, 1)))
    assert store.latest is not None and store.latest.version == Version(2, 1)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (0, 101), (100, 1), (5, -1)])
def test_bytes_outside_are_an_error(offset: int, nbytes: int) -> None:
    store = SnapshotStore()
    store.publish(0, snapshot(V1))
    with pytest.raises(ValueError, match="of a snapshot of 100"):
        store.read(0, "r", V1, offset, nbytes)
