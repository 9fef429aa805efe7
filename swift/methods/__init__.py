"""Methods of `swift rlhf` that learn from given answers, one file each: settings, loss, rows, TRL's defaults.

A file registers a `Method` in `methods`, as a plugin may; command line, help, dry run, `swift plan` and `swift
import-config` read it from there.
"""
