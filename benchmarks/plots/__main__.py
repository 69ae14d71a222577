"""`python -m benchmarks.plots`: see draw.py."""

import sys

from benchmarks.plots.draw import main

sys.exit(main(sys.argv[1:]))
