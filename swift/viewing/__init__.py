"""`swift view RUN [RUN...]`: a local page over the files of runs, finished or live.

    command     the mode: folders, socket, ready line
    app         routes below a random token, all of them GET
    run         one run: what was read of it, renewed by one thread
    tail        new lines of a file that grows
    columns     values that are appended, and which of them count
    index       completions.jsonl: byte offsets, and the columns that filters need
    filters     which completions are meant, and their groups
    curves      logging.jsonl by metric, and what is marked beside it
    diagnosis   the causes that `swift doctor` finds
    tokens      tokens of a completion, from the record of rollouts
    images      images of prompts, from the files of the dataset
    difference  what differs between two texts
    page.html   the page: inline CSS and JavaScript, nothing from elsewhere

No file of a run is written, no path comes from the browser: runs are numbers, completions a step, a group and an index,
images a digest.
"""
