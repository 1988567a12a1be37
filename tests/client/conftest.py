"""Fixtures of the client tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # fake_fleet, a helper and no test
