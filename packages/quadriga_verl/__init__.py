# SPDX-License-Identifier: Apache-2.0
"""Support for users of verl: its command lines and its import paths.

    commands/   translates command lines, shell scripts and YAML files of verl (`quadriga verl`)
    shim/       offers the modules of verl to Python files that import them (`QUADRIGA_VERL=1`)
    cli.py      the command `quadriga verl`

The framework works without this package, and does not import it unless a user asks for it.
"""
