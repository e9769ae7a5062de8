"""Programs that the benchmarks measure; each runs in its own processes, which `benchmarks.harness` controls."""
