# SPDX-License-Identifier: Apache-2.0
"""Running programs that a model wrote: their tests, containment, and the places where they may run.

graders/code.py    reads the program and the tests, compares, scores
  run.py           runs the tests of one problem here, or on a Sandbox Fusion server
    supervisor.py  the process that runs them here: one contained process per test, with limits
    containment.py the rights that such a process gives up before the program begins
"""
