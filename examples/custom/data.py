# SPDX-License-Identifier: Apache-2.0
"""Data of your own: rows with a prompt and what the reward needs. Usage: python data.py FOLDER"""

import json
import sys
from pathlib import Path

TRAIN = (
    "ant bear cat dog eagle fox goat horse jaguar koala lion mouse newt owl pig rabbit tiger wolf"
)
HELD_OUT = "ape bat cow deer elephant frog giraffe hamster lemur monkey otter panda raven turtle"
WORDINGS = ("Describe the {}", "Praise the {}", "Tell the tale of the {}")


def make_row(wording: str, animal: str) -> dict:
    """A prompt about an animal; the ground truth is the letter that its name begins with."""
    letter = animal[0]
    text = f"{wording.format(animal)} in words that begin with {letter.upper()}."
    return {
        "data_source": "alliteration",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": letter},
    }


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, animals in (("train", TRAIN), ("val", HELD_OUT)):
    rows = [make_row(wording, animal) for wording in WORDINGS for animal in animals.split()]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
