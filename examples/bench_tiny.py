"""20,000 tensors of 64 bytes: what a tensor costs, first and steady, over one copy of the same bytes.

python examples/bench_tiny.py [further options of ``weightbus bench``]
"""

import sys

from weightbus.cli import main

SETTINGS = "bench --model tiny-20000 --backend local --baseline copy --baseline gloo-packed --rounds 10"

if __name__ == "__main__":
    sys.argv[1:1] = SETTINGS.split()
    main()
