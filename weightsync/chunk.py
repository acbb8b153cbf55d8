"""A chunk: what one send carries, some bytes and what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from weightsync.digest import digest_bytes
from weightsync.manifest import Manifest

ALIGNMENT_BYTES = 64


def aligned(nbytes: int) -> int:
    """*nbytes* rounded up to the alignment at which tensors are packed."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A run of one tensor's row-major bytes inside a chunk's payload.

    A tensor usually is one piece (`start` 0); one larger than a bucket is several, in several chunks.
    """

    name: str
    start: int
    """First byte, counted within the tensor."""
    nbytes: int
    offset: int
    """Where the bytes lie in the payload."""
    digest: int | None = None
    """xxh3_64 of the bytes as the sender wrote them; None where digests are off."""


def _nothing() -> None: ...


@dataclass(slots=True)
class WeightChunk:
    """Pieces of tensors and the memory that holds them, on loan from a transport.

    The payload may be read until `release` is called, and must be released exactly once.
    """

    version: int
    manifest_digest: str
    pieces: tuple[Piece, ...]
    payload: torch.Tensor
    """1-D uint8, in CPU memory."""
    stable: bool = False
    """True: the bytes stay in place until the update ends, so they may be used where they lie (zero copies)."""
    sender: int = 0
    release: Callable[[], None] = field(default=_nothing, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors of which this chunk carries a part, in payload order."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        version: int,
        manifest: Manifest,
        digest: bool = True,
    ) -> WeightChunk:
        """Pack whole tensors into one chunk that owns its bytes.

        For receivers that are fed by hand; transports fill buckets instead. The tensors need not fit
        the manifest: what does not is for the receiver to refuse.
        """
        pieces: list[Piece] = []
        parts: list[torch.Tensor] = []
        offset = 0
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            data = as_bytes(tensor.detach().cpu())
            pieces.append(Piece(name, 0, data.numel(), offset, digest_bytes(data) if digest else None))
            padding = -data.numel() % ALIGNMENT_BYTES
            parts += [data, torch.zeros(padding, dtype=torch.uint8)]
            offset += data.numel() + padding
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return cls(version, manifest.digest, tuple(pieces), payload)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's row-major bytes as 1-D uint8: a view where it is contiguous, else a copy."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that lies in *data* (1-D uint8, aligned for *dtype*); a view."""
    if data.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=data.device)
    return data.view(dtype).reshape(shape)
