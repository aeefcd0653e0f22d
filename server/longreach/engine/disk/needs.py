"""Which settings the disk tier needs beside its own."""

from __future__ import annotations


def check_disk(folder: object, disk_bytes: int, host_bytes: int) -> None:
    """See that the settings of the disk tier go together: its `folder` or None, and bytes on disk and in host memory.

    Raises:
        ValueError: they do not; the message names the cure.
    """
    if folder is None:
        if disk_bytes:
            raise ValueError("--kv-disk-bytes bounds the folder of --kv-disk; name that, too")
        return
    if not disk_bytes:
        raise ValueError("--kv-disk: say how many bytes the folder may have, with --kv-disk-bytes 100GiB")
    if not host_bytes:
        raise ValueError(
            "--kv-disk: entries pass through host memory; give --kv-offload-bytes, best as much as the longest "
            "document takes in the KV cache"
        )
