"""What the benchmark scripts share: the work, two contenders in processes of their own, statistics, records."""
