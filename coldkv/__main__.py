"""`python -m coldkv`."""

import sys

try:
    from coldkv.cli import main
except KeyboardInterrupt:  # Ctrl-C while Python is still importing
    sys.exit("coldkv: interrupted")

sys.exit(main())
