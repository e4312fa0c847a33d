"""The base of the library: arrays, threads, random numbers, states as bytes, progress."""
