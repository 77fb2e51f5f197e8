"""Golden bytes: every message ever sent decodes for ever, and today's encoding is pinned.

After adding a message, or a field with a default: `python tests/wire/test_golden.py` appends its bytes to golden.json; entries are never removed.
"""

from __future__ import annotations

import json
import types
import typing
from array import array
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from gyre.wire import messages
from gyre.wire.arrays import f32, i32
from gyre.wire.codec import Decoder, WireError, encode

GOLDEN = Path(__file__).with_name("golden.json")
ARRAYS = {"i32": i32([7, -1]), "f32": f32([0.5, -0.25]), "i8": array("b", [0, 1]), "u8": memoryview(b"\x00\xff")}


def message_types() -> dict[str, type[messages.Message]]:
    found = {m.__name__: m for union in messages.DIRECTIONS.values() for m in get_args(union)}
    defined = {n for n, c in vars(messages).items() if isinstance(c, type) and issubclass(c, messages.Message) and c is not messages.Message}
    assert defined == set(found), "every message belongs to a direction"
    return found


def sample(t: Any, seed: str) -> Any:
    """A value of a type, different for every field name."""
    n = sum(seed.encode()) % 90 + 1
    if isinstance(t, type) and issubclass(t, msgspec.Struct):
        return t(**{f.name: sample(f.type, f.name) for f in msgspec.structs.fields(t)})
    if isinstance(t, type) and issubclass(t, Enum):
        return list(t)[n % len(t)]
    if get_origin(t) in (types.UnionType, typing.Union, typing.Annotated):
        return sample(get_args(t)[0], seed)
    if get_origin(t) is list:
        return [sample(get_args(t)[0], seed)]
    if get_origin(t) is dict:
        return {seed: sample(get_args(t)[1], seed)}
    return {str: seed, int: n, float: n + 0.5, bool: True, Any: seed}[t]


def load() -> dict[str, list[dict[str, Any]]]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def union_of(cls: type) -> Any:
    return next(u for u in messages.DIRECTIONS.values() if cls in get_args(u))


@pytest.mark.parametrize("name", sorted(message_types()))
def test_golden(name: str) -> None:
    cls = message_types()[name]
    entries = load()[name]
    decoder = Decoder(union_of(cls))
    for entry in entries:
        message, arrays = decoder.decode([bytes.fromhex(h) for h in entry["frames"]])
        assert type(message) is cls
        built = msgspec.to_builtins(message)
        assert {k: built[k] for k in entry["fields"]} == entry["fields"], "an old message reads differently"
        assert {k: list(v) for k, v in arrays.items()} == entry["arrays"]
    assert [bytes(f).hex() for f in encode(message, arrays)] == entries[-1]["frames"], "today's encoding changed: append it"


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x81\xa2op\xa4Nope"], [b"\x81\xa2op\xa9Subscribe"], [b"\xff" * 100]])
def test_garbage_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        Decoder(messages.ToBuffer).decode(frames)


def test_arrays_must_fit() -> None:
    good = messages.Generate(id="1", request_id="r", rollout_id="r", min_version=messages.Version(0, 0), sampling=messages.Sampling(), seed=1)
    frames = encode(good, {"prompt_ids": i32([1, 2])})
    decoder = Decoder(messages.ToRollout)
    assert list(decoder.decode(frames)[1]["prompt_ids"]) == [1, 2]
    for bad in (frames[:1], [*frames, b""], [frames[0], b"\x00\x00\x00"]):
        with pytest.raises(WireError):
            decoder.decode(bad)
    with pytest.raises(TypeError):
        encode(good, {"prompt_ids": f32([1.0])})
    with pytest.raises(TypeError):
        encode(good)


def test_unknown_fields_are_ignored() -> None:
    raw = msgspec.msgpack.encode({"op": "Subscribe", "id": "x", "events": True, "from_the_future": [1, 2]})
    message, _ = Decoder(messages.ToBuffer).decode([raw])
    assert message == messages.Subscribe(id="x", events=True)


if __name__ == "__main__":
    book = load()
    for name, cls in sorted(message_types().items()):
        message = sample(cls, name)
        arrays = {n: ARRAYS[t] for n, t in cls.ARRAYS.items()}
        frames = [bytes(f).hex() for f in encode(message, arrays)]
        if not book.get(name) or book[name][-1]["frames"] != frames:
            entry = {"frames": frames, "fields": msgspec.to_builtins(message), "arrays": {n: list(a) for n, a in arrays.items()}}
            book.setdefault(name, []).append(entry)
            print("appended", name)
    GOLDEN.write_text(json.dumps(book, indent=1) + "\n")
