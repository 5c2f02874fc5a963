"""`python -m shardplug`: the same as the `shardplug` command."""

import sys

from shardplug.cli import main

sys.exit(main())
