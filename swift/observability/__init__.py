"""The records of a run: its folder, logs, metrics, curves, health alerts and final summary.

A leaf package: any package may import it. Observing neither blocks nor changes training: nothing here draws a random
number or touches a tensor.

    files            atomic writes, fsync, and disk-full as a ResourceError
    secrets          masks of tokens, keys and passwords
    run_dir          the folder of a run: version, lock, args.json, attempts.jsonl, logs
    rank_log         logs/attempt-<k>/rank-<r>.log
    jsonl            append-only rows that survive a kill, and their reader
    metrics          typed values of a step, combined into the values of log lines; phase timers
    completions_log  completions.jsonl, written in the background
    progress         the bar of a terminal, or one line per log step
    pulse            the state of a step under way, in the bar or as a line after a silence
    zero_rewards     completions of functions that never reward, shown once
    plots            images/*.png
    health           alerts with a cause and a fix
    summary          the text at the end of a run
"""
