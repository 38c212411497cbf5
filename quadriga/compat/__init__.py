# SPDX-License-Identifier: Apache-2.0
"""Other frameworks' contracts, adapted to ours; each is off unless it is asked for."""
