"""Helpers that do not depend on a session: interrupts, threads, progress bars, row arithmetic, display, rendezvous."""
