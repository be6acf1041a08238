"""python -m dualkv_compile demo|explain|bench|doctor."""

import sys

from dualkv_compile.cli import main

sys.exit(main())
