"""Qwen3-0.6B shapes through shared memory, digest on and off, against the single-thread copy and Gloo.

python examples/bench_local.py [further options of ``weightbus bench``]
"""

import sys

from weightbus.cli import main

SETTINGS = "bench --model qwen3-0.6b --backend local --digest on --digest off --baseline copy --baseline copy-flat --baseline gloo --rounds 7"

if __name__ == "__main__":
    sys.argv[1:1] = SETTINGS.split()
    main()
