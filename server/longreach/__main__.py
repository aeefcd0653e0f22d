"""`python -m longreach` is the `longreach` command."""

from longreach.cli import main

main()
