# SPDX-License-Identifier: Apache-2.0
"""SGLang as a generation engine, beside this process or at a server. `library` is the one file that imports SGLang."""
