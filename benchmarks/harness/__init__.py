"""What the benchmarks share: works, sides, turns, records and tables. It loads no model: commands do."""
