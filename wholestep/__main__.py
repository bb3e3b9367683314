"""`python -m wholestep`: the command line, from an installation or straight from a checkout."""

import sys

from wholestep.cli.main import main

sys.exit(main())
