"""What the benchmark scripts share beyond `swift.bench`: the demo's model, a simulated engine, pages, records."""
