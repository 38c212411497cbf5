# SPDX-License-Identifier: Apache-2.0
"""Prepare inputs of runs: data sets, model folders, and a playground on which every recipe runs.

`quadriga prepare data`, `prepare model` and `prepare playground` call `tasks.prepare_data`,
`model_folder.prepare_model` and `playground.prepare_playground`. The framework does not depend on
this package.
"""
