"""Measurements on a GPU: the fastest Config, saved times, and the memory bandwidth."""
