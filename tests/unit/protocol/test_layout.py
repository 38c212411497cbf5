# SPDX-License-Identifier: Apache-2.0
"""How a DataProto describes itself."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from quadriga.protocol import DataProto, object_array


def test_data_info_of_every_store() -> None:
    nested = TensorDict({"pixels": torch.ones(2, 3)}, batch_size=[2])
    data = DataProto(
        TensorDict({"image": nested, "x": torch.ones(2, dtype=torch.bfloat16)}, batch_size=[2]),
        {"rate": np.ones((2, 4))},
        {"step": 1},
    )
    assert data.get_data_info() == "\n".join(
        [
            "batch",
            "  image",
            "    pixels: (2, 3) (torch.float32) cpu",
            "  x: (2,) (torch.bfloat16) cpu",
            "non_tensor_batch",
            "  rate: ndarray(2, 4) (float64)",
            "meta_info",
            "  step: int",
        ]
    )
    assert DataProto().get_data_info() == "batch\nnon_tensor_batch\nmeta_info"


def test_repr_is_one_line() -> None:
    data = DataProto.from_dict({"x": torch.ones(2, 3)}, {"uid": ["a", "b"]}, {"step": 1})
    assert repr(data) == "DataProto(2 rows, x (2, 3) float32, uid (2,) object; meta_info: step)"


def test_print_size_counts_shared_objects_once(capsys: pytest.CaptureFixture[str]) -> None:
    image = {"pixels": torch.zeros(1 << 18)}
    data = DataProto.from_dict({"x": torch.ones(1 << 18)}, {"image": object_array([image] * (1 << 18))})
    data.print_size("rollout")
    printed = capsys.readouterr().out
    # 2 MiB of pointers and 1 MiB of pixels, which all rows share.
    assert printed.startswith("rollout: tensors 1 MiB, arrays 3") and printed.endswith("MiB\n")
