# SPDX-License-Identifier: Apache-2.0
"""The door for verl's command lines: they are translated into the configuration here, or answered in a sentence.

    words, `--config-name`        `hydra.py`      Hydra's words and verl's defaults of a version (`defaults.tsv`)
        -> verl's whole tree      `translate.py`  each leaf by the first row of `rules.tsv` that fits it
        -> our keys, notices,     `meaning.py`    functions of values, named in `rules.tsv`
           refusals               `programs.py`   the programs (`programs.tsv`)

A row of `rules.tsv` says what becomes of the keys that fit a pattern. Its columns:

    trees      whose keys: names of trees of defaults.tsv (`ppo` stands for every program on that loop), or *
    pattern    * is any part of a dotted key, <engine> and the like several sections at once (`SECTIONS`)
    becomes    > KEY       the key of this name, in verl's words or ours; * is what * was in the pattern
               @ NAME      what the function NAME of meaning.py makes of it
               any         nothing, whatever the value is; not of a key that is one of ours
               note        nothing, of a key that is one of ours too
               a list      nothing, where the value is one of these (in JSON); other values are refused
               stop LIST   the same; for other values the sentence is all that is said of the line
               given       the key itself, where the user gave it
               unlike      nothing by itself: a notice where the user gave the key another value than the default, and
                           other keys have one of the values that stand here in JSON
    sentence   why a run's numbers stay the same without it; of values that are refused, why, and what to use

A key without a row that is one of ours is taken as it is. verl's own default never leads to a notice.

To add a function, write `def name(line: Line, key: str, value: Any)` into meaning.py: it calls `line.set`, `line.note`
and `line.refuse`, and reads other keys with `line.get`. To add a program, add a row to programs.tsv;
defaults that its recipe changes are rows of defaults.tsv under a tree of the program's name.
"""
