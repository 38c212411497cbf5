# SPDX-License-Identifier: Apache-2.0
"""Translation of verl's command lines into configurations of this framework.

    shell.py        finds the command lines of a shell script, without running it
    hydra.py        reads Hydra's words, YAML files and references, and verl's defaults (defaults.tsv)
    tables.py       reads the tables (*.tsv)
    entries.py      verl's programs (programs.tsv)
    translate.py    the steps of a translation
    line.py         the state of a translation, and what becomes of a key
    rules.py        reads rules.tsv, which says what becomes of each key
    meaning.py      functions that rules.tsv names, for the RL trainers
    programs.py     functions that rules.tsv names, for single programs and features

To translate one more key, add a row to rules.tsv, whose head explains the columns. If its value
needs thought, write a function under `@rule_function` in meaning.py. To add a program, add a row to
programs.tsv; defaults that differ from those of its tree are rows of defaults.tsv under its name.
"""
