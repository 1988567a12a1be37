"""``python -m allspark.cli``: what the launcher runs its processes with."""

import sys

from allspark.cli import main

sys.exit(main())
