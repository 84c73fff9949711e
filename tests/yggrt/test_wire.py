"""The file container: values come back, and bytes that are wrong in any way give the format's own error."""

import random
import resource
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest

from yggrt import wire
from yggrt.errors import BundleFormatError, PlanFormatError


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    weight: float

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight={self.weight} is negative")


@dataclass(frozen=True, slots=True)
class Record:
    count: int
    ratio: float
    title: str
    blob: bytes
    flag: bool
    note: str | None
    best: Leaf | None
    sizes: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    rows: tuple[tuple[float, ...], ...]
    menu: tuple[int, ...] | None


FORMAT = wire.FileFormat("record", b"YGGTEST\0", 3, 2, PlanFormatError)
RECORD = Record(
    -7, 0.25, "größe", b"\x00\xff", True, None, Leaf("a", 1.5), (1, 2**40), (Leaf("b", 0.0),), ((1.0,), ()), (3,)
)


def as_file(body: bytes, version: int = 3, magic: bytes = b"YGGTEST\0") -> bytes:
    header = struct.pack("<8sIQ", magic, version, len(body))
    return header + struct.pack("<I", zlib.crc32(body, zlib.crc32(header))) + body


def fields(changes: dict[object, object] | None = None) -> dict[object, object]:
    """RECORD's fields as msgpack sees them, with changes; a value of `...` drops the field."""
    data = msgpack.unpackb(wire.encode(FORMAT, RECORD)[24:]) | (changes or {})
    return {name: value for name, value in data.items() if value is not ...}


@pytest.mark.field(35)
def test_a_value_comes_back_equal_and_its_bytes_are_always_the_same():
    data = wire.encode(FORMAT, RECORD)
    assert wire.decode(FORMAT, Record, data) == RECORD
    assert data == wire.encode(FORMAT, wire.decode(FORMAT, Record, data))
    assert data == as_file(msgpack.packb(fields()))


def test_an_integer_in_a_float_field_is_stored_as_a_float():
    data = wire.encode(FORMAT, Leaf("a", 2))
    assert type(wire.decode(FORMAT, Leaf, data).weight) is float


@pytest.mark.parametrize(
    "changes",
    [
        {"count": True},
        {"count": 1.0},
        {"count": None},
        {"count": "1"},
        {"count": 2**64 - 1},
        {"count": []},
        {"count": {}},
        {"count": msgpack.ExtType(4, b"")},
        {"count": msgpack.Timestamp(1, 1)},
        {"ratio": 1},
        {"ratio": float("nan")},
        {"ratio": float("inf")},
        {"ratio": float("-inf")},
        {"title": b"bytes"},
        {"blob": "text"},
        {"flag": 1},
        {"note": 3},
        {"best": [1]},
        {"best": {"name": "a"}},
        {"best": {"name": "a", "weight": 1.0, "other": 1}},
        {"best": {"name": "a", "weight": -1.0}},
        {"sizes": {"0": 1}},
        {"sizes": None},
        {"sizes": [1, 2.0]},
        {"leaves": [None]},
        {"rows": [1.0]},
        {"rows": [[[1.0]]]},
        {"count": ...},
        {"menu": ...},
        {"unknown": 1},
        {3: 1},
        {b"count": 1},
        {None: 1},
    ],
)
def test_a_field_that_is_not_what_the_schema_says_is_refused(changes):
    with pytest.raises(PlanFormatError, match="record is malformed: .") as caught:
        wire.decode(FORMAT, Record, as_file(msgpack.packb(fields(changes))))
    assert "\n" not in str(caught.value)


def test_a_field_given_twice_is_refused():
    body = b"\x83" + 2 * (msgpack.packb("name") + msgpack.packb("x")) + msgpack.packb("weight") + msgpack.packb(1.0)
    with pytest.raises(PlanFormatError, match="Leaf.name is given twice"):
        wire.decode(FORMAT, Leaf, as_file(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x81",
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb(7),
        msgpack.packb({"name": "x", "weight": 1.0}) + b"\xc0",
        b"\x82\xa4name\xa1\xff\xa6weight\xcb" + bytes(8),  # a string that is not UTF-8
        b"\x82\xa4name\xdb\xff\xff\xff\xff",  # a string longer than the file
        b"\x82\xa4name" + b"\x91" * 100_000,  # deep nesting where a string belongs
        b"\x91" * 100_000,
        b"\x81" + b"\x81" * 100_000,
    ],
)
def test_a_body_that_is_not_the_value_is_refused(body):
    with pytest.raises(PlanFormatError, match="malformed"):
        wire.decode(FORMAT, Leaf, as_file(body))


def test_counts_that_the_bytes_do_not_pay_for_allocate_nothing():
    huge_array = b"\xdd\x03\xff\xff\xff"
    head = msgpack.packb(fields({"sizes": []}))
    body = head.replace(msgpack.packb("sizes") + b"\x90", msgpack.packb("sizes") + huge_array) + huge_array * 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    with pytest.raises(PlanFormatError):
        wire.decode(FORMAT, Record, as_file(body))
    assert time.monotonic() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_a_wrong_header_is_refused_and_named():
    data = wire.encode(FORMAT, RECORD)
    for wrong, message in [
        (b"", "truncated: 0 bytes"),
        (data[:23], "truncated"),
        (as_file(b"", magic=b"PK\3\4\0\0\0\0"), "not a record"),
        (as_file(b"", version=1), "format version 1; this runtime reads 2 to 3. Rebuild it or upgrade yggrt"),
        (as_file(b"", version=4), "format version 4"),
        (data[:-1], "bytes after its header instead of"),
        (data + b"\0", "bytes after its header instead of"),
        (struct.pack("<8sIQI", b"YGGTEST\0", 3, 2**60, 0), "at most"),
        (data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
    ]:
        with pytest.raises(PlanFormatError, match=message):
            wire.decode(FORMAT, Record, wrong)


def test_an_older_readable_version_is_read():
    assert wire.decode(FORMAT, Record, as_file(msgpack.packb(fields()), version=2)) == RECORD


def test_random_bytes_behind_a_right_header_give_only_the_formats_error():
    rng = random.Random(0)
    body = msgpack.packb(fields())
    for _ in range(3000):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            value = wire.decode(FORMAT, Record, as_file(bytes(damaged)))
        except PlanFormatError:
            continue
        assert wire.decode(FORMAT, Record, wire.encode(FORMAT, value)) == value


@pytest.mark.parametrize(
    "value",
    [
        Leaf("a", float("inf")),
        Leaf("a", True),
        Leaf(1, 1.0),
        Leaf(None, 1.0),
        Leaf("\ud800", 1.0),
        Leaf("a" * 2**26, 1.0),
    ],
)
def test_a_value_that_could_not_be_read_back_is_not_written(value):
    with pytest.raises(ValueError):
        wire.encode(FORMAT, value)


def test_the_error_class_is_the_formats():
    bundle = wire.FileFormat("bundle", b"YGGTEST\0", 3, 2, BundleFormatError)
    with pytest.raises(BundleFormatError):
        wire.decode(bundle, Leaf, b"x" * 100)


def test_reading_a_file_names_its_path(tmp_path: Path):
    path = tmp_path / "record.ygg"
    with pytest.raises(PlanFormatError, match="cannot read record .*record.ygg: No such file"):
        wire.read_file(FORMAT, Record, path)
    with pytest.raises(PlanFormatError, match="cannot read"):
        wire.read_file(FORMAT, Record, tmp_path)
    path.write_bytes(b"short")
    with pytest.raises(PlanFormatError, match="record.ygg: record is truncated"):
        wire.read_file(FORMAT, Record, path)
    with open(path, "wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(PlanFormatError, match="record.ygg: record has .* bytes; at most"):
        wire.read_file(FORMAT, Record, path)
    path.write_bytes(wire.encode(FORMAT, RECORD))
    assert wire.read_file(FORMAT, Record, path) == RECORD


def test_an_atomic_write_replaces_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "record.ygg"
    wire.write_atomically(path, b"one")
    wire.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wire.write_atomically(path, b"three")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.ygg"]
