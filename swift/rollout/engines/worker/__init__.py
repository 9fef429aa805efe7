"""An engine in a process of its own: `WorkerEngine` here, any backend there.

    trainer                                guard                     host
    WorkerEngine --- starts --------->  ends its group  -- forks -->  InferenceEngine of the spec:
         |                                                            one thread drives it,
         |                                                            one reads the socket,
         +---------------- frames of JSON, file descriptors --------- one interrupts

`protocol` is what travels, `guard` sees to it that nothing is left of a worker, `host` is the child's side, `link` one
life of a child as the parent sees it, `client` the engine that outlives its processes, `weights` what it is sent.

`swift/rollout/engines/worker/__main__.py` starts in the guard and must load nothing heavy: the host's cores are set
before torch counts them.
"""
