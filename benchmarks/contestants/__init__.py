"""The programs that are measured: each runs in processes of its own and is driven by `benchmarks.harness`."""
