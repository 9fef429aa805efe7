"""From `--dataset` to prompts: where rows come from, what their columns mean, in which order they are used.

    spec ─► files, hub, reasoning_gym ─► records ─► column plan ─► Rows ─► PromptDataset ─► IndexedPrompts
    text    rows with file and line      good/bad    messages + columns     token ids        order, resume
                                                               └────────► StreamingPrompts

One row becomes `messages` (the prompt) and `columns` (all the rest, under the row's own names, plain JSON
values). Nothing is guessed quietly: a row that cannot be understood carries its file and line and is counted,
an ambiguous column is an error that shows its fix, and the mapping that was taken is one line to print.
"""
