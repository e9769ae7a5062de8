"""Helpers that know nothing of sessions: interrupts, threads, progress, row arithmetic, display, rendezvous."""
