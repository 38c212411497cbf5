# SPDX-License-Identifier: Apache-2.0
"""Our own generation engine, on the trainer's own module."""

from quadriga.rollout.native.engine import NativeEngine
