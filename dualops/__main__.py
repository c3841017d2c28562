"""`python -m dualops`: see `dualops.cli`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line. Ctrl-C ends it with one line, also during its imports."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        print("dualops: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end


if __name__ == "__main__":
    sys.exit(main())
