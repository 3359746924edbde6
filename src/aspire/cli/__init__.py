"""The command line: one file per command, imported only when its command is called."""
