"""The header that travels with every bucket. 80 bytes, little-endian; docs/protocol.md gives the layout."""

from __future__ import annotations

import struct

import attrs

from weightbus.backend import LANE_KEY_BYTES
from weightbus.errors import RemoteProtocolError

_LAYOUT = struct.Struct("<4sI16s16sQIIQQQ")
MAGIC = b"WB01"
FLAG_DIGEST = 1


@attrs.frozen(kw_only=True)
class Header:
    """What a bucket says of itself.

    Attributes:
        lane_key: secret of the lane, 16 bytes, given over the control plane.
        refit_id: 16 bytes, never reused.
        plan_digest: digest of the plan (or of the page, when paged) that the sender packed by.
        bucket: index within the lane, from 0.
        total: number of buckets of the lane; 0 while it is not known (paged).
        used_bytes: bytes that were sent.
        digest: tree digest of those bytes; meaningful when `verified`.
        verified: False with ``verify="off"``.
    """

    lane_key: bytes
    refit_id: bytes
    plan_digest: int
    bucket: int
    total: int
    used_bytes: int
    digest: int = 0
    verified: bool = True

    def pack(self) -> bytes:
        flags = FLAG_DIGEST if self.verified else 0
        return _LAYOUT.pack(
            MAGIC,
            flags,
            self.lane_key,
            self.refit_id,
            self.plan_digest,
            self.bucket,
            self.total,
            self.used_bytes,
            self.digest,
            0,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises RemoteProtocolError when `data` is not a header."""
        if len(data) != _LAYOUT.size:
            raise RemoteProtocolError(f"a header has {_LAYOUT.size} bytes, this has {len(data)}")
        magic, flags, key, refit, plan, bucket, total, used, digest, _ = _LAYOUT.unpack(data)
        if magic != MAGIC or len(key) != LANE_KEY_BYTES:
            raise RemoteProtocolError("not a weightbus header")
        return cls(
            lane_key=key,
            refit_id=refit,
            plan_digest=plan,
            bucket=bucket,
            total=total,
            used_bytes=used,
            digest=digest,
            verified=bool(flags & FLAG_DIGEST),
        )
