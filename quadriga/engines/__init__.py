# SPDX-License-Identifier: Apache-2.0
"""Training engines: the protocol, the loop above it, and the engines behind it."""
