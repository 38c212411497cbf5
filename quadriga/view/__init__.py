# SPDX-License-Identifier: Apache-2.0
"""A page that shows runs from their files alone: `quadriga view`.

runs.py       the runs of some folders: state, configuration, metrics
index.py      a row for each step and for each rollout, without tokens; kept in a cache folder
rollouts.py   rollouts of a step, and the tokens of one
images.py     images of a rollout's data row
health.py     what is wrong with a run, in words
lanes.py      where the time of a step went
ranks.py      times of the ranks
data.py       answers to the page's requests, as JSON
page.py       the page as one file, and the export
app.py        routes, and the check of callers
server.py     the server

Runs are only read. The index, which is outside of them, is the only thing that is written.
"""
