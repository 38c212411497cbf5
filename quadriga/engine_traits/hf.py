# SPDX-License-Identifier: Apache-2.0
"""Traits of the engine on transformers' `generate`: a plain one."""

from quadriga.engine_traits.traits import EngineTraits

TRAITS = EngineTraits()
