# SPDX-License-Identifier: Apache-2.0
"""Support for users of verl: its command lines and its import paths.

    commands/              translates command lines, shell scripts and YAML files of verl
    cli.py                 `quadriga verl`: runs such a command line
    config_translate.py    `quadriga config translate`: prints its configuration
    shim/                  the modules of verl, for Python files that import them (`QUADRIGA_VERL=1`)
    core_algos.py          the algorithms with verl's names and arguments

The framework works without this package, and does not import it unless a user asks for it.
"""
