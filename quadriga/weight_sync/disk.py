# SPDX-License-Identifier: Apache-2.0
"""A channel through files, for rollouts that no network of the trainer's reaches: a folder that both can.

    FOLDER/weights-8f3c.../
      3-0.json      third publication: header of its first parcel, written last and moved into place
      3-0.bytes     the content, if it has any
      3-1.json ...

Files of a publication are deleted when the next one begins: by then every receiver has told the driver that it is done.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.errors import WeightSyncError
from quadriga.observe.watchdog import waiting

LOOK_S = 0.02
TIMEOUT_S = 1800.0


class DiskSender:
    """See `SendingEnd`."""

    def __init__(self, folder: str, num_receivers: int, device: torch.device) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.place = tempfile.mkdtemp(prefix="weights-", dir=Path(folder).absolute())
        except OSError as error:
            raise _no_folder(folder, error) from error
        self._publication, self._number = 0, 0

    def send(self, header: dict[str, Any], content: torch.Tensor | None) -> None:
        """See `SendingEnd.send`."""
        if self._number == 0:
            self._delete()
        path = Path(self.place) / f"{self._publication}-{self._number}"
        try:
            if content is not None:
                content.cpu().numpy().tofile(path.with_suffix(".bytes"))
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(header), encoding="utf-8")
            unfinished.rename(path.with_suffix(".json"))
        except OSError as error:
            raise _no_folder(self.place, error) from error
        self._publication, self._number = _after(header, self._publication, self._number)

    def close(self) -> None:
        """See `SendingEnd.close`: nothing of it stays on disk."""
        self._delete()
        Path(self.place).rmdir()

    def _delete(self) -> None:
        for path in Path(self.place).iterdir():
            path.unlink()


class DiskReceiver:
    """See `ReceivingEnd`."""

    def __init__(self, place: str, num_receivers: int, rank: int, device: torch.device) -> None:
        self._place, self._device = Path(place), device
        self._publication, self._number = 0, 0

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """See `ReceivingEnd.receive`."""
        path = self._place / f"{self._publication}-{self._number}"
        _await(path.with_suffix(".json"))
        try:
            header = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            content = None
            if "num_bytes" in header:
                content = torch.from_numpy(np.fromfile(path.with_suffix(".bytes"), dtype=np.uint8)).to(self._device)
        except OSError as error:
            raise _no_folder(str(self._place), error) from error
        self._publication, self._number = _after(header, self._publication, self._number)
        return header, content

    def close(self) -> None:
        """See `ReceivingEnd.close`: the sender deletes the files."""


def _after(header: dict[str, Any], publication: int, number: int) -> tuple[int, int]:
    return (publication, number + 1) if "num_bytes" in header else (publication + 1, 0)


def _await(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    with waiting(f"weights of the trainer in {path}"):
        while not path.exists():
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weights in {path.parent}",
                    got=f"no {path.name} in {TIMEOUT_S:g} s",
                    expected="what the trainer writes",
                    fix="The folder must be one that the trainer and the rollout both see.",
                )
            time.sleep(LOOK_S)


def _no_folder(folder: str, error: OSError) -> WeightSyncError:
    return WeightSyncError(
        f"weights in {folder}",
        got=f"{type(error).__name__}: {error.strerror}",
        expected="a folder that the trainer can write to and the rollout can read",
        fix="It must be on a disk that both see, with room for all weights.",
    )
