"""The container of `plan.ygg` and `bundle.ygg`: a checked header and a strictly decoded msgpack body.

Layout, little-endian: magic (8 bytes), format version (u32), body length in bytes (u64), CRC-32 of those three and the
body (u32), body. The body is the msgpack map of one frozen dataclass: field name to value, fields in declaration order,
nested dataclasses as maps, tuples as arrays, so that equal values always give equal bytes.

Invariant: whatever the bytes are, decoding gives a value that passed its class's own validation or raises the format's
error. The reader follows the annotations, never the data: it cannot recurse deeper than the classes do, and it
allocates nothing that the bytes at hand do not pay for. Floats must be finite, in both directions. Nothing is executed.
"""

import dataclasses
import functools
import math
import os
import secrets
import struct
import types
import typing
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgpack

from yggrt.errors import YggError

MAX_BODY_BYTES = 64 * 1024 * 1024

_HEADER = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<I")
_PREFIX_BYTES = _HEADER.size + _CHECKSUM.size
_SCALARS: tuple[type, ...] = (bool, int, float, str, bytes)
_NIL = b"\xc0"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileFormat:
    """What tells one kind of file from another.

    noun:  how messages call the file, such as "plan".
    error: raised for everything that is wrong with the bytes.
    """

    noun: str
    magic: bytes
    version: int
    oldest_readable_version: int
    error: type[YggError]

    def __post_init__(self) -> None:
        if len(self.magic) != 8:
            raise ValueError(f"magic must have 8 bytes, not {len(self.magic)}")


def encode(file_format: FileFormat, value: object) -> bytes:
    """The bytes of a dataclass instance; equal values give equal bytes.

    Raises ValueError where a field does not hold what its annotation says, or the body passes MAX_BODY_BYTES.
    """
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    _write(packer, type(value), value, type(value).__name__)
    body: bytes = packer.bytes()
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{file_format.noun} of {len(body)} bytes exceeds the format's {MAX_BODY_BYTES}")
    header = _HEADER.pack(file_format.magic, file_format.version, len(body))
    return header + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header))) + body


def decode(file_format: FileFormat, cls: type[T], data: bytes) -> T:
    """The dataclass instance whose bytes are `data`; anything malformed raises the format's error."""
    body = _checked_body(file_format, data)
    reader = _Reader(body)
    try:
        value = reader.read(cls, cls.__name__)
        if reader.num_bytes_left():
            raise ValueError(f"{reader.num_bytes_left()} bytes follow the last field")
    except (ValueError, ArithmeticError, msgpack.UnpackException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise file_format.error(f"{file_format.noun} is malformed: {reason}") from None
    return typing.cast(T, value)


def read_file(file_format: FileFormat, cls: type[T], path: Path) -> T:
    """Decode a file; its size is checked before it is read. Raises the format's error, which names the path."""
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > _PREFIX_BYTES + MAX_BODY_BYTES:
                raise file_format.error(f"{file_format.noun} has {num_bytes} bytes; at most {MAX_BODY_BYTES} are read")
            data = file.read(_PREFIX_BYTES + MAX_BODY_BYTES + 1)
    except OSError as error:
        raise file_format.error(f"cannot read {file_format.noun} {path}: {error.strerror or error}") from None
    except YggError as error:
        raise file_format.error(f"{path}: {error}") from None
    try:
        return decode(file_format, cls, data)
    except YggError as error:
        raise file_format.error(f"{path}: {error}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that any reader, at any time and after a crash, finds the old content or the new one.

    Raises OSError; then the old content is untouched and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)


def _checked_body(file_format: FileFormat, data: bytes) -> bytes:
    noun, error = file_format.noun, file_format.error
    if len(data) < _PREFIX_BYTES:
        raise error(f"{noun} is truncated: {len(data)} bytes, the header alone has {_PREFIX_BYTES}")
    magic, version, length = _HEADER.unpack_from(data)
    if magic != file_format.magic:
        raise error(f"not a {noun}: it starts with {magic!r} instead of {file_format.magic!r}")
    if not file_format.oldest_readable_version <= version <= file_format.version:
        raise error(
            f"{noun} has format version {version}; this runtime reads {file_format.oldest_readable_version} to "
            f"{file_format.version}. Rebuild it or upgrade yggrt."
        )
    if length > MAX_BODY_BYTES:
        raise error(f"{noun} claims a body of {length} bytes; at most {MAX_BODY_BYTES} are read")
    if len(data) != _PREFIX_BYTES + length:
        raise error(f"{noun} has {len(data) - _PREFIX_BYTES} bytes after its header instead of {length}")
    body = data[_PREFIX_BYTES:]
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if zlib.crc32(body, zlib.crc32(data[: _HEADER.size])) != checksum:
        raise error(f"{noun} is damaged: its checksum does not match. Copy or build it again.")
    return body


@functools.cache
def _field_types(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _optional(annotation: object) -> object:
    """The X of `X | None`; anything else but that union is a mistake in a schema."""
    members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    if len(members) != 1 or len(typing.get_args(annotation)) != 2:
        raise TypeError(f"{annotation} is not a field type of the wire format; unions are X | None")
    return members[0]


def _element(annotation: object) -> object:
    arguments = typing.get_args(annotation)
    if len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise TypeError(f"{annotation} is not a field type of the wire format; tuples are tuple[X, ...]")
    return arguments[0]


def _write(packer: msgpack.Packer, annotation: object, value: object, where: str) -> None:
    origin = typing.get_origin(annotation)
    if origin is types.UnionType or origin is typing.Union:
        if value is None:
            packer.pack(None)
        else:
            _write(packer, _optional(annotation), value, where)
    elif origin is tuple:
        element = _element(annotation)
        if not isinstance(value, tuple):
            raise ValueError(f"{where} is a {type(value).__name__} instead of a tuple")
        packer.pack_array_header(len(value))
        for index, item in enumerate(value):
            _write(packer, element, item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if type(value) is not annotation:
            raise ValueError(f"{where} is a {type(value).__name__} instead of a {annotation.__name__}")
        fields = _field_types(annotation)
        packer.pack_map_header(len(fields))
        for name, field_type in fields.items():
            packer.pack(name)
            _write(packer, field_type, getattr(value, name), f"{where}.{name}")
    else:
        if annotation is float and type(value) is int:
            value = float(value)
        packer.pack(_checked_scalar(annotation, value, where))


class _Reader:
    """Reads one value of an annotated type from a body; wrong types and counts raise ValueError."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        # A scalar is read with every container refused, so that nothing nested is ever built behind the schema's back.
        self._unpacker = msgpack.Unpacker(
            None, raw=False, max_buffer_size=max(1, len(body)), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        self._unpacker.feed(body)

    def num_bytes_left(self) -> int:
        return len(self._body) - int(self._unpacker.tell())

    def read(self, annotation: object, where: str) -> object:
        origin = typing.get_origin(annotation)
        if origin is types.UnionType or origin is typing.Union:
            offset = int(self._unpacker.tell())
            if self._body[offset : offset + 1] == _NIL:
                return self._unpacker.unpack()
            return self.read(_optional(annotation), where)
        if origin is tuple:
            element = _element(annotation)
            count = self._count(self._unpacker.read_array_header(), where)
            return tuple([self.read(element, f"{where}[{index}]") for index in range(count)])
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            return self._read_dataclass(annotation, where)
        return _checked_scalar(annotation, self._unpacker.unpack(), where)

    def _read_dataclass(self, cls: type, where: str) -> object:
        fields = _field_types(cls)
        values: dict[str, object] = {}
        for _ in range(self._count(self._unpacker.read_map_header(), where)):
            name = self._unpacker.unpack()
            if not isinstance(name, str) or name not in fields:
                raise ValueError(f"{where} has an unknown field {name!r:.80}")
            if name in values:
                raise ValueError(f"{where}.{name} is given twice")
            values[name] = self.read(fields[name], f"{where}.{name}")
        missing = [name for name in fields if name not in values]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}")
        return cls(**values)

    def _count(self, count: int, where: str) -> int:
        if count > self.num_bytes_left():  # every element takes a byte at least
            raise ValueError(f"{where} claims {count} elements, more than the bytes left")
        return count


def _checked_scalar(annotation: object, value: object, where: str) -> object:
    if not isinstance(annotation, type) or annotation not in _SCALARS:
        raise TypeError(f"{annotation} is not a field type of the wire format")
    if type(value) is not annotation:
        raise ValueError(f"{where} is a {type(value).__name__} instead of {annotation.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}; only finite numbers are stored")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is {value}, which is not a 64-bit integer")
    return value
