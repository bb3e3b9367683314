"""The command line. Each command is one module with `add_arguments(parser)` and `run(args) -> exit code`."""
