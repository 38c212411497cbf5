# SPDX-License-Identifier: Apache-2.0
"""`python -m quadriga`: the command `quadriga`."""

import sys

from quadriga.cli.main import main

sys.exit(main())
