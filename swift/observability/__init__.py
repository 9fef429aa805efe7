"""What a run says about itself: its folder, logs, numbers, curves, warnings and final summary.

A leaf package: everybody may import it, it imports nobody but `swift.errors` and `swift.types`. Observing never
blocks training and never changes it: nothing here draws a random number or touches a tensor.

    files            atomic writes, fsync, and disk-full as a ResourceError
    secrets          masks of tokens, keys and passwords
    run_dir          the folder of a run: version, lock, args.json, attempts.jsonl, logs
    rank_log         logs/attempt-<k>/rank-<r>.log
    jsonl            append-only rows that survive a kill, and their reader
    metrics          typed values of a step, combined into what a log line says; phase timers
    completions_log  completions.jsonl, written in the background
    progress         the bar of a terminal, or one line per log step
    plots            images/*.png
    health           warnings that name a cause
    summary          the last words of a run
"""
