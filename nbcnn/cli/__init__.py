"""The commands: flags, messages, exit codes. Nothing here is imported by the library."""
