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


def rows(animals: str) -> list[dict]:
    """One row per animal and wording."""
    return [
        {
            "data_source": "alliteration",
            "prompt": [
                {
                    "role": "user",
                    "content": f"{wording.format(a)} in words that begin with {a[0].upper()}.",
                }
            ],
            "reward_model": {"style": "rule", "ground_truth": a[0]},
        }
        for wording in WORDINGS
        for a in animals.split()
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, animals in (("train", TRAIN), ("val", HELD_OUT)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(animals))
        )
