"""`python3 -m hushfleet.release FILE.hfr RELEASES`: a board's first release, from its card; prints its version.

Only the hash is checked: who could change the release on the card could change `install.sh` as well. Every later
release must be signed (`slots.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from hushfleet.errors import HushfleetError
from hushfleet.release.archive import place


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python3 -m hushfleet.release FILE.hfr RELEASES", file=sys.stderr)
        return 2
    try:
        print(place(Path(sys.argv[1]), Path(sys.argv[2]), public_key=None).version)
    except HushfleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
