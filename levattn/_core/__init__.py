"""What all of the library stands on: arrays, threads, random numbers, states as bytes, progress."""
