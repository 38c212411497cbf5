# SPDX-License-Identifier: Apache-2.0
"""When the images of two prompts are the same: in training, in generation, wherever they were read."""

import hashlib
from collections.abc import Mapping

import torch


def images_key(inputs: Mapping[str, torch.Tensor]) -> str:
    """Equal for equal images, and for nothing else: a hash of names, shapes, dtypes and numbers.

    Args:
        inputs: of a prompt's images, as the model takes them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
