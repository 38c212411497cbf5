# SPDX-License-Identifier: Apache-2.0
"""A channel from one process to several by broadcast: gloo for headers and for content on a CPU, nccl on GPUs.

The processes are in no group together: those of the trainer and those of the rollout have each their own, if any. So
this group is made beside torch's default one, from a store of its own.

    rank 0      the trainer's first process; its store is where all meet, at the first send
    rank 1, ... the rollout's processes
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quadriga.errors import WeightSyncError
from quadriga.observe.watchdog import waiting

# The other side may still be generating, or updating.
TIMEOUT = timedelta(minutes=30)


class Meeting:
    """Rank 0 and the receivers, once they have met.

    Args:
        store: where they meet.
        rank, size: number of this process, and how many there are.
        device: of the content.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        with _explained(rank, size, "meeting"), waiting(f"all {size} processes of a channel of weights, here {rank}"):
            self._headers = dist.ProcessGroupGloo(dist.PrefixStore("headers", store), rank, size, TIMEOUT)
            self._contents: Any = self._headers
            if device.type == "cuda":
                torch.cuda.set_device(device)
                self._contents = dist.ProcessGroupNCCL(dist.PrefixStore("contents", store), rank, size, TIMEOUT)

    def share_header(self, header: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's header, in every process."""
        text = b"" if header is None else json.dumps(header).encode()
        length = torch.tensor([len(text)])
        with _explained(self.rank, self.size, "a header"):
            self._headers.broadcast(length, 0).wait()
            content = torch.empty(int(length), dtype=torch.uint8)
            if header is not None:
                content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            self._headers.broadcast(content, 0).wait()
        return json.loads(content.numpy().tobytes())

    def share_content(self, content: torch.Tensor) -> None:
        """Rank 0's content, in place, in every process."""
        with _explained(self.rank, self.size, "a bucket"):
            self._contents.broadcast(content, 0).wait()
            if content.is_cuda:
                torch.cuda.current_stream(content.device).synchronize()

    def wait_for_all(self) -> None:
        """Until every process has come here."""
        with _explained(self.rank, self.size, "a barrier"):
            self._headers.barrier().wait()


@contextmanager
def _explained(rank: int, size: int, what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise WeightSyncError(
            f"channel of weights, process {rank} of {size} in {what}",
            got=str(error).strip().partition("\n")[0],
            expected="the trainer's first process and all of the rollout's",
            fix="Look for the error of another process: this one was only left alone by it.",
        ) from error


class BroadcastSender:
    """See `SendingEnd`."""

    def __init__(self, host: str, num_receivers: int, device: torch.device) -> None:
        self._size, self._device = num_receivers + 1, device
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.place = f"{host} {self._store.port}"
        self._meeting: Meeting | None = None

    @property
    def meeting(self) -> Meeting:
        """With the receivers; the first to ask waits for them."""
        if self._meeting is None:
            self._meeting = Meeting(self._store, 0, self._size, self._device)
        return self._meeting

    def send(self, header: dict[str, Any], content: torch.Tensor | None) -> None:
        """See `SendingEnd.send`."""
        self.meeting.share_header(header)
        if content is not None:
            self.meeting.share_content(content)

    def close(self) -> None:
        """See `SendingEnd.close`."""
        self._meeting = None


class BroadcastReceiver:
    """See `ReceivingEnd`. Its memory for content is that of the largest bucket that has come in this publication."""

    def __init__(self, place: str, num_receivers: int, rank: int, device: torch.device) -> None:
        self._place, self._size, self._rank, self._device = place, num_receivers + 1, rank + 1, device
        self._meeting: Meeting | None = None
        self._buffer: torch.Tensor | None = None

    @property
    def meeting(self) -> Meeting:
        """With the sender and the other receivers; the first to ask waits for them."""
        if self._meeting is None:
            host, port = self._place.split(" ")
            with _explained(self._rank, self._size, f"a connection to {host}, port {port}"):
                store = dist.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
            self._meeting = Meeting(store, self._rank, self._size, self._device)
        return self._meeting

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """See `ReceivingEnd.receive`."""
        header = self.meeting.share_header(None)
        if "num_bytes" not in header:
            self._buffer = None
            return header, None
        # Room for every bucket at once: what was lent may live on while a larger one would be made.
        if self._buffer is None or self._buffer.numel() < header["num_bytes"]:
            self._buffer = torch.empty(header["room_bytes"], dtype=torch.uint8, device=self._device)
        content = self._buffer[: header["num_bytes"]]
        self.meeting.share_content(content)
        return header, content

    def close(self) -> None:
        """See `ReceivingEnd.close`."""
        self._meeting = self._buffer = None
