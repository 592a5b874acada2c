"""Every command on a terminal: its parser, its last line, its completion."""
