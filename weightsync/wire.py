"""Control messages as bytes: a checksum, then msgpack of a known type. No pickle, and nothing is allocated by what a
message claims about itself."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from weightsync.errors import TransportError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 256 << 20
_CHECKSUM_BYTES = 8

_encode = msgspec.msgpack.Encoder().encode


def pack(message: msgspec.Struct) -> bytes:
    """*message* as bytes that `unpack` checks."""
    body = _encode(message)
    return xxhash.xxh3_64_digest(body) + body


def unpack(payload: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The message in *payload*.

    Raises:
        TransportError: it is too large, damaged, or no message that *decoder* knows.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise TransportError(f"a message of {len(payload)} bytes came, at most {MAX_MESSAGE_BYTES} are taken")
    view = memoryview(payload)
    checksum, body = view[:_CHECKSUM_BYTES], view[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != checksum:
        raise TransportError(f"a message of {len(payload)} bytes came damaged: its checksum does not fit")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"a malformed message came: {error}") from error
