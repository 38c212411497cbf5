# SPDX-License-Identifier: Apache-2.0
"""Running programs that a model wrote: test cases, containment, and the two places where a program may run.

graders/code.py    reads the program and the tests, compares, scores
  run.py           the tests of one problem on this machine, or on a Sandbox Fusion server
    supervisor.py  the program that runs them here: one contained process a test, with its limits
    containment.py what such a process gives up before the program begins
"""
