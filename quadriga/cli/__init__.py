# SPDX-License-Identifier: Apache-2.0
"""The commands. Each is a module with `main(argv) -> int`, imported on demand."""
