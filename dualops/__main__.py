"""`python -m dualops`: see `dualops.cli`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line, which Ctrl-C ends with a line even while it is imported."""
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
