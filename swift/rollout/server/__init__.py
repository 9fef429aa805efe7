"""`swift rollout`: engines behind HTTP, for trainers on other machines and for everything that speaks OpenAI's API.

    HTTP --app--> routes --Service--> Front --one queue--> EnginePool --> one worker process per engine
                    |        |
                 limits    lease: which run owns the weights

`wire` is what both ends of the connection know, and loads no web framework; `swift.rollout.engines.remote` is the other
end. `front` is the queue and the one thread that calls the engines, `service` what the routes share, `updates` new
weights on their way, `run` the process around it. A file of routes per family of clients.
"""
