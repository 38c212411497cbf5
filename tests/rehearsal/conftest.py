# SPDX-License-Identifier: Apache-2.0
"""The runs of tests/e2e."""

from tests.e2e.conftest import arguments, home, judges, metric_lines, train

__all__ = ["arguments", "home", "judges", "metric_lines", "train"]
