# SPDX-License-Identifier: Apache-2.0
"""vLLM as a generation engine, in this process or beside it. `library` is the one file that imports vLLM."""
