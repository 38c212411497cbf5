# SPDX-License-Identifier: Apache-2.0
"""Record of a run's rollouts: one Parquet file for each step, and the texts of tokens.

schema.py     columns, from columns.tsv
files.py      names, writing, reading, thinning and resuming: `RecordFolder`
tokens.py     token texts as bytes, and decoding with them: `TokenTable`
samples.py    rows as people read them
"""

from quadriga.observe.records.files import (
    STEP,
    VALIDATION,
    RecordFolder,
    StepRecord,
    read_facts,
)
from quadriga.observe.records.samples import samples_of, table_for_people
from quadriga.observe.records.schema import COLUMNS, SCHEMA, Column
from quadriga.observe.records.tokens import TokenTable, token_bytes
