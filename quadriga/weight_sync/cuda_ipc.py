# SPDX-License-Identifier: Apache-2.0
"""A channel to processes that use the same GPU: not the content travels, but a handle of its memory.

Headers go by gloo. A sender waits until all receivers have taken what they need before it overwrites the content.
"""

import base64
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.broadcast import BroadcastReceiver, BroadcastSender

_DEVICE_ARGUMENT = 6
"""Of `rebuild_cuda_tensor`: the number that the receiver's own process gives the GPU."""


class IpcSender:
    """See `SendingEnd`."""

    def __init__(self, host: str, num_receivers: int, device: torch.device) -> None:
        _require_cuda(device)
        self._headers = BroadcastSender(host, num_receivers, torch.device("cpu"))
        self.place = self._headers.place

    def send(self, header: dict[str, Any], content: torch.Tensor | None) -> None:
        """See `SendingEnd.send`."""
        if content is None:
            self._headers.send(header, None)
            return
        torch.cuda.current_stream(content.device).synchronize()
        _, arguments = reduce_tensor(content)
        self._headers.send(header | {"handle": base64.b64encode(pickle.dumps(arguments)).decode()}, None)
        self._headers.meeting.wait_for_all()

    def close(self) -> None:
        """See `SendingEnd.close`."""
        self._headers.close()


class IpcReceiver:
    """See `ReceivingEnd`."""

    def __init__(self, place: str, num_receivers: int, rank: int, device: torch.device) -> None:
        _require_cuda(device)
        self._device = device
        self._headers = BroadcastReceiver(place, num_receivers, rank, torch.device("cpu"))
        self._content: torch.Tensor | None = None

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """See `ReceivingEnd.receive`."""
        if self._content is not None:
            # What was lent is read to the end; only then may the sender write over it.
            torch.cuda.current_stream(self._device).synchronize()
            self._content = None
            self._headers.meeting.wait_for_all()
        header = self._headers.meeting.share_header(None)
        if "handle" in header:
            arguments = list(pickle.loads(base64.b64decode(header.pop("handle"))))
            arguments[_DEVICE_ARGUMENT] = self._device.index or 0
            self._content = rebuild_cuda_tensor(*arguments)
        return header, self._content

    def close(self) -> None:
        """See `ReceivingEnd.close`."""
        self._content = None
        self._headers.close()


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise WeightSyncError(
            "channel cuda_ipc",
            got=f"weights on {device}",
            expected="trainer and rollout on one GPU",
            fix="Let the weights travel by broadcast.",
        )
