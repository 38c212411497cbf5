# SPDX-License-Identifier: Apache-2.0
"""A data set of your own: prompts from text files, one `prompt<TAB>answer` in each line."""

import json
from pathlib import Path

from quadriga.data import RLHFDataset


class TextLines(RLHFDataset):
    """Writes `FILE.jsonl` beside each text file and reads that; `+data.source=NAME` names the data source."""

    def __init__(self, data_files, tokenizer, config, processor=None, **options):
        files = [data_files] if isinstance(data_files, str) else data_files
        source = config.get("source", "alliteration")
        super().__init__(
            [str(rows_of(Path(file), source)) for file in files],
            tokenizer,
            config,
            processor,
            **options,
        )


def rows_of(file: Path, source: str) -> Path:
    """The rows of a text file, in the form that docs/data.md describes."""
    rows = []
    for line in file.read_text().splitlines():
        prompt, _, answer = line.partition("\t")
        rows.append(
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": answer},
            }
        )
    output = file.with_name(f"{file.name}.jsonl")
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return output
