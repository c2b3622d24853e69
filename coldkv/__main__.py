"""`python -m coldkv`."""

import sys

from coldkv.cli import main

sys.exit(main())
