# SPDX-License-Identifier: Apache-2.0
"""What single tasks need, outside the framework: their rows (`tasks`), and a playground on which every recipe runs.

`quadriga prepare data` and `quadriga prepare playground` call `tasks.prepare_data` and `playground.prepare_playground`.
"""
