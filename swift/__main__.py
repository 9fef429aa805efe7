"""`python -m swift`: the same as the console script `swift`."""

import sys

from swift.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
