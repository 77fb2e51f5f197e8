"""Records as bytes: JSON lines, MessagePack maps one behind the other, Parquet, ATIF documents as JSON lines.

A sink takes records in order and holds at most one row group of them (Parquet). What a record of a kind is, is read.py's business.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from gyre.report import atif
from gyre.report.conversation import Conversations
from gyre.report.read import Record, RunReader

_ROWS: Final = 256
_TOKENS: Final = 1 << 20  # in a row group


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Lines:
    """Each record as bytes of its own."""

    def __init__(self, out: BinaryIO, encode: Callable[[Record], bytes]) -> None:
        self._out, self._encode = out, encode

    def write(self, record: Record) -> None:
        self._out.write(self._encode(record))

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Executions:
    """ATIF: the documents of an execution together, as JSON lines, once all its trajectories are there."""

    def __init__(self, out: BinaryIO, conversations: Conversations, parse: atif.Parse) -> None:
        self._out, self._conversations, self._parse = out, conversations, parse
        self._records: list[Record] = []

    def write(self, record: Record) -> None:
        if self._records and self._records[0]["rollout_id"] != record["rollout_id"]:
            self.close()
        self._records.append(record)
        if len(self._records) == record["n_trajectories"]:
            self.close()

    def close(self) -> None:
        for document in atif.documents(self._conversations, self._parse, self._records):
            self._out.write(msgspec.json.encode(document) + b"\n")
        self._records = []

    def abandon(self) -> None:
        self._records = []


class Count:
    """How many there are, at the end."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._n = out, 0

    def write(self, record: Record) -> None:
        self._n += 1

    def close(self) -> None:
        self._out.write(f"{self._n}\n".encode())

    def abandon(self) -> None:
        pass


class Parquet:
    """A column for each field. Types go by a field's name where a value may be null, so files of one kind have one schema; what has no plain type
    (objects of any keys) is JSON text. The file is complete once it is closed. Needs pyarrow."""

    def __init__(self, out: BinaryIO) -> None:
        import pyarrow
        import pyarrow.parquet

        self._pa: Any = pyarrow
        self._pq: Any = pyarrow.parquet
        self._out = out
        self._schema: Any = None
        self._file: Any = None
        self._rows: list[Record] = []
        self._tokens = 0

    def write(self, record: Record) -> None:
        if self._schema is None:
            self._schema = self._pa.schema([(name, self._type(name, value)) for name, value in record.items()])
        self._rows.append({f.name: self._cell(record.get(f.name), f.type) for f in self._schema})
        self._tokens += sum(len(v) for v in record.values() if isinstance(v, list))
        if len(self._rows) == _ROWS or self._tokens >= _TOKENS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def abandon(self) -> None:
        """Nobody reads it any more. Else the end would be written when the writer is collected."""
        if self._file is not None:
            self._file.is_open = False

    def _flush(self) -> None:
        schema = self._schema or self._pa.schema([])
        if self._file is None:
            self._file = self._pq.ParquetWriter(self._out, schema, compression="zstd")
        if self._rows:
            self._file.write_table(self._pa.Table.from_pylist(self._rows, schema=schema))
        self._rows, self._tokens = [], 0

    def _type(self, name: str, value: Any) -> Any:
        pa = self._pa
        match value:
            case _ if name in _LISTS:
                return pa.list_(getattr(pa, _LISTS[name])())
            case bool():
                return pa.bool_()
            case _ if name in _INTEGERS or isinstance(value, int):
                return pa.int64()
            case _ if name in _NUMBERS or isinstance(value, float):
                return pa.float64()
        return pa.string()

    def _cell(self, value: Any, kind: Any) -> Any:
        if kind == self._pa.string() and not isinstance(value, str | None):
            return msgspec.json.encode(value).decode()
        return value


_LISTS: Final = {"token_ids": "int32", "prompt_ids": "int32", "loss_mask": "int8", "logprobs": "float32", "versions": "int32", "cells": "string",
                 "groups": "string"}  # fmt: skip
_INTEGERS: Final = {"step", "version_at_consumption", "staleness", "harness_exit", "version_min", "version_max"}
_NUMBERS: Final = {"reward", "advantage", "reward_mean", "staleness_interpolated"}


def of_form(form: str, reader: RunReader | None, parse: atif.Parse) -> Callable[[BinaryIO], Sink]:
    """The sink of a format, "count" among them, for a file to be opened. `parse` gives ATIF its tool calls. Raises `UsageError`."""
    match form:
        case "parquet":
            return Parquet
        case "count":
            return Count
        case "msgpack":
            return partial(Lines, encode=msgspec.msgpack.encode)
        case "atif":
            assert reader is not None
            return partial(Executions, conversations=reader.conversations, parse=parse)
    return partial(Lines, encode=lambda r: msgspec.json.encode(r) + b"\n")
