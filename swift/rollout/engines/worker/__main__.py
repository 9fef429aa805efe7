"""`python -m swift.rollout.engines.worker`: first process of a worker; see `guard`."""

import sys

from swift.rollout.engines.worker.guard import main

if __name__ == "__main__":
    main(sys.argv[1:])
