"""`swift rollout`: engines behind HTTP, for trainers on other machines and for clients of OpenAI's API.

    app               the ASGI application: routes, middleware, errors as HTTP statuses
    access            bearer token, size limits of requests, the lease of the run that owns the weights
    service           state that all routes share: request queue of the engines, health, loaded weights
    infer             routes: sampling for trainers, state of the server
    openai, shapes    routes: OpenAI's API and the plain /generate; schemas of their requests
    chats, texts      messages and tool calls; tokenization and decoding
    events            streamed answers
    weights           routes: weights of whole models and of adapters
    control           routes: lease, pause, sleep, caches
    fingerprint       check of the base weights
    sampled_versions  policy versions of completions
    metrics           /metrics and the throughput in the log
    run, process      start of the engines; socket, signals, restart of the process

`swift.rollout.engines.request_queue` is the queue, `swift.rollout.engines.wire` has the schemas of server and client,
and `swift.rollout.engines.server_client` is the client.
"""
