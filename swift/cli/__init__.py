"""The command line: `main` routes to one file per mode, `launcher` starts worker processes, `boundary` ends errors.

Nothing here imports torch before a mode needs it. A mode's file parses, checks and calls one function of the
layers below; those raise `SwiftError`, and only `boundary` prints errors and turns them into exit codes.
"""
