"""Which of several databases, each with a queue of its own, a key belongs to."""

import hashlib


def shard_of(key: str, shards: int) -> int:
    """Return to which of so many shards a key belongs, from 0, as pgqueue.shard_of() does.

    If their number is doubled, it stays, or moves to its old shard plus the old number.
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % shards
