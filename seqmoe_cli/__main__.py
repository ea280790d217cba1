"""`python -m seqmoe_cli` is `seqmoe`."""

import sys

from seqmoe_cli.main import main

sys.exit(main())
