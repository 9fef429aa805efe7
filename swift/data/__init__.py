"""Datasets: from `--dataset` to prompts. Sources of rows, meaning of columns, order of use.

    spec ─► files, hub, reasoning_gym ─► records ─► column plan ─► Rows ─► PromptDataset ─► IndexedPrompts
    text    rows with file and line      good/bad    messages + columns     token ids        order, resume
                                                               └────────► StreamingPrompts

A row becomes `messages` (the prompt) and `columns` (all other columns under their own names, plain JSON values). There
are no silent guesses: an invalid row is counted and reported with its file and line, an ambiguous column is an error
that shows its fix, and the chosen mapping of columns is one line to print.
"""
