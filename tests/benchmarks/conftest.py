"""`benchmarks` is not installed with the project, and other packages bring a folder of that name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
