# SPDX-License-Identifier: Apache-2.0
"""The door for verl's command lines: they are translated into the configuration here, or answered in a sentence.

    words, `--config-name`        `hydra.py`      Hydra's words and verl's defaults of a version (`defaults.tsv`)
        -> verl's whole tree      `translate.py`  each leaf by the first row of `rules.tsv` that fits it
        -> our keys, notices,     `meaning.py`    functions of values, named in `rules.tsv`
           refusals               `programs.py`   the programs (`programs.tsv`)

The head of `rules.tsv` explains its columns. To add a function, write `def name(line: Line, key: str, value: Any)` into
meaning.py: it calls `line.set`, `line.note` and `line.refuse`, and reads other keys with `line.get`. To add a program,
add a row to programs.tsv; defaults that its recipe changes are rows of defaults.tsv under a tree of the program's name.
"""
