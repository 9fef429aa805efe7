"""`swift rollout`: engines behind HTTP, for trainers on other machines and for clients of OpenAI's API.

    app       routes, the bearer token, failures as HTTP statuses
    access    token, limits of bodies, the lease of the run that owns the weights
    service   what the routes share: the request queue of the engines, health, what is loaded
    infer     sampling for trainers, facts          openai, shapes   OpenAI's API and the plain /generate
    texts     tokenizer and template, in turns      events     answers as they grow      metrics   what was done
    weights   whole models and adapters             control          lease, pause, sleep, caches
    run       plan and engines                      process    socket, signals, a new process

`swift.rollout.engines.request_queue` is the queue, `swift.rollout.engines.wire` the shapes that both ends know, and
`swift.rollout.engines.server_client` the other end.
"""
